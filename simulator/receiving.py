"""An engine's side of the publication: when it takes new weights, how they come, and what it does with them."""

from __future__ import annotations

from typing import Any

import simpy

from lab.copies import Place, Source
from lab.model import DTYPE_BYTES
from lab.placement import Worker
from lab.policies import weight_sync as policy
from lab.policies.weight_sync import Act, Seen, Sync, WeightsReady
from profiles.cost import Cost
from simulator.publication import Meeting, acquire, first_version
from simulator.transfers import fetch_op, fetched, loaded_bytes, networked, tensors_s, whole_bytes
from simulator.world import Lane, Process, World


def rule_of(world: World) -> Sync:
    """The scenario's rule, as the policies take it."""
    chosen = world.scenario.weight_sync
    return Sync(trigger=chosen.trigger, every_s=chosen.every, in_flight=chosen.in_flight, kv=chosen.kv)


def waits_for_all(world: World) -> bool:
    """Whether nobody generates under new weights before every engine has them."""
    return world.scenario.schedule.mode != "asynchronous"


def receivers(world: World) -> dict[str, Receiver]:
    """One for each engine, by its name."""
    engines = world.scenario.team("actor", "generate")
    return {worker.name: Receiver(world, worker, index, len(engines)) for index, worker in enumerate(engines)}


class Receiver:
    """What one engine has, and what it knows of.

    An engine that works without a barrier asks `due()` at its start, after each `news()` and when fewer samples run:
    "drain": take no new sample and go on; "load": stand still and `yield from load()`; "none": go on.
    """

    def __init__(self, world: World, worker: Worker, index: int, num_engines: int) -> None:
        self.worker = worker
        self.held = self.told = first_version(world)
        """version in the engine, and the latest that it knows of"""
        self._world, self._rule = world, rule_of(world)
        self._index, self._num_engines = index, num_engines
        self._looked = 0.0
        self._heard = world.env.event()
        self._waiting: simpy.Process | None = None

    def due(self, num_running: int) -> Act:
        """What the engine does now, with so many samples running: none, drain or load."""
        known = self.told > self.held
        since = (self._rule.every_s or 0.0) if known else self._world.now - self._looked
        act = policy.due(
            self._rule,
            Seen(held_version=self.held, published_version=self.told, since_pull_s=since, num_running=num_running),
        )
        return "none" if act == "look" else act

    def news(self) -> simpy.Event:
        """The next time when `due` may say something else of as many running samples; after the last version: never."""
        return self._world.env.process(self._look()) if self._rule.trigger == "pull" else self._heard

    def hear(self, event: WeightsReady, after_s: float) -> Process:
        """A message that is on its way to this engine for so long."""
        yield self._world.env.timeout(after_s)
        if policy.wanted(event, self.held):
            self.told = max(self.told, event.version)
            heard, self._heard = self._heard, self._world.env.event()
            heard.succeed()

    def take_part(self, version: int) -> Process:
        """Where the next step waits for all engines: waits for a version and loads it, unless `give_up` comes first."""
        self._waiting = self._world.env.active_process
        try:
            if self._rule.trigger != "push":
                while self.told < version:
                    yield self.news()
            yield from self.load()
        except simpy.Interrupt:
            pass
        finally:
            self._waiting = None

    def give_up(self) -> None:
        """The others wait for this engine no longer."""
        if self._waiting is not None:
            self._waiting.interrupt()

    def load(self) -> Process:
        """Takes the latest version, recorded as a weight_sync span; the engine stands still meanwhile."""
        publication = self._world.publication
        meeting = publication.meeting
        version = publication.version if meeting is None else meeting.version
        step = max(version, 1) * self._world.dataflow.nodes["weight_sync"].every - 1
        lane, notes = Lane(self._world, "weight_sync", step, self.worker), dict[str, Any]()
        try:
            if meeting is not None:
                yield from self._meet(lane, meeting)
            else:
                notes = yield from self._fetch(lane, version)
        except simpy.Interrupt:
            lane.end(absent=True)
            raise
        lane.end(**notes)

    def _look(self) -> Process:
        """The engine asks for the latest version when its turn comes, evenly spread between those of the others; of its
        looks, the first that finds one."""
        publication = self._world.publication
        while self.told >= publication.version:
            yield publication.published
        self._looked = policy.next_look(
            self._rule.every_s or 0.0, self._world.now, self._index, self._num_engines
        )  # fmt: skip
        yield self._world.env.timeout(max(self._looked - self._world.now, 0.0))
        self.told = max(self.told, publication.version)

    def _meet(self, lane: Lane, meeting: Meeting) -> Process:
        """The engine's part in a push."""
        yield meeting.join(lane)
        yield from take(self._world, lane, whole_bytes(self._world))
        self.held = self.told = meeting.version
        meeting.took(self.worker.name)
        if waits_for_all(self._world):
            yield meeting.over

    def _fetch(self, lane: Lane, version: int) -> Process:
        """The engine gets the weights from the nearest that has them; returns what the span says of it."""
        world, publication = self._world, self._world.publication
        copies, here = publication.copies, place_of(world, self.worker)
        assert copies is not None, "something was published"
        start, size = world.now, publication.bytes_since(self.held)
        number, new = (yield from acquire(world.env, copies, here)), None
        waited, source = world.now - start, copies.source(number)
        try:
            yield from self._transfer(lane, source, size)
            shared = world.scenario.weight_sync.transport == "object_store"
            new = Source(place=here, name=self.worker.name, ends=self.worker.devices, many=shared)
        finally:
            copies.release(number, here, new)
        yield from take(world, lane, whole_bytes(world))
        self.held, self.told = version, max(self.told, version)
        publication.acknowledge()
        return {"source": source.name, "waited_s": waited}

    def _cost(self, op: str, size: float) -> Cost:
        """Of as many bytes again and again; where they go as flows, engines alike share what is known of it."""
        worker, costs = self.worker, self._world.publication.costs
        key = (op, size, len(worker.devices) if networked(self._world, worker, op) else worker.name)
        if key not in costs:
            costs[key] = self._world.cost(worker, op, {"calls": 1.0, "bytes": size})
        return costs[key]

    def _transfer(self, lane: Lane, source: Source, size: float) -> Process:
        world, worker = self._world, self.worker
        op = fetch_op(world, worker, stored=not source.ends)
        start, cost = world.now, self._cost(op, loaded_bytes(world, worker, size))
        notes = {}
        if networked(world, worker, op):
            flows = fetched(world, source.ends or source.place.site, worker, size)
            yield world.env.timeout(tensors_s(world, worker))
            yield from world.network.send_all(flows)
            notes = {"flows": len(flows)}
        else:
            yield from world.cores(worker).work(worker, op, cost.seconds)
        lane.record("transfer", start, cost.extrapolated, bytes=size, **notes)


def place_of(world: World, worker: Worker) -> Place:
    """The machine of a worker's first device."""
    machine = world.network.topology.machine(worker.devices[0])
    return Place(site=machine.site.name, machine=machine.name)


def take(world: World, lane: Lane, whole: float) -> Process:
    """What an engine does with weights that have arrived: `whole` bytes in the trainer's dtype, however they were sent.

    Changes are added to what it has; weights of another dtype are converted, and such of eight bits packed anew.
    """
    rule, sent = world.scenario.weight_sync, DTYPE_BYTES[world.scenario.model("actor").dtype]
    width, dtype = DTYPE_BYTES[lane.worker.dtype], lane.worker.dtype
    if world.scenario.model("actor").lora is not None:
        return
    if rule.payload == "delta":
        touched = world.publication.payload_bytes + 2 * (rule.delta_share or 0.0) * whole
        yield from _pass(lane, "apply", touched)
        return
    came = "int8" if rule.payload == "int8" else world.scenario.model("actor").dtype
    kept = whole * width / sent
    if dtype != came:
        yield from _pass(lane, "convert", kept + (world.publication.payload_bytes if came == "int8" else whole))
    if width < 2:
        yield from lane.op("engine_rebuild", "engine_rebuild", {"calls": 1.0, "bytes": 2 * kept}, bytes=2 * kept)


def _pass(lane: Lane, op: str, size: float) -> Process:
    """A kernel that goes over so many bytes."""
    yield from lane.op(op, "convert", {"calls": 1.0, "bytes": size}, bytes=size)
