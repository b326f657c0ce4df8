"""The experience buffer's books: what is under way, what waits, and how batches are made of it. Both worlds keep them so.

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

from lab.fates import BUFFERED, DROPPED, LOST, RESPONSE, Fates, Ints
from lab.policies import buffer, staleness
from lab.policies.decision import Decision, recorded
from lab.scenario import Scenario
from lab.schedule import limits
from lab.schedule import staleness as rule_of

Made = Decision[staleness.Tally, staleness.Batch]
"""what was decided about a batch, and what it was decided from"""
Pushed = Decision[buffer.Fill, buffer.Pressure]
"""that the buffer pushes back, or no longer does"""


@dataclass(eq=False)
class Group:
    """Samples that are trained together."""

    version: int
    members: list[int]
    """numbers; none for those that were thrown away and are not issued again yet"""
    missing: int
    """members that are not back yet, or not issued again"""
    back: list[int] = field(default_factory=list)
    """members that wait for the others"""


@dataclass(eq=False)
class Version:
    """Groups of one policy version."""

    running: dict[Group, None] = field(default_factory=dict)
    """not complete, as they were issued"""
    ready: list[Group] = field(default_factory=list)
    """complete, as they came"""


class Collecting:
    """The buffer of a run. Room is kept from issue to the end of the update that trains on a sample."""

    def __init__(self, scenario: Scenario, fates: Fates, freed: Callable[[], None], first_batch: int = 0) -> None:
        """`freed` is called when samples left, so that others may be issued. `first_batch`: the one that is made first."""
        samples = scenario.workload.samples_per_step
        self.rule = rule_of(scenario.schedule, samples)
        self.limits = limits(scenario.schedule, scenario.buffer, samples)
        self.size = 1 if scenario.algorithm.name == "ppo" else scenario.workload.samples_per_prompt
        """samples of a group"""
        self._fates, self._freed, self._epochs = fates, freed, scenario.algorithm.epochs
        self._versions: dict[int, Version] = {}
        self._group: dict[int, Group] = {}
        self._pressed = False
        self._turns: list[Pushed] = []
        self.turned: dict[int, list[Pushed]] = {}
        """by batch, when the buffer began to push back, or ceased to, since the batch before"""
        self._held = self._pinned = self._in_flight = 0
        self._pages: dict[int, buffer.Page] = {}
        self.next = first_batch
        """batch that is made up next"""
        self._num_issued = self.next * self.rule.samples_per_unit

    @property
    def depth(self) -> int:
        """Samples that wait for the trainer."""
        return self._held

    @property
    def missing(self) -> int:
        """Samples that have to come before anything is decided: for a batch, or for less of what pushes back."""
        return 1 if self._pressed else max(self.rule.samples_per_unit - self._held, 1)

    @property
    def starves(self) -> bool:
        """Whether nothing is under way, and what waits is no batch; of samples that are trained one by one."""
        return self.size == 1 and not self._in_flight and self._held < self.rule.samples_per_unit

    def pressure(self) -> buffer.Pressure:
        """Whether the buffer pushes back, and how far."""
        fill = buffer.Fill(held=self._held, pinned=self._pinned, in_flight=self._in_flight, pressed=self._pressed)
        said = buffer.pressure(self.limits, fill, self.limits.capacity_samples)
        if said.pressed != self._pressed:
            self._turns.append(Decision(rule="buffer.pressure", observed=fill, decided=said))
        self._pressed = said.pressed
        return said

    def room(self, num_seats: int, version: int) -> int:
        """Samples that may be issued now under a version, where engines have so many seats in all."""
        allowed = staleness.may_issue(self.rule, version, self._num_issued, self.next)
        said = self.pressure()
        if said.act == "throttle":  # a share of the pace is a share of what is under way at once
            allowed = min(allowed, max(math.ceil(said.pace * num_seats) - self._in_flight, 0))
        return min(allowed, said.num_issued)

    def issued(self, samples: Sequence[int], version: int) -> None:
        """These samples, whole groups one after the other, are under way."""
        made = self._versions.setdefault(version, Version())
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
        group = self._group.get(sample)
        if group is None:
            return  # nobody waits for it any more
        group.missing -= 1
        group.back.append(sample)
        if group.missing:
            return
        made = self._versions[group.version]
        del made.running[group]
        made.ready.append(group)
        self._fates.settle(group.members, BUFFERED)
        self._held += self.size
        self._in_flight -= self.size
        if self._held >= self.rule.samples_per_unit:
            self._arrived()
        if self.starves:
            self._freed()

    def _arrived(self) -> None:
        """Another group is complete, and enough of them are for a batch."""

    def decide(self) -> tuple[Made, list[int]]:
        """What the rule about age says to the next batch; the versions that its numbers belong to."""
        self._versions = {version: made for version, made in self._versions.items() if made.ready or made.running}
        versions = sorted(self._versions)
        made = [self._versions[version] for version in versions]
        ready, running = [len(one.ready) * self.size for one in made], [len(one.running) * self.size for one in made]
        tally = staleness.Tally(now=self.next, versions=versions, ready=ready, in_flight=running)
        rule = update_wrapper(partial(staleness.batch, self.rule), staleness.batch)
        return recorded(rule, tally), versions

    def take(self, numbers: Sequence[int], versions: Sequence[int]) -> Ints:
        """So many samples of each version are the next batch: they are pinned. Raises ValueError where it has a hole."""
        samples = self._leave(numbers, versions)
        manifest = buffer.Manifest(batch=self.next, num_expected=self.rule.samples_per_unit, num_arrived=len(samples))
        if not buffer.publication(manifest).publish:
            raise ValueError(f"batch {self.next} is not whole: {manifest}")
        page = buffer.filled(buffer.Page(index=self.next), len(samples), len(samples))
        self._pages[self.next] = buffer.pinned(page, self._epochs)
        self._pinned += len(samples)
        self.turned[self.next], self._turns = self._turns, []
        self.next += 1
        return samples

    def contents(self) -> tuple[list[int], list[int]]:
        """Versions, and how many samples of each wait for the trainer."""
        versions = sorted(self._versions)
        return versions, [len(self._versions[version].ready) * self.size for version in versions]

    def drop(self, numbers: Sequence[int], versions: Sequence[int], fate: int = DROPPED) -> Ints:
        """So many ready samples of each version are too old and thrown away, or met another fate."""
        samples, fates = self._leave(numbers, versions), self._fates
        fates.generated(samples, fates.column(RESPONSE)[samples])
        fates.settle(samples, fate)
        self._num_issued -= len(samples)
        return samples

    def doomed(self, numbers: Sequence[int], versions: Sequence[int]) -> list[Group]:
        """The groups under way of which so many samples of each version are to be interrupted: all of a version."""
        pairs = zip(numbers, versions, strict=True)
        return [group for number, version in pairs if number for group in self._versions[version].running]

    def forget(self, groups: Sequence[Group]) -> None:
        """Groups under way will not come."""
        for group in groups:
            del self._versions[group.version].running[group]
            group.missing = 0
            for member in group.members:
                del self._group[member]
        self._in_flight -= len(groups) * self.size
        self._num_issued -= len(groups) * self.size

    def thrown(self, samples: Sequence[int]) -> list[tuple[Group, list[int]]]:
        """The groups that lose these samples before their end, each with the samples that it loses."""
        found: dict[Group, list[int]] = {}
        for sample in samples:
            found.setdefault(self._group.pop(sample), []).append(sample)
        for group, lost in found.items():
            group.members = [member for member in group.members if member not in lost]
        return list(found.items())

    def spilt(self) -> list[int]:
        """What lies here of groups that are not complete is gone, and waited for once more; its numbers."""
        found = list[int]()
        for group in [group for made in self._versions.values() for group in made.running]:
            found += group.back
            group.missing, group.back = group.missing + len(group.back), []
        return found

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

    def lost(self, samples: Ints) -> None:
        """The latest batch is gone before anybody had it: it is made up once more, of others."""
        self.next -= 1
        self._pinned -= self._pages.pop(self.next).num_samples
        self._num_issued -= len(samples)
        self._fates.generated(samples, self._fates.column(RESPONSE)[samples])
        self._fates.settle(samples, LOST)

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
            made, count = self._versions[version], number // self.size
            samples += [member for group in made.ready[:count] for member in group.members]
            made.ready = made.ready[count:]
        for sample in samples:
            del self._group[sample]
        self._held -= len(samples)
        return np.array(samples, np.int64)


def ages(
    rule: staleness.Staleness, batch: int, newest: int, versions: Ints, decision: Made, turned: Sequence[Pushed]
) -> dict[str, Any]:
    """What the span of a batch's advantages says of its age: the decision that made it, lags in versions behind the
    trainer's `newest`, the mean of what its samples count, and where the buffer `turned` to push back meanwhile or ceased
    to, the decisions to do so."""
    lags = newest - versions
    return {
        "decision": decision.plain(),
        "lag_mean": float(lags.mean()),
        "lag_max": int(lags.max()),
        "weight_mean": float(staleness.weights(rule, staleness.lag(rule, batch, versions)).mean()),
    } | ({"pressure": [one.plain() for one in turned]} if turned else {})
