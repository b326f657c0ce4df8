"""The `lab` command. One file a subcommand; what they need is imported when they run."""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Callable
from typing import Any

import typer

from lab.errors import InputError, RunStuck

app = typer.Typer(
    name="lab",
    help="Write one RLHF scenario, see it simulated and see it run, and know why the two differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS = (
    "simulate", "execute", "compare", "run", "profile", "calibrate", "validate", "fit-memory", "report", "recheck", "claims",
    "dashboard", "doctor", "schema", "stop", "ui",
)  # fmt: skip

for _name in COMMANDS:
    _function = _name.replace("-", "_")
    _module = importlib.import_module(f"lab.cli.{_function}")
    app.command(_name)(getattr(_module, _function))


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; exit status 0 done, 1 the run failed, 2 the user's input is wrong."""
    sys.exit(told(lambda: app(args=arguments, standalone_mode=True)))


_REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
"""what a disk may say to a write"""


def told(command: Callable[[], Any]) -> Any:
    """What a command returns; a user's mistake becomes one message and exit status 2, a run that is stuck 1, and so does
    what a disk refuses."""
    try:
        return command()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunStuck as error:
        print(f"the run is stuck: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        place = f"{error.filename}: " if error.filename else ""
        print(f"error: {place}{error.strerror}\n  remedy: make room, or write to another folder", file=sys.stderr)
        return 1
