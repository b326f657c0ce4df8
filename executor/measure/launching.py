"""What a fresh process takes from the cores until it can work: all that it has spent when it is ready."""

from __future__ import annotations

import time
from typing import Any

import ray

from executor.workers import Workers
from lab.measurement import Measurement

LAUNCHED = {
    "engine_launch": ("actor", "generate"),
    "trainer_launch": ("actor", "train"),
    "scorer_launch": ("reference", "score"),
    "process_launch": ("reward", "score"),
}
"""by op: the role and the work of a worker whose process is begun for it"""


def launches(workers: Workers) -> list[Measurement]:
    """One of each kind, one after the other, in the place of those that are there; a launch alone takes as long, give or
    take a tenth: imports and building use one thread."""
    names = {op: workers.scenario.team(*place)[0].name for op, place in LAUNCHED.items()}
    for name in names.values():
        ray.kill(workers.actors[name])
    return [
        Measurement(op=op, quantities={"calls": 1.0}, seconds=_launched(workers, name), source="sweep")
        for op, name in names.items()
    ]


def _launched(workers: Workers, name: str) -> float:
    actor = workers.begin(name)
    ray.get(actor.ready.remote())
    spent: float = ray.get(actor.__ray_call__.remote(_spent_s))
    return spent


def _spent_s(_: Any) -> float:
    return time.process_time()
