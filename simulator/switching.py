"""A pool changes what is loaded on it: some workers give way, then others take their turn, each at its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lab.placement import Worker
from lab.slices import spills
from profiles.memory import worker_footprint
from profiles.slices import asleep_bytes, loaded_bytes, spilled_bytes, trained_bytes
from simulator.world import Lane, Process, World

Move = tuple[str, str, Callable[[World, Worker], float]]
"""the op of the span, the op of its cost, and the bytes that it moves"""


def _loaded(world: World, worker: Worker) -> float:
    return loaded_bytes(worker, worker_footprint(world.scenario, worker))


def _trained(world: World, worker: Worker) -> float:
    return trained_bytes(world.scenario, worker, worker_footprint(world.scenario, worker))


def _engine(world: World, worker: Worker) -> float:
    return asleep_bytes(world.scenario, worker, worker_footprint(world.scenario, worker))


LEAVES: dict[tuple[str, str], tuple[Move, ...]] = {
    ("sleep", "generate"): (("sleep", "engine_sleep", _engine),),
    ("offload", "generate"): (("sleep", "engine_sleep", _engine),),
    ("offload", "train"): (("offload", "host_copy", _trained),),
    ("reload", "generate"): (("stop", "engine_stop", _loaded),),
    ("reload", "train"): (("save", "checkpoint", _trained), ("drop", "release", _loaded)),
    ("reload", "score"): (("drop", "release", _loaded),),
}
"""by `sharing.POOL.switch` and work: how a worker gives way. Frozen weights have a copy where they came from"""

COMES: dict[tuple[str, str], tuple[Move, ...]] = {
    ("sleep", "generate"): (("wake", "engine_wake", _engine),),
    ("offload", "generate"): (("wake", "engine_wake", _engine),),
    ("offload", "train"): (("onload", "host_copy", _loaded),),
    ("offload", "score"): (("onload", "host_copy", _loaded),),
    ("reload", "generate"): (("start", "engine_start", _loaded),),
    ("reload", "train"): (("restore", "trainer_start", _loaded),),
    ("reload", "score"): (("load", "scorer_start", _loaded),),
}
"""how it is loaded when its turn comes"""


def switch(world: World, name: str, step: int) -> list[Process]:
    """One process, of the node of this name: nobody comes before the last has left."""
    return [_switch(world, name, step)]


def _switch(world: World, name: str, step: int) -> Process:
    """With `reload` the step's samples are on disk meanwhile: an engine writes them, one of those who come reads them."""
    node, workers = world.dataflow.nodes[name], world.scenario.workers
    leaving = [workers[each] for each in node.workers if each in node.leaves]
    coming = [workers[each] for each in node.workers if each not in node.leaves]
    kept = spilled_bytes(world.scenario, step) if spills(world.scenario, leaving) else 0.0
    yield from _all(world, name, step, leaving, LEAVES, ("spill", "checkpoint", kept))
    yield from _all(world, name, step, coming, COMES, ("fetch", "checkpoint_read", kept))


def _all(
    world: World,
    name: str,
    step: int,
    workers: Sequence[Worker],
    moves: Mapping[tuple[str, str], tuple[Move, ...]],
    first: tuple[str, str, float],
) -> Process:
    """`first`: what the first of them does before: an op, its cost and its bytes; nothing where these are 0."""
    parts = [
        world.env.process(_move(world, name, step, worker, moves, first if i == 0 else None))
        for i, worker in enumerate(workers)
    ]
    yield world.env.all_of(parts)


def _move(
    world: World,
    name: str,
    step: int,
    worker: Worker,
    moves: Mapping[tuple[str, str], tuple[Move, ...]],
    first: tuple[str, str, float] | None,
) -> Process:
    lane, how = Lane(world, name, step, worker), world.scenario.sharing[worker.pool].switch
    if first is not None and first[2]:
        op, cost_op, size = first
        yield from lane.op(op, cost_op, {"calls": 1.0, "bytes": size}, bytes=size)
    for op, cost_op, amount in moves.get((str(how), worker.work), ()):
        size = amount(world, worker)
        yield from lane.op(op, cost_op, {"calls": 1.0, "bytes": size}, bytes=size)
    lane.end()
