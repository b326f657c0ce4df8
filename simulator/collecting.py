"""The experience buffer in virtual time: what is under way, what waits, and how batches are made of it.

Samples that are compared with each other (all of a prompt, but for PPO) are taken together: those of a group wait for
the last of them, and the version of a group is that of its first samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any

import numpy as np
import simpy

from lab.policies import buffer, staleness
from lab.policies.decision import recorded
from lab.schedule import limits
from lab.schedule import staleness as rule_of
from simulator.blocks import Ints
from simulator.ledger import BUFFERED, DROPPED, RESPONSE, VERSION
from simulator.world import World


@dataclass(eq=False)
class Group:
    """Samples that are trained together."""

    version: int
    members: list[int]
    """numbers of the ledger; none for those that were thrown away and are not issued again yet"""
    missing: int
    """members that are not back yet, or not issued again"""


@dataclass(eq=False)
class Made:
    """Groups of one policy version."""

    running: dict[Group, None] = field(default_factory=dict)
    """not complete, as they were issued"""
    ready: list[Group] = field(default_factory=list)
    """complete, as they came"""


class Collecting:
    """The buffer of a run. Room is kept from issue to the end of the update that trains on a sample."""

    def __init__(self, world: World, freed: Callable[[], None]) -> None:
        """`freed` is called when samples left, so that others may be issued."""
        scenario = world.scenario
        self._world, self._freed = world, freed
        samples = scenario.workload.samples_per_step
        self.rule = rule_of(scenario.schedule, samples)
        self.limits = limits(scenario.schedule, scenario.buffer, samples)
        self.size = 1 if scenario.algorithm.name == "ppo" else scenario.workload.samples_per_prompt
        """samples of a group"""
        self._made: dict[int, Made] = {}
        self._group: dict[int, Group] = {}
        self._pressed = False
        self._held = self._pinned = self._in_flight = 0
        self._pages: dict[int, buffer.Page] = {}
        self._arrived: simpy.Event | None = None
        self.next = world.first_step
        """batch that is made up next"""
        self._num_issued = self.next * self.rule.samples_per_unit

    def room(self, num_seats: int, version: int) -> int:
        """Samples that may be issued now under a version, where engines have so many seats in all."""
        allowed = staleness.may_issue(self.rule, version, self._num_issued, self.next)
        fill = buffer.Fill(held=self._held, pinned=self._pinned, in_flight=self._in_flight, pressed=self._pressed)
        said = buffer.pressure(self.limits, fill, self.limits.capacity_samples)
        self._pressed = said.pressed
        if said.act == "throttle":  # a share of the pace is a share of what is under way at once
            allowed = min(allowed, max(math.ceil(said.pace * num_seats) - self._in_flight, 0))
        return min(allowed, said.num_issued)

    def issued(self, samples: Sequence[int], version: int) -> None:
        """These samples, whole groups one after the other, are under way."""
        made = self._made.setdefault(version, Made())
        for first in range(0, len(samples), self.size):
            group = Group(version=version, members=list(samples[first : first + self.size]), missing=self.size)
            made.running[group] = None
            self._group.update(dict.fromkeys(group.members, group))
        self._in_flight += len(samples)
        self._num_issued += len(samples)

    def replaced(self, group: Group, samples: Sequence[int]) -> None:
        """These are issued in the place of members that were thrown away."""
        group.members += samples
        self._group.update(dict.fromkeys(samples, group))

    def ended(self, sample: int) -> None:
        """A sample is back, with its scores where they are waited for one by one."""
        group = self._group[sample]
        group.missing -= 1
        if group.missing:
            return
        made = self._made[group.version]
        del made.running[group]
        made.ready.append(group)
        self._world.ledger.settle(group.members, BUFFERED)
        self._held += self.size
        self._in_flight -= self.size
        if self._arrived is not None and self._held >= self.rule.samples_per_unit:
            arrived, self._arrived = self._arrived, None
            arrived.succeed()

    def arrival(self) -> simpy.Event:
        """The event that another group is complete, and enough of them are for a batch."""
        self._arrived = self._world.env.event()
        return self._arrived

    def decide(self) -> tuple[staleness.Batch, list[int]]:
        """What the rule about age says to the next batch; the versions that its numbers belong to."""
        self._made = {version: made for version, made in self._made.items() if made.ready or made.running}
        versions = sorted(self._made)
        made = [self._made[version] for version in versions]
        ready, running = [len(one.ready) * self.size for one in made], [len(one.running) * self.size for one in made]
        tally = staleness.Tally(now=self.next, versions=versions, ready=ready, in_flight=running)
        rule = update_wrapper(partial(staleness.batch, self.rule), staleness.batch)
        decision = recorded(rule, tally)
        self._world.decided["rollout", self.next] = decision
        return decision.decided, versions

    def take(self, numbers: Sequence[int], versions: Sequence[int]) -> Ints:
        """So many samples of each version are the next batch: they are pinned."""
        samples = self._leave(numbers, versions)
        said = buffer.publication(
            buffer.Manifest(batch=self.next, num_expected=self.rule.samples_per_unit, num_arrived=len(samples))
        )
        assert said.publish, "a batch is whole"
        page = buffer.filled(buffer.Page(index=self.next), len(samples), len(samples))
        self._pages[self.next] = buffer.pinned(page, self._world.scenario.algorithm.epochs)
        self._pinned += len(samples)
        self.next += 1
        return samples

    def contents(self) -> tuple[list[int], list[int]]:
        """Versions, and how many samples of each wait for the trainer."""
        versions = sorted(self._made)
        return versions, [len(self._made[version].ready) * self.size for version in versions]

    def drop(self, numbers: Sequence[int], versions: Sequence[int], fate: int = DROPPED) -> Ints:
        """So many ready samples of each version are too old and thrown away, or met another fate."""
        samples, ledger = self._leave(numbers, versions), self._world.ledger
        ledger.generated(samples, ledger.column(RESPONSE)[samples])
        ledger.settle(samples, fate)
        self._num_issued -= len(samples)
        return samples

    def doomed(self, numbers: Sequence[int], versions: Sequence[int]) -> list[Group]:
        """The groups under way of which so many samples of each version are to be interrupted: all of a version."""
        pairs = zip(numbers, versions, strict=True)
        return [group for number, version in pairs if number for group in self._made[version].running]

    def forget(self, groups: Sequence[Group]) -> None:
        """Groups under way will not come."""
        for group in groups:
            del self._made[group.version].running[group]
            group.missing = 0
        self._in_flight -= len(groups) * self.size
        self._num_issued -= len(groups) * self.size

    def thrown(self, samples: Sequence[int]) -> list[tuple[Group, list[int]]]:
        """The groups that lose these samples before their end, each with the samples that it loses."""
        found: dict[Group, list[int]] = {}
        for sample in samples:
            found.setdefault(self._group[sample], []).append(sample)
        for group, lost in found.items():
            group.members = [member for member in group.members if member not in lost]
        return list(found.items())

    def expects(self, group: Group) -> bool:
        """Whether the group is still waited for."""
        return group.missing > 0

    def trained(self, batch: int) -> None:
        """The update on a batch has ended, with all its epochs: its page may be overwritten."""
        page = self._pages.pop(batch)
        self._pinned -= page.num_samples
        while page.epochs_left:
            page = buffer.after_epoch(page)
        self._freed()

    def why(self) -> str:
        """What the next batch waits for."""
        told = (
            f"batch {self.next} waits for {self.rule.samples_per_unit} samples, {self._held} are ready and "
            f"{self._in_flight} under way"
        )
        taken = self._held + self._pinned + self._in_flight
        if self._pressed or taken + self.size > self.limits.capacity_samples:
            told += f"; the buffer pushes back, {taken} of {self.limits.capacity_samples} places are taken"
        return told

    def _leave(self, numbers: Sequence[int], versions: Sequence[int]) -> Ints:
        """So many samples of each version, the first that came, are no longer here."""
        samples = list[int]()
        for version, number in zip(versions, numbers, strict=True):
            made, count = self._made[version], number // self.size
            samples += [member for group in made.ready[:count] for member in group.members]
            made.ready = made.ready[count:]
        self._held -= len(samples)
        return np.array(samples, np.int64)


def ages(world: World, step: int) -> dict[str, Any]:
    """What the span of a batch's advantages says of its age where there is no barrier: the decision that made it, lags in
    versions, and the mean of what its samples count."""
    if not world.dataflow.continuous:
        return {}
    schedule, samples = world.scenario.schedule, world.scenario.workload.samples_per_step
    rule, versions = rule_of(schedule, samples), world.ledger.column(VERSION)[world.ledger.batches[step]]
    lags = world.dataflow.version_at(step) - versions
    weights = staleness.weights(rule, staleness.lag(rule, step, versions))
    decision = world.decided["rollout", step].plain()
    return {
        "decision": decision,
        "lag_mean": float(lags.mean()),
        "lag_max": int(lags.max()),
        "weight_mean": float(weights.mean()),
    }
