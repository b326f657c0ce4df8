"""Training: advantages, optimizer steps on every rank, and what follows them: weight sync and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import simpy

from lab.measurement import zero_quantities
from lab.model import DTYPE_BYTES
from lab.placement import Worker
from lab.policies.microbatch import deal, minibatches, pack
from profiles.memory import ADAM_STATE_BYTES
from simulator.network import Flows
from simulator.scoring import bubble, passes
from simulator.transfers import Gradients, broadcast, networked, per_tensor, written
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
    barrier, gradients = Barrier(world.env, len(team)), None
    if _holders(team) > 1 and networked(world, team[0], "grad_sync"):
        gradients = Gradients(world, team[0], len(team), _gradient_bytes(world, role))
    return [_rank(world, worker, rank, step, lengths, barrier, gradients) for rank, worker in enumerate(team)]


def _holders(team: Sequence[Worker]) -> int:
    """Ranks that average their gradients."""
    return len(team) * team[0].parallelism.context


def _gradient_bytes(world: World, role: str) -> float:
    return world.scenario.trainable_parameters(role) * DTYPE_BYTES[world.scenario.model(role).dtype]


def _rank(
    world: World, worker: Worker, rank: int, step: int, lengths: Sequence[int], barrier: Barrier,
    gradients: Gradients | None,
) -> Process:  # fmt: skip
    scenario = world.scenario
    team, stage = scenario.team(worker.role, "train"), scenario.train(worker.role).zero_stage
    ranks = len(team)
    lane = Lane(world, f"update_{worker.role}", step, worker)
    batches = minibatches(len(lengths), scenario.update.minibatch_samples)
    trained = {"passes": 1.0, "parameters": float(scenario.trainable_parameters(worker.role))} | zero_quantities(stage)
    tokens = 0
    for batch in batches * scenario.algorithm.ppo_epochs:
        mine = [lengths[batch[i]] for i in deal(len(batch), ranks)[rank]]
        tokens += sum(mine)
        last = yield from _microbatches(world, lane, mine, stage, gradients)
        if _holders(team) > 1:
            yield from _reduce(world, lane, _holders(team), barrier, last, gradients)
        yield from lane.op("optimizer", "optimizer", trained)
    samples = len(lengths) // ranks
    host = {"calls": 1.0, "minibatches": float(len(batches) * scenario.algorithm.ppo_epochs), "samples": float(samples)}
    yield from world.spend(worker, "update_host", host | {"tokens": float(tokens)})
    lane.end(tokens=tokens, samples=samples)


def _microbatches(
    world: World, lane: Lane, lengths: Sequence[int], zero_stage: int, gradients: Gradients | None
) -> Process:
    """Forward and backward passes of one rank's part of a mini-batch; returns the seconds of the last backward pass."""
    groups, start, last = pack(lengths, world.scenario.update.microbatch_tokens), world.now, world.now
    spec, role = world.scenario.spec(lane.worker.role), lane.worker.role
    for number, (size, quantities) in enumerate(passes(spec, role, lengths, groups, zero_stage), start=1):
        yield from lane.op("forward", "forward", quantities, tokens=size)
        last = world.now
        if gradients is not None and number == len(groups):
            gradients.begin()
        yield from lane.op("backward", "backward", quantities, tokens=size)
    if gradients is not None and not groups:
        gradients.begin()
    last = world.now - last
    yield from bubble(lane, world.now - start, len(groups))
    return last


def _reduce(
    world: World, lane: Lane, holders: int, barrier: Barrier, beside_s: float, gradients: Gradients | None
) -> Process:
    """Gradients are averaged once every rank has its own; most of it beside the last backward pass, where that can be."""
    is_last, size = (yield from barrier.wait()), _gradient_bytes(world, lane.worker.role)
    quantities = {"calls": 1.0, "bytes": size, "ranks": float(holders), "beside_s": beside_s}
    if gradients is None:
        yield from lane.op("grad_sync", "grad_sync", quantities, bytes=size)
        return
    start, cost = world.now, world.cost(lane.worker, "grad_sync", quantities)
    if is_last:
        yield from gradients.finish()
    yield from barrier.wait()
    lane.record("grad_sync", start, cost.extrapolated, bytes=size, flows=gradients.num_flows)


def weight_sync(world: World, step: int) -> Process:
    """Trainer and engines are held until the last engine has the weights: all of them, or the adapters."""
    scenario = world.scenario
    trainers, engines = scenario.team("actor", "train"), scenario.team("actor", "generate")
    own = [Lane(world, "weight_sync", step, worker) for worker in trainers]
    others = [Lane(world, "weight_sync", step, worker) for worker in engines]
    size = scenario.trainable_parameters("actor") * DTYPE_BYTES[scenario.model("actor").dtype]
    if sharded(world, trainers[0]):
        yield from _together(world, own, trainers[0], "reshard", "reshard", size)
    yield from _transfer(world, own + others, trainers[0], size)
    yield world.env.all_of([world.env.process(_take(world, lane, size)) for lane in others])
    for lane in own + others:
        lane.end()


def _transfer(world: World, lanes: Sequence[Lane], sender: Worker, size: float) -> Process:
    """Weights on their way to the engines."""
    cost, start = world.cost(sender, "weight_sync", {"calls": 1.0, "bytes": size}), world.now
    rounds: Sequence[Flows] = ()
    if networked(world, sender, "weight_sync"):
        rounds = broadcast(world, sender, size, cost.seconds)
    if rounds:
        yield world.env.timeout(per_tensor(world, sender))
        yield from world.network.play(rounds)
    else:
        yield from world.cores(sender).work(sender, "weight_sync", cost.seconds)
    notes = {"flows": sum(len(flows) for flows in rounds)} if rounds else {}
    for lane in lanes:
        lane.record("transfer", start, cost.extrapolated, bytes=size, **notes)


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
    quantities = {"calls": 1.0, "bytes": size}
    if networked(world, worker, "checkpoint"):
        start, flows = world.now, written(world, worker, size)
        extrapolated = world.cost(worker, "checkpoint", quantities).extrapolated
        yield from world.network.send_all(flows)
        lane.record("write", start, extrapolated, bytes=size, flows=len(flows))
    else:
        yield from lane.op("write", "checkpoint", quantities, bytes=size)
    lane.end()


def state_bytes(world: World, worker: Worker) -> float:
    """Trained weights in their dtype and Adam's states: two moments, and an fp32 copy where weights are narrower."""
    scenario = world.scenario
    dtype = scenario.model(worker.role).dtype
    states = ADAM_STATE_BYTES - (4.0 if dtype == "float32" else 0.0)
    return scenario.trainable_parameters(worker.role) * (DTYPE_BYTES[dtype] + states)
