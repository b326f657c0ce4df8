"""Training: advantages, optimizer steps on every rank, and what follows them: weight sync and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import simpy

from lab.measurement import zero_quantities
from lab.model import DTYPE_BYTES
from lab.placement import Worker
from lab.policies.microbatch import deal, minibatches, pack
from profiles.memory import ADAM_STATE_BYTES
from simulator.scoring import bubble, passes
from simulator.world import Lane, Process, World


class Barrier:
    """Ranks wait here for each other, again and again."""

    def __init__(self, env: simpy.Environment, parties: int) -> None:
        self._env, self._parties = env, parties
        self._waiting: list[simpy.Event] = []

    def wait(self) -> Process:
        """Ends when every rank has come."""
        here = self._env.event()
        self._waiting.append(here)
        if len(self._waiting) == self._parties:
            ready, self._waiting = self._waiting, []
            for event in ready:
                event.succeed()
        yield here


def advantage(world: World, step: int, lengths: Sequence[int]) -> Process:
    """On the actor's first rank."""
    worker = world.scenario.team("actor", "train")[0]
    lane = Lane(world, "advantage", step, worker)
    quantities = {"calls": 1.0, "samples": float(len(lengths)), "tokens": float(sum(lengths))}
    yield from world.spend(worker, "advantage", quantities)
    lane.end(tokens=sum(lengths), samples=len(lengths))


def update(world: World, role: str, step: int, lengths: Sequence[int]) -> list[Process]:
    """One process for each rank of a role's trainer."""
    team = world.scenario.team(role, "train")
    barrier = Barrier(world.env, len(team))
    return [_rank(world, worker, rank, step, lengths, barrier) for rank, worker in enumerate(team)]


def _rank(world: World, worker: Worker, rank: int, step: int, lengths: Sequence[int], barrier: Barrier) -> Process:
    scenario = world.scenario
    ranks, stage = len(scenario.team(worker.role, "train")), scenario.train(worker.role).zero_stage
    lane = Lane(world, f"update_{worker.role}", step, worker)
    batches = minibatches(len(lengths), scenario.update.minibatch_samples)
    trained = {"passes": 1.0, "parameters": float(scenario.trainable_parameters(worker.role))} | zero_quantities(stage)
    tokens = 0
    for batch in batches * scenario.algorithm.ppo_epochs:
        mine = [lengths[batch[i]] for i in deal(len(batch), ranks)[rank]]
        tokens += sum(mine)
        last = yield from _microbatches(world, lane, mine, stage)
        yield from _reduce(world, lane, ranks, barrier, last)
        yield from lane.op("optimizer", "optimizer", trained)
    samples = len(lengths) // ranks
    host = {"calls": 1.0, "minibatches": float(len(batches) * scenario.algorithm.ppo_epochs), "samples": float(samples)}
    yield from world.spend(worker, "update_host", host | {"tokens": float(tokens)})
    lane.end(tokens=tokens, samples=samples)


def _microbatches(world: World, lane: Lane, lengths: Sequence[int], zero_stage: int) -> Process:
    """Forward and backward passes of one rank's part of a mini-batch; returns the seconds of the last backward pass."""
    groups, start, last = pack(lengths, world.scenario.update.microbatch_tokens), world.now, world.now
    spec, role = world.scenario.spec(lane.worker.role), lane.worker.role
    for size, quantities in passes(spec, role, lengths, groups, zero_stage):
        yield from lane.op("forward", "forward", quantities, tokens=size)
        last = world.now
        yield from lane.op("backward", "backward", quantities, tokens=size)
    last = world.now - last
    yield from bubble(lane, world.now - start, len(groups))
    return last


def _reduce(world: World, lane: Lane, ranks: int, barrier: Barrier, beside_s: float) -> Process:
    """Gradients are averaged once every rank has its own; most of it beside the last backward pass, where that can be."""
    holders = ranks * lane.worker.parallelism.context
    if holders == 1:
        return
    yield from barrier.wait()
    scenario, role = world.scenario, lane.worker.role
    size = scenario.trainable_parameters(role) * DTYPE_BYTES[scenario.model(role).dtype]
    quantities = {"calls": 1.0, "bytes": size, "ranks": float(holders), "beside_s": beside_s}
    yield from lane.op("grad_sync", "grad_sync", quantities, bytes=size)


def weight_sync(world: World, step: int) -> Process:
    """Trainer and engines are held until the last engine has the weights: all of them, or the adapters."""
    scenario = world.scenario
    trainers, engines = scenario.team("actor", "train"), scenario.team("actor", "generate")
    own = [Lane(world, "weight_sync", step, worker) for worker in trainers]
    others = [Lane(world, "weight_sync", step, worker) for worker in engines]
    size = scenario.trainable_parameters("actor") * DTYPE_BYTES[scenario.model("actor").dtype]
    if sharded(world, trainers[0]):
        yield from _together(world, own, trainers[0], "reshard", "reshard", size)
    yield from _together(world, own + others, trainers[0], "transfer", "weight_sync", size)
    yield world.env.all_of([world.env.process(_take(world, lane, size)) for lane in others])
    for lane in own + others:
        lane.end()


def _together(world: World, lanes: Sequence[Lane], payer: Worker, op: str, cost_op: str, size: float) -> Process:
    """An op that several lanes are held by and one worker is charged for."""
    cost, start = world.cost(payer, cost_op, {"calls": 1.0, "bytes": size}), world.now
    yield from world.cores(payer).work(payer, cost_op, cost.seconds)
    for lane in lanes:
        lane.record(op, start, cost.extrapolated, bytes=size)


def _take(world: World, lane: Lane, size: float) -> Process:
    """An engine of another dtype converts what it got, and packs weights of eight bits anew."""
    dtype, sent = lane.worker.dtype, world.scenario.model("actor").dtype
    if dtype == sent or world.scenario.model("actor").lora is not None:
        return
    kept = size * DTYPE_BYTES[dtype] / DTYPE_BYTES[sent]
    yield from lane.op("convert", "convert", {"calls": 1.0, "bytes": size + kept}, bytes=size + kept)
    if DTYPE_BYTES[dtype] < 2:
        yield from lane.op("engine_rebuild", "engine_rebuild", {"calls": 1.0, "bytes": 2 * kept}, bytes=2 * kept)


def sharded(world: World, worker: Worker) -> bool:
    """Whether no single device of a trainer has all of its weights."""
    spread, ranks = worker.parallelism, len(world.scenario.team(worker.role, "train"))
    whole = spread.tensor * spread.pipeline * spread.expert == 1
    return not whole or (world.scenario.train(worker.role).zero_stage == 3 and ranks * spread.context > 1)


def checkpoint(world: World, step: int) -> list[Process]:
    """One process for each trainer rank that writes."""
    teams = [world.scenario.team(role, "train") for role in ("actor", "critic")]
    return [_write(world, worker, len(team), step) for team in teams for worker in team]


def _write(world: World, worker: Worker, ranks: int, step: int) -> Process:
    lane = Lane(world, "checkpoint", step, worker)
    size = state_bytes(world, worker) / ranks
    yield from lane.op("write", "checkpoint", {"calls": 1.0, "bytes": size}, bytes=size)
    lane.end()


def state_bytes(world: World, worker: Worker) -> float:
    """Trained weights in their dtype and Adam's states: two moments, and an fp32 copy where weights are narrower."""
    scenario = world.scenario
    dtype = scenario.model(worker.role).dtype
    states = ADAM_STATE_BYTES - (4.0 if dtype == "float32" else 0.0)
    return scenario.trainable_parameters(worker.role) * (DTYPE_BYTES[dtype] + states)
