"""Training: advantages, optimizer steps on every rank, and what follows them: weight sync and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import simpy

from lab.model import DTYPE_BYTES
from lab.placement import Worker
from lab.policies.microbatch import deal, minibatches, pack
from profiles.memory import ADAM_STATE_BYTES
from simulator.scoring import passes
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
    scenario, spec = world.scenario, world.scenario.spec(worker.role)
    ranks = len(scenario.team(worker.role, "train"))
    lane = Lane(world, f"update_{worker.role}", step, worker)
    batches = minibatches(len(lengths), scenario.update.minibatch_samples)
    tokens = 0
    for batch in batches * scenario.algorithm.ppo_epochs:
        mine = [lengths[batch[i]] for i in deal(len(batch), ranks)[rank]]
        tokens += sum(mine)
        for size, quantities in passes(spec, worker.role, mine, pack(mine, scenario.update.microbatch_tokens)):
            yield from lane.op("forward", "forward", quantities, tokens=size)
            yield from lane.op("backward", "backward", quantities, tokens=size)
        yield from _reduce(world, lane, ranks, barrier)
        yield from lane.op("optimizer", "optimizer", {"passes": 1.0, "parameters": float(spec.parameters)})
    samples = len(lengths) // ranks
    host = {"calls": 1.0, "minibatches": float(len(batches) * scenario.algorithm.ppo_epochs), "samples": float(samples)}
    yield from world.spend(worker, "update_host", host | {"tokens": float(tokens)})
    lane.end(tokens=tokens, samples=samples)


def _reduce(world: World, lane: Lane, ranks: int, barrier: Barrier) -> Process:
    """Gradients are averaged once every rank has its own."""
    if ranks == 1:
        return
    yield from barrier.wait()
    role = lane.worker.role
    size = world.scenario.spec(role).weight_bytes(world.scenario.model(role).dtype)
    yield from lane.op("grad_sync", "grad_sync", {"calls": 1.0, "bytes": size, "ranks": float(ranks)}, bytes=size)


def weight_sync(world: World, step: int) -> Process:
    """Trainer and engines are held until the last engine has the weights."""
    scenario = world.scenario
    sender = scenario.team("actor", "train")[0]
    lanes = [
        Lane(world, "weight_sync", step, worker)
        for worker in (*scenario.team("actor", "train"), *scenario.team("actor", "generate"))
    ]
    size = scenario.spec("actor").weight_bytes(scenario.model("actor").dtype)
    cost, start = world.cost(sender, "weight_sync", {"calls": 1.0, "bytes": size}), world.now
    yield from world.cores(sender).work(sender, "weight_sync", cost.seconds)
    for lane in lanes:
        lane.record("transfer", start, cost.extrapolated, bytes=size)
        lane.end()


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
    """Weights in their dtype and Adam's states: two moments, and an fp32 copy where the weights are narrower."""
    scenario = world.scenario
    dtype = scenario.model(worker.role).dtype
    states = ADAM_STATE_BYTES - (4.0 if dtype == "float32" else 0.0)
    return scenario.spec(worker.role).parameters * (DTYPE_BYTES[dtype] + states)
