"""What the trainer has published, who has it, who fetches it from whom, and who has acknowledged it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import simpy

from lab.copies import Copies, Place
from lab.model import DTYPE_BYTES
from lab.placement import Worker
from lab.policies.weight_sync import WeightsReady, payload_bytes
from profiles.cost import Cost
from simulator.world import Lane, Process, World

if TYPE_CHECKING:
    from simulator.receiving import Receiver


def acquire(env: simpy.Environment, copies: Copies, here: Place) -> Process:
    """Ends when one who is `here` may fetch; returns the number of the source."""
    if not copies.in_turns:
        return 0
    granted = env.event()
    turn = copies.ask(here, granted.succeed)
    try:
        return (yield granted)
    except simpy.Interrupt:
        copies.leave(here, turn)
        raise


class Meeting:
    """A push: the trainer waits until every engine stands still, and sends to all of them together."""

    def __init__(self, env: simpy.Environment, version: int, expected: set[str]) -> None:
        self.version = version
        self.lanes: dict[str, Lane] = {}
        self.complete, self.arrived, self.ready, self.over = (env.event() for _ in range(4))
        self._expected, self._took = expected, set[str]()
        self._check()

    def join(self, lane: Lane) -> simpy.Event:
        """An engine stands still; the event is the arrival of the weights."""
        self.lanes[lane.worker.name] = lane
        self._check()
        return self.arrived

    def took(self, name: str) -> None:
        """An engine can compute with the new weights."""
        self._took.add(name)
        self._check()

    def leave(self, name: str) -> None:
        """An engine is waited for no longer."""
        self._expected.discard(name)
        self._check()

    def _check(self) -> None:
        for event, who in ((self.complete, set(self.lanes)), (self.ready, self._took)):
            if self._expected <= who and not event.triggered:
                event.succeed()


def first_version(world: World) -> int:
    """What engines have when the run begins, or goes on after a fault: the last version that all were to have."""
    if "weight_sync" not in world.dataflow.nodes:
        return world.first_step
    earlier = [step for step in world.dataflow.steps("weight_sync") if step < world.first_step]
    under_way = sum(not world.finished("weight_sync", step).triggered for step in earlier)
    return world.dataflow.version_at(world.first_step) - under_way


class Publication:
    """The published versions of a run."""

    def __init__(self, world: World, receivers: Mapping[str, Receiver]) -> None:
        """`receivers` by engine, in their order."""
        self._world, self.receivers = world, receivers
        self.version = first_version(world)
        """the latest that engines can have"""
        self.versions = [self.version]
        """all that were published, in order"""
        self.published = world.env.event()
        """the next version can be had"""
        self.copies: Copies | None = None
        self.meeting: Meeting | None = None
        self.costs: dict[tuple[str, float, int | str], Cost] = {}
        """of fetching so many bytes, as far as they were asked for"""
        self.absent: frozenset[int] = frozenset()
        """engines that gave up at the last barrier, by their index"""
        self._present = set(receivers)
        self._changed = world.env.event()

    @property
    def expected(self) -> list[str]:
        """Engines that take part, in their order."""
        return [name for name in self.receivers if name in self._present]

    @property
    def payload_bytes(self) -> float:
        """Of one version, as it is sent."""
        scenario, rule = self._world.scenario, self._world.scenario.weight_sync
        width = DTYPE_BYTES[scenario.model("actor").dtype]
        return payload_bytes(scenario.trainable_parameters("actor"), width, rule.payload, rule.delta_share)

    def bytes_since(self, held: int) -> float:
        """What an engine with this version fetches: the changes of all since, unless the whole is less."""
        scenario = self._world.scenario
        if scenario.weight_sync.payload != "delta":
            return self.payload_bytes
        missed = sum(version > held for version in self.versions)
        whole = scenario.trainable_parameters("actor") * DTYPE_BYTES[scenario.model("actor").dtype]
        return min(missed * self.payload_bytes, whole)

    @property
    def final(self) -> bool:
        """Whether no other version follows."""
        dataflow = self._world.dataflow
        return (
            self.version >= (max(dataflow.steps("weight_sync"), default=-1) + 1) // dataflow.nodes["weight_sync"].every
        )

    def leave(self, worker: Worker) -> None:
        """An engine is gone: neither barrier nor push waits for it."""
        self._present.discard(worker.name)
        if self.meeting is not None:
            self.meeting.leave(worker.name)
        self._change()

    def enter(self, worker: Worker, version: int) -> None:
        """An engine is there (again), with the weights of a version."""
        self._present.add(worker.name)
        receiver = self.receivers[worker.name]
        receiver.held = receiver.told = version

    def open(self, version: int) -> None:
        """The trainer is about to publish a version; engines hear of a push now, so that they can stand still."""
        if self._world.scenario.weight_sync.trigger == "push":
            self.meeting = Meeting(self._world.env, version, set(self.expected))
            self.announce(WeightsReady(version=version, place="trainer", digest=f"{version}"))

    def publish(self, version: int, copies: Copies | None) -> None:
        """From now on engines can have this version, from those who have copies."""
        self.versions.append(version)
        self.version, self.copies = version, copies
        published, self.published = self.published, self._world.env.event()
        published.succeed()

    def announce(self, event: WeightsReady) -> None:
        """Every engine hears of it, each after the time that a message from the trainer takes."""
        for name in self.expected:
            receiver = self.receivers[name]
            self._world.env.process(receiver.hear(event, self._message_s(receiver.worker)))

    def acknowledge(self) -> None:
        """An engine has taken a version."""
        self._change()

    def missing(self, version: int) -> list[str]:
        """Engines that are expected and do not have a version yet."""
        return [name for name in self.expected if self.receivers[name].held < version]

    def everybody(self, version: int) -> Process:
        """Ends when every engine that takes part has the version."""
        while self.missing(version):
            yield self._changed

    def _change(self) -> None:
        changed, self._changed = self._changed, self._world.env.event()
        changed.succeed()

    def _message_s(self, engine: Worker) -> float:
        trainer, topology = self._world.scenario.team("actor", "train")[0], self._world.network.topology
        call = self._world.cost(trainer, "dispatch", {"calls": 1.0, "bytes": 0.0}).seconds
        here, there = (topology.machine(worker.devices[0]).name for worker in (trainer, engine))
        return call + topology.between(here, there).latency
