"""The trainer's side of the publication: new weights are made ready, and pushed to the engines or left where they fetch them.

A push holds trainer and engines until all have the weights. Otherwise the trainer leaves them in its host's memory, or in
the store of its site, and engines fetch them when they hear of them or when they look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import simpy

from lab.copies import Copies, Place, Source
from lab.errors import RunStuck
from lab.placement import Worker
from lab.policies.weight_sync import WeightsReady, barrier
from simulator.network import Flows
from simulator.publication import Meeting
from simulator.receiving import place_of, waits_for_all
from simulator.transfers import (
    broadcast,
    gathered,
    loaded_bytes,
    networked,
    on_core,
    per_tensor,
    whole_bytes,
    written,
)
from simulator.world import Lane, Process, World


def weight_sync(world: World, step: int) -> list[Process]:
    """The trainer, and where the next step waits for them all engines."""
    publication, version = world.publication, world.dataflow.policy_version("weight_sync", step)
    publication.open(version)
    parts = [publish(world, step)]
    if waits_for_all(world):
        parts += [publication.receivers[name].take_part(version) for name in publication.expected]
    return parts


def publish(world: World, step: int) -> Process:
    """Trainers are held until the weights are where engines can have them; with a barrier, until engines have them."""
    publication, pushes = world.publication, world.scenario.weight_sync.trigger == "push"
    own = [Lane(world, "weight_sync", step, worker) for worker in world.scenario.team("actor", "train")]
    version = world.dataflow.policy_version("weight_sync", step)
    yield from _prepare(world, own)
    notes: dict[str, Any] = {}
    if pushes:
        assert publication.meeting is not None, "`open` comes first"
        yield from _push(world, own, publication.meeting)
    else:
        source = yield from _offer(world, own)
        publication.publish(version, Copies(source, world.scenario.weight_sync.route == "tree"))
        publication.announce(WeightsReady(version=version, place=source.name, digest=f"{version}"))
        if waits_for_all(world):
            notes = yield from _barrier(world, step, version)
    for lane in own:
        lane.end(**notes)
    if publication.meeting is not None:
        publication.meeting.over.succeed()
        publication.meeting = None


def _prepare(world: World, own: Sequence[Lane]) -> Process:
    """Whole weights on the first rank, unless every rank writes its own; less of them where not all is sent."""
    sender, rule, whole = own[0].worker, world.scenario.weight_sync, whole_bytes(world)
    ranks = len(own) if rule.transport == "store" else 1
    if rule.transport != "store" and sharded(world, sender):
        yield from _reshard(world, own, whole)
    sent = world.publication.payload_bytes
    if rule.payload == "delta":  # the version before lies in host memory
        costs = {"host_copy": whole / ranks, "convert": (whole + sent) / ranks}
        yield from _together(world, own, sender, "diff", costs)
    if rule.payload == "int8":
        yield from _together(world, own, sender, "quantize", {"convert": (whole + sent) / ranks})


def _reshard(world: World, own: Sequence[Lane], whole: float) -> Process:
    """The shards of all ranks are gathered on the first."""
    sender, start = own[0].worker, world.now
    cost = world.cost(sender, "reshard", {"calls": 1.0, "bytes": whole})
    if networked(world, sender, "reshard"):
        flows = gathered(world, sender, whole, cost.seconds)
        yield from world.network.send_all(flows)
    else:
        yield from world.cores(sender).work(sender, "reshard", cost.seconds)
    for lane in own:
        lane.record("reshard", start, cost.extrapolated, bytes=whole)


def _push(world: World, own: Sequence[Lane], meeting: Meeting) -> Process:
    """A broadcast to all engines, once all of them stand still."""
    yield meeting.complete
    lanes, size = [*own, *meeting.lanes.values()], world.publication.payload_bytes
    yield from _broadcast(world, lanes, own[0].worker, size)
    world.publication.publish(meeting.version, None)
    meeting.arrived.succeed()
    if waits_for_all(world):
        yield meeting.ready


def _broadcast(world: World, lanes: Sequence[Lane], sender: Worker, size: float) -> Process:
    """Weights on their way to the engines."""
    charged = loaded_bytes(world, sender, size)
    cost, start = world.cost(sender, "weight_sync", {"calls": 1.0, "bytes": charged}), world.now
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


def _offer(world: World, own: Sequence[Lane]) -> Process:
    """The weights are left where engines fetch them; returns that place."""
    size, here = world.publication.payload_bytes, place_of(world, own[0].worker)
    if world.scenario.weight_sync.transport != "store":
        costs = {"host_copy": size} | ({"convert": size} if on_core(world, own[0].worker) else {})  # hashed there
        yield from _together(world, own, own[0].worker, "snapshot", costs)
        shared = world.scenario.weight_sync.transport == "object_store"
        return Source(place=here, name=here.machine, ends=(here.machine,), many=shared)
    yield world.env.all_of([world.env.process(_upload(world, lane, size / len(own))) for lane in own])
    return Source(place=Place(site=here.site, machine=""), name=here.site)


def _upload(world: World, lane: Lane, size: float) -> Process:
    """A rank's part goes to the storage of its site."""
    quantities, start = {"calls": 1.0, "bytes": size}, world.now
    if networked(world, lane.worker, "checkpoint"):
        cost = world.cost(lane.worker, "checkpoint", quantities)
        flows = written(world, lane.worker, size)
        yield from world.network.send_all(flows)
        lane.record("upload", start, cost.extrapolated, bytes=size, flows=len(flows))
    else:
        yield from lane.op("upload", "checkpoint", quantities, bytes=size)


def _barrier(world: World, step: int, version: int) -> Process:
    """Waits for all engines, or names those that are late and goes on without them."""
    publication, rule, start = world.publication, world.scenario.weight_sync, world.now
    everybody: simpy.Event = world.env.process(publication.everybody(version))
    if rule.barrier_timeout is not None:
        everybody |= world.env.timeout(rule.barrier_timeout)
    yield everybody
    expected = publication.expected
    here = set(expected) - set(publication.missing(version))
    said = barrier(expected, here, world.now - start, rule.barrier_timeout or float("inf"))
    publication.absent = frozenset(i for i, name in enumerate(publication.receivers) if name in said.absent)
    if said.absent and not here:
        late = f"no engine has them {rule.barrier_timeout:g} s after their publication (weight_sync.barrier_timeout)"
        raise RunStuck(f"rollout waits for weight_sync of step {step}: {late}")
    for name in said.absent:
        publication.receivers[name].give_up()
    return {"absent": list(said.absent)} if said.absent else {}


def _together(world: World, lanes: Sequence[Lane], payer: Worker, op: str, costs: dict[str, float]) -> Process:
    """An op that several lanes are held by and one worker is charged for; `costs`: bytes by op of the cost model."""
    start, extrapolated = world.now, False
    for cost_op, size in costs.items():
        cost = world.cost(payer, cost_op, {"calls": 1.0, "bytes": size})
        yield from world.cores(payer).work(payer, cost_op, cost.seconds)
        extrapolated = extrapolated or cost.extrapolated
    for lane in lanes:
        lane.record(op, start, extrapolated, bytes=max(costs.values()))


def sharded(world: World, worker: Worker) -> bool:
    """Whether no single device of a trainer has all of its weights."""
    spread, ranks = worker.parallelism, len(world.scenario.team(worker.role, "train"))
    whole = spread.tensor * spread.pipeline * spread.expert == 1
    return not whole or (world.scenario.train(worker.role).zero_stage == 3 and ranks * spread.context > 1)
