"""A pool changes what is loaded on it: some workers give way, then others take their turn, each at its cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lab.placement import Worker
from profiles.memory import worker_footprint
from profiles.slices import asleep_bytes, loaded_bytes, trained_bytes
from simulator.world import Lane, Process, World

Move = tuple[str, str, Callable[[World, Worker], float]]
"""the op of the span, the op of its cost, and the bytes that it moves"""


def _loaded(world: World, worker: Worker) -> float:
    return loaded_bytes(worker, worker_footprint(world.scenario, worker))


def _trained(world: World, worker: Worker) -> float:
    return trained_bytes(world.scenario, worker, worker_footprint(world.scenario, worker))


def _engine(world: World, worker: Worker) -> float:
    return asleep_bytes(world.scenario, worker, worker_footprint(world.scenario, worker))


LEAVES: dict[tuple[str, str], Move] = {
    ("sleep", "generate"): ("sleep", "engine_sleep", _engine),
    ("offload", "generate"): ("sleep", "engine_sleep", _engine),
    ("offload", "train"): ("offload", "host_copy", _trained),
    ("reload", "train"): ("save", "checkpoint", _trained),
}
"""by `sharing.POOL.switch` and work: how a worker gives way. Frozen weights have a copy where they came from, so that
they are dropped at once; an engine that starts anew ends at once too"""

COMES: dict[tuple[str, str], Move] = {
    ("sleep", "generate"): ("wake", "engine_wake", _engine),
    ("offload", "generate"): ("wake", "engine_wake", _engine),
    ("offload", "train"): ("onload", "host_copy", _loaded),
    ("offload", "score"): ("onload", "host_copy", _loaded),
    ("reload", "generate"): ("start", "engine_start", _loaded),
    ("reload", "train"): ("load", "checkpoint_read", _loaded),
    ("reload", "score"): ("load", "checkpoint_read", _loaded),
}
"""how it is loaded when its turn comes"""


def switch(world: World, name: str, step: int) -> list[Process]:
    """One process, of the node of this name: nobody comes before the last has left."""
    return [_switch(world, name, step)]


def _switch(world: World, name: str, step: int) -> Process:
    node, workers = world.dataflow.nodes[name], world.scenario.workers
    leaving = [workers[each] for each in node.workers if each in node.leaves]
    coming = [workers[each] for each in node.workers if each not in node.leaves]
    yield from _all(world, name, step, leaving, LEAVES)
    yield from _all(world, name, step, coming, COMES)


def _all(world: World, name: str, step: int, workers: Sequence[Worker], moves: dict[tuple[str, str], Move]) -> Process:
    parts = [world.env.process(_move(world, name, step, worker, moves)) for worker in workers]
    yield world.env.all_of(parts)


def _move(world: World, name: str, step: int, worker: Worker, moves: dict[tuple[str, str], Move]) -> Process:
    lane, how = Lane(world, name, step, worker), world.scenario.sharing[worker.pool].switch
    found = moves.get((str(how), worker.work))
    if found is not None:
        op, cost_op, amount = found
        size = amount(world, worker)
        yield from lane.op(op, cost_op, {"calls": 1.0, "bytes": size}, bytes=size)
    lane.end()
