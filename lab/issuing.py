"""Who gets which prompts where there is no barrier: what goes out next, what goes out again, and what comes back.

Both worlds issue so. They differ in who the engines are, in when "at this instant, after all that ends now" is, and in
what happens between the end of a sample and its arrival in the buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Generic, Protocol, TypeVar

import numpy as np

from lab.collecting import Collecting, Group, Made
from lab.dealing import Dealer
from lab.fates import ABORTED, DROPPED, FATE, IN_FLIGHT, INDEX, LOST, RESPONSE, STEP, Fates, Ints
from lab.placement import Worker
from lab.policies.dispatch import Engines
from lab.scenario import Scenario


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """Samples of one prompt that are issued together."""

    step: int
    """of the workload"""
    number: int
    """of the prompt in it"""
    indices: Ints
    """of the samples in it"""
    group: Group | None = None
    """whose members they replace"""


class Prompts:
    """The n-th prompt ever issued is prompt n % prompts_per_step of step n // prompts_per_step.

    What was trained before is left out: batches take samples as they come back, so it may have gaps.
    """

    def __init__(self, scenario: Scenario, trained: Ints) -> None:
        """`trained` is (2, samples), the steps and indices of those that were trained before."""
        self._per_step, self._samples = scenario.workload.prompts_per_step, scenario.workload.samples_per_prompt
        self._next = 0
        self._trained: dict[int, list[int]] = {}
        for step, index in trained.T.tolist():
            self._trained.setdefault(step * self._per_step + index // self._samples, []).append(index)
        self._again, self._replacing = deque[Prompt](), deque[Prompt]()

    def again(self, rows: Ints, group: Group | None) -> None:
        """Samples go out once more; `rows` is (2, samples), their steps and their indices."""
        ordered = rows[:, np.lexsort(rows[::-1])]
        numbers = ordered[1] // self._samples
        cuts = np.flatnonzero((np.diff(ordered[0]) != 0) | (np.diff(numbers) != 0)) + 1
        for part in np.split(np.arange(ordered.shape[1]), cuts):
            prompt = Prompt(
                step=int(ordered[0, part[0]]), number=int(numbers[part[0]]), indices=ordered[1, part], group=group
            )  # fmt: skip
            (self._again if group is None else self._replacing).append(prompt)

    def replacing(self, most: int, version: int) -> list[Prompt]:
        """At most so many of those that take the place of others, for which room is kept; the rest of a group that is
        waited for no longer is left out. No group gets members of an older version than its own."""
        found, later = list[Prompt](), list[Prompt]()
        while self._replacing and len(found) < most:
            prompt = self._replacing.popleft()
            if prompt.group is not None and prompt.group.missing:
                (found if prompt.group.version <= version else later).append(prompt)
        self._replacing.extendleft(reversed(later))
        return found

    def take(self, most: int, most_samples: int, part: bool = False) -> list[Prompt]:
        """At most so many others, with at most so many samples. The first of them may be a `part` of a prompt of whose
        samples too many are left: where nothing else goes on, nobody waits until all of them fit."""
        found = list[Prompt]()
        while len(found) < most and (fits := most_samples - sum(len(one.indices) for one in found)):
            prompt = self._again.popleft() if self._again else self._fresh()
            if len(prompt.indices) <= fits:
                found.append(prompt)
                continue
            cut = fits if part and not found else 0
            self._again.appendleft(replace(prompt, indices=prompt.indices[cut:]))
            return [replace(prompt, indices=prompt.indices[:cut])] if cut else found
        return found

    def _fresh(self) -> Prompt:
        while True:
            step, number = divmod(self._next, self._per_step)
            gone = self._trained.pop(self._next, [])
            self._next += 1
            if len(gone) < self._samples:
                first = number * self._samples
                left = np.setdiff1d(np.arange(first, first + self._samples), gone)
                return Prompt(step=step, number=number, indices=left)


class Engine(Protocol):
    """An engine as whoever issues samples knows it."""

    worker: Worker
    seats: int
    """samples that it has at most"""
    samples: set[int]
    """what was given to it and is not back"""
    given: int
    """prompts so far"""

    @property
    def version(self) -> int:
        """Of the weights that it generates with."""
        ...

    @property
    def room(self) -> int:
        """Samples that it takes now."""
        ...

    def give(self, samples: Ints, num_prompts: int) -> None:
        """These join its queue."""
        ...

    def stop(self, samples: Sequence[int]) -> Sequence[int]:
        """These leave, whether they run or wait; the response tokens that each has, as far as that is known."""
        ...


E = TypeVar("E", bound=Engine)


class Issuing(Generic[E]):
    """All engines of a run, the buffer, and the prompts that go from one to the other.

    Whoever takes it over says in `_soon` when `issue` is called, and in `_handed` where a sample goes that has all its
    tokens: to `buffer.ended` in the end.
    """

    def __init__(
        self, scenario: Scenario, fates: Fates, dealer: Dealer, buffer: Collecting, engines: Sequence[E],
        trained: Ints, kv_tokens: Sequence[float],
    ) -> None:  # fmt: skip
        """`trained` as `Prompts` takes it; `kv_tokens`: those that fit in the cache of each engine."""
        self.scenario, self.fates, self.dealer, self.buffer = scenario, fates, dealer, buffer
        self.producers = list(engines)
        self.prompts = Prompts(scenario, trained)
        self._per_prompt = scenario.workload.samples_per_prompt
        self._place = {producer: place for place, producer in enumerate(self.producers)}
        self._seats = sum(producer.seats for producer in self.producers)
        self._owner: dict[int, E] = {}
        self._asking: set[int] = set()
        self._paced = buffer.limits.at_high == "throttle"
        self._shut = False
        self.latest = self.producers[0]
        """the engine that gave the last sample back"""
        self._kv_tokens = np.array(kv_tokens, dtype=float)

    @property
    def newest(self) -> int:
        """The version that was published last."""
        raise NotImplementedError

    def _soon(self) -> None:
        """Has `issue` called once all that ends at this instant has."""
        raise NotImplementedError

    def _handed(self, producer: E, sample: int) -> None:
        """A sample has all its tokens and goes its way to the buffer."""
        raise NotImplementedError

    def _decided(self, batch: int, decision: Made) -> None:
        """What was decided about a batch; the last time it was made."""

    def back(self, producer: E, sample: int) -> None:
        """A sample has all its tokens."""
        del self._owner[sample]
        self.latest = producer
        self._handed(producer, sample)
        if self._paced and producer.room >= self._per_prompt:
            self.ask(producer)  # fewer are under way than before

    def dry(self, producer: E) -> None:
        """Nobody waits in an engine, and more could run."""
        if self._shut or producer.room < self._per_prompt:
            return
        if self._asking - {self._place[producer]}:
            self.ask(producer)  # others are to have their share of what there is now
        else:
            self._deal([producer], producer.version)

    def backlog(self) -> int:
        """Samples that could be issued now if an engine had room for them."""
        return self.buffer.room(self._seats, self.newest)

    def wants(self, producer: E) -> None:
        """An engine takes samples again, under another version perhaps."""
        self._shut = False
        self.ask(producer)

    def thrown(self, samples: Sequence[int], tokens: Sequence[int], fate: int) -> None:
        """Samples met this fate before their end, with so many tokens. They are issued anew: in the place that they had
        where others of their group are kept, else as a new prompt."""
        self._settle(samples, tokens, fate)
        for group, lost in self.buffer.thrown(samples):
            if group.members:
                self._repeat(lost, group)
            else:
                self.buffer.forget([group])
                self._anew(lost[0])

    def lost(self, samples: Sequence[int], tokens: Sequence[int]) -> None:
        """An engine that failed had these; those that are wanted still are issued anew."""
        fates = self.fates.column(FATE)
        wanted = [pair for pair in zip(samples, tokens, strict=True) if fates[pair[0]] == IN_FLIGHT]
        if wanted:
            self.thrown([sample for sample, _ in wanted], [made for _, made in wanted], LOST)

    def spill(self) -> int:
        """What waits in the buffer is lost, and issued anew; returns the response tokens that it had."""
        before, parts = self.fates.lost_tokens(), self.buffer.spilt()
        self.lost(parts, self.fates.column(RESPONSE)[parts].tolist())
        versions, ready = self.buffer.contents()
        self._repeat(self.buffer.drop(ready, versions, LOST).tolist())
        return self.fates.lost_tokens() - before

    def batch(self, step: int) -> bool:
        """Asks the rule about age, and does as it says; returns whether the batch of this step is made."""
        decision, versions = self.buffer.decide()
        said = decision.decided
        self._decided(self.buffer.next, decision)
        self._repeat(self.buffer.drop(said.drop, versions).tolist())
        doomed = self.buffer.doomed(said.interrupt, versions)
        if said.start:
            numbers, fates = self.buffer.take(said.take, versions), self.fates
            fates.batches[step] = numbers
            prompts = fates.column(INDEX)[numbers] // self._per_prompt
            self.dealer.returned(prompts, fates.column(RESPONSE)[numbers])
            self.ask_all()
        self._interrupt(doomed)
        return said.start

    def _interrupt(self, groups: Sequence[Group]) -> None:
        """Groups leave that would be too old: what runs is stopped, what came back is thrown away."""
        if not groups:
            return
        self.buffer.forget(groups)
        members = [member for group in groups for member in group.members]
        running = sorted((sample for sample in members if sample in self._owner), key=self._owned)
        for place, samples in groupby(running, key=self._owned):
            stopped = list(samples)
            self._settle(stopped, self.producers[place].stop(stopped), ABORTED)
        rest = np.setdiff1d(members, running).astype(np.int64)
        self.fates.generated(rest, self.fates.column(RESPONSE)[rest])
        self.fates.settle(rest, DROPPED)
        for group in groups:
            self._anew(group.members[0])

    def _owned(self, sample: int) -> int:
        return self._place[self._owner[sample]]

    def _settle(self, samples: Sequence[int], tokens: Sequence[int], fate: int) -> None:
        for sample in samples:
            self._owner.pop(sample, None)  # it may be on its way from there
        self.fates.generated(samples, tokens)
        self.fates.settle(samples, fate)

    def _repeat(self, samples: Sequence[int], group: Group | None = None) -> None:
        """These go out again, before others: in a group's place, or as prompts of their own."""
        if samples:
            rows = np.array([self.fates.column(column)[list(samples)] for column in (STEP, INDEX)])
            self.prompts.again(rows, group)
            self.ask_all()

    def _anew(self, sample: int) -> None:
        """The whole group of a sample goes out again."""
        step, index = (int(self.fates.column(column)[sample]) for column in (STEP, INDEX))
        size = self.buffer.size
        indices = index // size * size + np.arange(size)
        self.prompts.again(np.array([np.full(size, step), indices]), None)
        self.ask_all()

    def ask_all(self) -> None:
        """Every engine may have room for what can be issued now."""
        self._shut = False
        for producer in self.producers:
            self.ask(producer)

    def ask(self, producer: E) -> None:
        """An engine gets its share when samples are issued, soon."""
        self._asking.add(self._place[producer])
        self._soon()

    def issue(self) -> None:
        """Gives the engines that ask what age, buffer and their own room allow; the newest version first."""
        asking, self._asking = sorted(self._asking), set()
        able = self._able(self.producers[place] for place in asking)
        for version in sorted({producer.version for producer in able}, reverse=True):
            self._deal([producer for producer in able if producer.version == version], version)

    def _able(self, producers: Iterable[E]) -> list[E]:
        return [producer for producer in producers if producer.room >= self._per_prompt]

    def _deal(self, able: list[E], version: int) -> None:
        """Prompts to engines of one version, by the rule of dispatch among those that have room."""
        room = sum(producer.room // self._per_prompt for producer in able)
        prompts = self.prompts.replacing(room, version)
        allowed = self.buffer.room(self._seats, version)
        prompts += self.prompts.take(room - len(prompts), allowed, self.buffer.starves)
        self._shut = len(prompts) < room and not self._paced
        while prompts:
            left = list[Prompt]()
            for producer, share in zip(able, self._shares(prompts, able), strict=True):
                fits = producer.room // self._per_prompt
                self._give(producer, [prompts[i] for i in share[:fits]], version)
                left += [prompts[i] for i in share[fits:]]
            prompts, able = left, self._able(able)

    def _shares(self, prompts: list[Prompt], able: list[E]) -> list[list[int]]:
        """Places in `prompts` by engine."""
        if len(able) == 1:
            return [list(range(len(prompts)))]
        workload = self.scenario.workload
        under_way = np.array([len(producer.samples) for producer in able])
        room = self._kv_tokens[[self._place[producer] for producer in able]]
        engines = Engines(
            speed=np.array([producer.worker.speed for producer in able]),
            given=np.array([producer.given for producer in able]), queued=np.zeros_like(under_way), running=under_way,
            free_kv_tokens=room - under_way * (workload.prompt_tokens.mean + workload.response_tokens.mean),
        )  # fmt: skip
        return self.dealer.choose([(prompt.step, prompt.number) for prompt in prompts], engines)

    def _give(self, producer: E, prompts: list[Prompt], version: int) -> None:
        """Issues prompts to an engine."""
        for (step, group), parts in groupby(prompts, key=lambda prompt: (prompt.step, prompt.group)):
            found = list(parts)
            numbers = self.fates.issue(step, np.concatenate([prompt.indices for prompt in found]), version)
            samples = numbers.tolist()
            if group is None:
                self.buffer.issued(samples, version)
            else:
                self.buffer.replaced(group, samples)
            self._owner.update(dict.fromkeys(samples, producer))
            producer.give(numbers, len(found))


def trained(fates: Fates, first_step: int) -> Ints:
    """(2, samples) steps and indices of what batches before `first_step` trained on."""
    kept = [numbers for step, numbers in fates.batches.items() if step < first_step]
    numbers = np.concatenate([np.zeros(0, np.int64), *kept])
    return np.array([fates.column(column)[numbers] for column in (STEP, INDEX)])


def seats(scenario: Scenario) -> int:
    """Samples that an engine is given at once: as many as it runs, in whole prompts, and one prompt that waits."""
    number = scenario.workload.samples_per_prompt
    return -(-scenario.rollout.max_num_seqs // number) * number + number
