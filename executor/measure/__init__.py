"""Measures what real operations of the executor's workers cost on this machine.

The very workers of a run are started, in Ray, and taken through a designed sweep of shapes that comes from no
scenario file, alone and beside a busy core. What comes back are the Measurements that profiles are fitted to, some
held out from fitting, tables of torch.profiler, and the state of the machine meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from executor.measure.journal import Found, Journal
from executor.measure.parts import Progress, planned, run
from executor.measure.points import collapse

__all__ = ["Found", "Progress", "collapse", "measure", "num_finished", "num_units"]


def measure(
    arch: str = "tiny-llama",
    quick: bool = True,
    progress: Progress | None = None,
    *,
    journal: Path,
    identity: dict[str, Any],
    fresh: bool = False,
) -> Found:
    """Measurements of every op on the cores of this machine; about 110 s where quick, else some seven minutes.

    What is measured is in the file `journal` at once; a sweep of the same `identity` (machine, software) that was
    interrupted goes on after its last unit, unless `fresh`. Quick measures one architecture in three rounds, and two ranks.
    Seconds are medians of repeats.
    """
    kept = Journal.open(journal, _whole(identity, arch, quick), fresh)
    run(planned(arch, quick), kept, progress or (lambda *_: None))
    units = list(kept.units.values())
    return Found(
        points=collapse(point for unit in units for point in unit.points),
        operators=[row for unit in units for row in unit.operators],
        states=[state | {"unit": unit.unit} for unit in units for state in unit.states],
        notes=list(dict.fromkeys(note for unit in units for note in unit.notes)),
    )


def num_finished(journal: Path, identity: dict[str, Any], arch: str, quick: bool) -> int:
    """How many units of this very sweep an earlier call has left in `journal`."""
    kept = Journal(journal, _whole(identity, arch, quick))
    kept.read()
    return len(kept.units)


def _whole(identity: dict[str, Any], arch: str, quick: bool) -> dict[str, Any]:
    return identity | {"arch": arch, "quick": quick}


def num_units(arch: str, quick: bool) -> int:
    """How many units a whole sweep takes."""
    return sum(len(part.units) for part in planned(arch, quick))
