"""What passes until a fresh process stands in the place of one that is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.placement import Worker
from simulator.cores import Process
from simulator.scorers import kind

if TYPE_CHECKING:
    from simulator.world import World

UNMEASURED_S = 60.0
"""of a process whose profile does not say; order of magnitude of a large model's engine or trainer: processes, imports,
communicators, memory"""
BARE = "process_launch"
"""of a process without a model"""


def op_of(world: World, worker: Worker) -> str:
    """The op that a fresh process of a worker is."""
    if worker.work == "generate":
        return "engine_launch"
    if worker.work == "train":
        return "trainer_launch"
    return "scorer_launch" if kind(world.scenario, worker.role) in ("model", "head") else BARE


def launch(world: World, worker: Worker, op: str, stated_s: float | None) -> Process:
    """Ends when the process can work: after what is stated, else after what was measured, which on a CPU takes a core.

    A device without a measurement: UNMEASURED_S.
    """
    if stated_s is None and world.costs.measured(worker, op):
        seconds = world.cost(worker, op, {"calls": 1.0}).seconds
        if world.on_cpu(worker):
            yield from world.cores(worker).work(worker, op, seconds, threads=1)
        else:
            yield world.env.timeout(seconds)
    else:
        yield world.env.timeout(UNMEASURED_S if stated_s is None else stated_s)


def everybody(world: World, stated_s: float | None) -> Process:
    """Ends when all workers of a run have fresh processes, which start side by side."""
    if stated_s is not None:
        yield world.env.timeout(stated_s)
        return
    workers = world.scenario.workers.values()
    yield world.env.all_of([world.env.process(launch(world, one, op_of(world, one), None)) for one in workers])
