"""Training: advantages, and optimizer steps on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import simpy

from lab.measurement import grad_sync_quantities, optimizer_quantities, update_quantities
from lab.model import DTYPE_BYTES
from lab.offline import update_of
from lab.placement import Worker
from simulator.blocks import Ints
from simulator.collecting import ages
from simulator.microbatches import Passes, Plan, plan
from simulator.scoring import bubble
from simulator.transfers import Gradients, networked
from simulator.world import Lane, Process, World


class Barrier:
    """Ranks wait here for each other, again and again."""

    def __init__(self, env: simpy.Environment, parties: int) -> None:
        self._env, self._parties = env, parties
        self._waiting: list[simpy.Event] = []

    def wait(self) -> Process:
        """Ends when every rank has come; says whether this one was the last."""
        here = self._env.event()
        self._waiting.append(here)
        if len(self._waiting) == self._parties:
            ready, self._waiting = self._waiting, []
            for event in ready:
                event.succeed(event is here)
        return (yield here)


def advantage(world: World, step: int) -> Process:
    """On the actor's first rank."""
    worker, lengths = world.scenario.team("actor", "train")[0], world.ledger.lengths(step)
    tokens = int(lengths.sum())
    lane = Lane(world, "advantage", step, worker)
    quantities = {"calls": 1.0, "samples": float(len(lengths)), "tokens": float(tokens)}
    yield from world.spend(worker, "advantage", quantities)
    lane.end(tokens=tokens, samples=len(lengths), **ages(world, step))


def update(world: World, role: str, step: int, lengths: Ints) -> list[Process]:
    """One process for each rank of a role's trainer."""
    team = world.scenario.team(role, "train")
    barrier, gradients = Barrier(world.env, len(team)), None
    if _holders(team) > 1 and networked(world, team[0], "grad_sync"):
        gradients = Gradients(world, team[0], len(team), _gradient_bytes(world, role))
    made = plan(world.scenario, role, lengths, world.ledger.prompts(step))
    return [_rank(world, worker, rank, step, made, barrier, gradients) for rank, worker in enumerate(team)]


def _holders(team: Sequence[Worker]) -> int:
    """Ranks that average their gradients."""
    return len(team) * team[0].parallelism.context


def _gradient_bytes(world: World, role: str) -> float:
    return world.scenario.trainable_parameters(role) * DTYPE_BYTES[world.scenario.model(role).dtype]


def _rank(
    world: World, worker: Worker, rank: int, step: int, made: Plan, barrier: Barrier, gradients: Gradients | None,
) -> Process:  # fmt: skip
    scenario = world.scenario
    team, stage = scenario.team(worker.role, "train"), scenario.train(worker.role).zero_stage
    lane, epochs = Lane(world, update_of(worker.role), step, worker), scenario.algorithm.epochs
    size, ranks, tokens = _gradient_bytes(world, worker.role), _holders(team), 0
    trained = optimizer_quantities(scenario.trainable_parameters(worker.role), size, stage, ranks)
    for batch in made.passes * epochs:
        tokens += int(batch[rank].tokens.sum())
        last = yield from _microbatches(world, lane, batch[rank], gradients, made.many)
        if ranks > 1:
            synced = grad_sync_quantities(size, stage, ranks) | {"beside_s": last}
            yield from _reduce(world, lane, barrier, synced, gradients)
        yield from lane.op("optimizer", "optimizer", trained)
    host = update_quantities(made.num_samples, tokens, len(made.passes) * epochs, ranks)
    yield from world.spend(worker, "update_host", host)
    lane.end(tokens=tokens, samples=made.num_samples, **made.notes(rank))


def _microbatches(world: World, lane: Lane, passes: Passes, gradients: Gradients | None, many: bool) -> Process:
    """Forward and backward passes of one rank's part of a mini-batch; returns the seconds of the last backward pass.

    Where there are `many` in the update, all but the last one are told together.
    """
    start, last, merged = world.now, world.now, 0
    if many and len(passes) > 2 and world.exclusive(lane.worker):
        merged = len(passes) - 1
        yield from _merged(lane, passes.first(merged))
    for number, made in enumerate(passes.after(merged), start=merged + 1):
        for _ in range(world.scenario.algorithm.extra_forwards):
            yield from lane.op("forward", "logprob", made.quantities, tokens=made.tokens)
        yield from lane.op("forward", "forward", made.quantities, tokens=made.tokens)
        last = world.now
        if gradients is not None and number == len(passes):
            gradients.begin()
        yield from lane.op("backward", "backward", made.quantities, tokens=made.tokens)
    if gradients is not None and not len(passes):
        gradients.begin()
    last = world.now - last
    yield from bubble(lane, world.now - start, len(passes))
    return last


def _merged(lane: Lane, passes: Passes) -> Process:
    """Passes that nobody can come between, told as one of each kind."""
    kinds = [("forward", "logprob")] * lane.world.scenario.algorithm.extra_forwards
    for op, cost_op in [*kinds, ("forward", "forward"), ("backward", "backward")]:
        start, cost = lane.world.now, lane.world.costs.several(lane.worker, cost_op, passes.quantities)
        yield from lane.world.cores(lane.worker).work(lane.worker, cost_op, cost.seconds)
        lane.record(op, start, cost.extrapolated, tokens=int(passes.tokens.sum()), passes=len(passes))


def _reduce(
    world: World, lane: Lane, barrier: Barrier, quantities: Mapping[str, float], gradients: Gradients | None
) -> Process:
    """Gradients are averaged once every rank has its own; most of it beside the last backward pass, where that can be."""
    is_last, size = (yield from barrier.wait()), quantities["bytes"]
    if gradients is None:
        yield from lane.op("grad_sync", "grad_sync", quantities, bytes=size)
        return
    start, cost = world.now, world.cost(lane.worker, "grad_sync", quantities)
    if is_last:
        yield from gradients.finish()
    yield from barrier.wait()
    lane.record("grad_sync", start, cost.extrapolated, bytes=size, flows=gradients.num_flows)
