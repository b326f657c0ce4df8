"""Which processes a run has: `processes.json` in its folder, as long as it goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from lab.runs import write_atomically

FILE = "processes.json"
DRIVER, BUFFER = "driver", "buffer"


def write(folder: Path, workers: Mapping[str, int]) -> None:
    """The driver is this process; `workers`: pids by name. Raises OSError."""
    write_atomically(folder / FILE, json.dumps({DRIVER: os.getpid(), **workers}, indent=1).encode())


def read(folder: Path) -> dict[str, int]:
    """Pids by name: `driver`, and the workers as far as they are ready; empty where no process runs it."""
    try:
        found = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(name): int(pid) for name, pid in found.items()} if isinstance(found, dict) else {}


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """This process drives the run in that folder meanwhile."""
    write(folder, {})
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / FILE).unlink(missing_ok=True)
