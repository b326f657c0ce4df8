"""Workers that give way and take their turn, as on a pool in time slices; all of this runs in a worker's own process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from executor.measure.plan import scenario
from executor.turns import Turn, come, heavy, leave
from lab.timeline import Span

REPEATS = 2


def turn_about(worker: Any, arch: str) -> list[Span]:
    """Spans of a worker of this architecture that leaves and comes back, a few times; it is of this architecture then.

    An engine stops and starts; a trainer saves its states, is dropped and restored; a frozen model is dropped and loaded.
    """
    worker.release()
    heavy(worker)
    worker.scenario = scenario(arch)
    worker.load()
    found: list[Span] = []
    with tempfile.TemporaryDirectory(prefix="lab-measure-") as folder:
        for step in range(REPEATS):
            turn = Turn(node="switch", step=step, policy_version=0, folder=Path(folder))
            found += leave(worker, turn)["spans"]
            _, info = come(worker, turn)
            found += info["spans"]
    return found
