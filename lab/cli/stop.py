from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that `lab execute` is working on.")]
_POLL_S = 0.1


def stop(
    run: Run,
    now: Annotated[bool, typer.Option("--now", help="Without a last checkpoint; what is under way is lost.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=0.0, help="Seconds to wait for the end.")] = 600.0,
) -> None:
    """End a run in order: no new rollout, no new step, a last checkpoint, and its processes gone."""
    from lab import runs
    from lab.cli.show import note
    from lab.errors import InputError

    driver = runs.holder(run)
    note(f"stopping {run}: process {driver}")
    _ask(driver, 2 if now else 1)
    end = time.monotonic() + timeout
    while runs.is_held(run):
        if time.monotonic() > end:
            problem, remedy = f"process {driver} still runs it after {timeout:g} s", "wait longer, or use --now"
            raise InputError(file=str(run), problem=problem, remedy=remedy)
        time.sleep(_POLL_S)
    header = runs.read(run).header
    note(f"{header.status} after {len(header.learning)} of {header.num_steps} steps")


def _ask(driver: int, times: int) -> None:
    """Sends the driver so many interrupts, as Ctrl-C would."""
    for number in range(times):
        if number:
            time.sleep(_POLL_S)
        try:
            os.kill(driver, signal.SIGINT)
        except ProcessLookupError:
            return
