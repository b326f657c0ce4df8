"""An engine that generates without a barrier, inside its actor: one thread drives it, from load to load.

Whoever issues samples sends commands, which are carried out between two passes, and hears what became of them by `news`.
Samples that have ended go to the buffer, not to whoever issued them.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from executor.delivery import Delivery
from executor.experience import Samples
from executor.inference import Ended, Iteration, Progress, Request
from executor.publishing import Offered, fetches
from executor.receiving import rule_of
from lab.policies import weight_sync as policy
from lab.wiring import batches

if TYPE_CHECKING:
    from executor.rollout import RolloutWorker

Event = tuple[str, Any]
"""back: (sample, tokens of its prompt and of its response, version); stopped, thrown: {sample: response tokens}; dry: None;
held: the version that was loaded; spans: of a stage that has ended; turned: what comes after this goes to another buffer;
over: nothing comes any more"""
LONGEST_S = 5.0
"""that `news` waits for something to tell"""
LONGEST_APART_S = 300.0
"""that an engine waits, after a push that failed, for the sender to meet it again"""


class News:
    """What happened and nobody was told yet; anybody may add, one asks."""

    def __init__(self) -> None:
        self._events = deque[Event]()
        self._changed = threading.Condition()
        self._urgent = False
        self._error: BaseException | None = None

    def add(self, *events: Event, urgent: bool = True) -> None:
        """What is not `urgent` is told together with what is: every answer costs the driver a millisecond."""
        with self._changed:
            self._events.extend(events)
            self._urgent |= urgent
            if urgent:
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Nothing comes after this; whoever asks gets the error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def take(self, longest_s: float) -> list[Event]:
        """All of it, as soon as there is something, or nothing after so long. Raises what the thread failed with."""
        with self._changed:
            self._changed.wait_for(lambda: self._urgent or self._error is not None, longest_s)
            if self._error is not None and not self._events:
                raise self._error
            found = list(self._events)
            self._events.clear()
            self._urgent = False
        return found


@dataclass(frozen=True)
class Made:
    """A sample that has ended."""

    ended: Ended
    step: int
    """of the workload"""
    request: Request
    marks: list[tuple[int, int]]
    """versions that made its tokens, and how many tokens it had when each came"""


@dataclass
class Group:
    """Samples of one prompt in an engine."""

    running: int = 0
    made: list[Made] = field(default_factory=list)
    """that have ended and wait for the others"""


class Producing:
    """An engine between its loads of weights. `rollout/k` is what it does under version k."""

    def __init__(self, worker: RolloutWorker, buffer: Any, scorers: Sequence[Any] = ()) -> None:
        """`buffer`: the actor that samples go to; `scorers`: those that score them as they come."""
        self._scorers = scorers
        self._worker, self._backend = worker, worker.backend
        self._delivery = Delivery(buffer, worker.scenario.experience)
        self._rule, self._every, self._receiver = rule_of(worker.scenario), batches(worker.scenario), worker.receiver
        self._apart = worker.scenario.algorithm.name == "ppo"
        self._slots, self._mixes = worker.scenario.rollout.max_num_seqs, self._rule.in_flight == "mix"
        self._per_prompt = worker.scenario.workload.samples_per_prompt
        self._asked_at = math.inf
        """samples that were in the engine when it last asked for more, and got none since"""
        self._delivered = False
        self._inbox = deque[Callable[[], None]]()
        self._called = threading.Condition()
        self._over = self._met = False
        self._requests: dict[int, tuple[int, Request]] = {}
        """by sample, the workload's step and the request of those in the engine"""
        self._marks: dict[int, list[tuple[int, int]]] = {}
        """by sample, versions that made its tokens, and how many tokens it had when each came"""
        self._groups: dict[tuple[int, int], Group] = {}
        """by the workload's step and prompt: samples that are trained together leave together"""
        self.news = News()
        self._counts = _Counts()
        self._thread = threading.Thread(target=self._run, name="producing", daemon=True)
        self._thread.start()

    def give(self, samples: Sequence[int], steps: Sequence[int], indices: Sequence[int]) -> None:
        """These join the queue: numbers, and the places of each in the workload."""
        self._call(lambda: self._take_in(samples, steps, indices))

    def stop(self, samples: Sequence[int]) -> None:
        """These leave, whether they run or wait."""
        self._call(lambda: self._stop(samples, "stopped"))

    def hear(self, offered: Offered) -> None:
        """New weights are there, or are about to be sent."""
        self._call(lambda: self._receiver.hear(offered))

    def deliver_to(self, buffer: Any) -> None:
        """Samples go to another buffer from now on."""

        def other() -> None:
            self._delivery.buffer = buffer
            self.news.add(("turned", None))

        self._call(other)

    def met(self) -> None:
        """The engines have met the sender of weights, perhaps once more."""
        with self._called:
            self._met = True
            self._called.notify_all()

    def finish(self) -> None:
        """The run is over: what was done under the version at hand is recorded as it is, and told."""

        def over() -> None:
            self._over = True

        self._call(over)

    def _call(self, command: Callable[[], None]) -> None:
        with self._called:
            self._inbox.append(command)
            self._called.notify_all()

    def _run(self) -> None:
        try:
            while not self._over:
                with self._recorded("rollout", self._receiver.held):
                    self._work()
                if not self._over:
                    self._load()
            self.news.add(("over", None))
        except BaseException as error:  # whatever an engine may raise is told by whoever asks for news
            self.news.fail(error)

    def _work(self) -> None:
        """Under one version, to the moment when others are to be loaded."""
        while True:
            self._commands()
            if self._over or self._act() == "load":
                return
            if self._backend.unfinished:
                self._advance()

    def _act(self) -> policy.Act:
        return self._receiver.due(self._backend.unfinished, time.monotonic())

    def _commands(self) -> None:
        """Carries out what was sent; waits for it where there is nothing else to do."""
        idle = not self._backend.unfinished and self._act() == "none"
        with self._called:
            if idle and not self._inbox:
                self._called.wait(self._receiver.next_news_s(time.monotonic()))
            commands, self._inbox = self._inbox, deque()
        for command in commands:
            command()

    def _take_in(self, samples: Sequence[int], steps: Sequence[int], indices: Sequence[int]) -> None:
        requests = self._worker.requests_of(steps, indices)
        if not self._backend.unfinished and not self._counts.issued:
            self._counts.start_s = time.monotonic()
        self._requests |= dict(zip(samples, zip(steps, requests, strict=True), strict=True))
        self._marks |= {sample: [(self._receiver.held, 0)] for sample in samples}
        self._counts.issued += len(samples)
        self._asked_at = math.inf
        for step, request in zip(steps, requests, strict=True):
            self._groups.setdefault((step, request.prompt_index), Group()).running += 1
        self._backend.submit(requests, samples)

    def _stop(self, samples: Sequence[int], what: str) -> None:
        made = self._backend.abort(samples)
        for sample in made:
            step, request = self._requests.pop(sample)
            del self._marks[sample]
            self._leave((step, request.prompt_index))
        if made:
            self._left()
            self.news.add((what, made), ("dry", None))

    def _left(self) -> None:
        """Some are no longer in the engine."""
        if not self._backend.unfinished:
            self._counts.end_s = time.monotonic()

    def _advance(self) -> None:
        progress = self._backend.advance()
        for found in progress.iterations:
            self._worker._record(found, progress.start_s, progress.end_s)
        self._counts.count(progress)
        if progress.ended:
            self._left()
            told = self._hand_on(progress.ended)
            asks = self._is_dry(progress)
            self.news.add(*told, *([("dry", None)] if asks else []), urgent=asks or self._delivered)
            self._delivered = False

    def _is_dry(self, progress: Progress) -> bool:
        """Whether nobody waits and more could run, and nobody was told, or another prompt less is in the engine since."""
        left = self._backend.unfinished
        if (progress.iterations and progress.iterations[-1].waiting) or left >= self._slots:
            return False
        asks = left <= self._asked_at - self._per_prompt
        self._asked_at = left if asks else self._asked_at
        return asks

    def _hand_on(self, ended: Sequence[Ended]) -> list[Event]:
        """What whoever issued these samples is told: they have all their tokens. They go to the buffer, together with
        those that they are trained with."""
        found = [Made(one, *self._requests.pop(one.index), self._marks.pop(one.index)) for one in ended]
        self._counts.back(ended, [one.request for one in found])
        told = [(one.ended.index, len(one.request.prompt), len(one.ended.tokens), one.marks[0][0]) for one in found]
        for one in found:
            key = (one.step, one.request.prompt_index)
            self._groups[key].made.append(one)
            self._leave(key)
        return [("back", one) for one in told]

    def _leave(self, key: tuple[int, int]) -> None:
        """One less of a group is in the engine."""
        group = self._groups[key]
        group.running -= 1
        if group.made and (self._apart or not group.running):
            self._deliver(group.made)
            group.made = []
        if not group.running:
            del self._groups[key]

    def _deliver(self, made: Sequence[Made]) -> None:
        numbers, samples = [one.ended.index for one in made], self._labelled(made)
        self._delivery.put(numbers, samples)
        for scorer in self._scorers:
            scorer.take_in.remote(numbers, samples)
        self._delivered = True

    def _labelled(self, made: Sequence[Made]) -> Samples:
        """As samples of no step, whose prompts are numbered through the workload; each knows the versions that made it."""
        per_step = self._worker.scenario.workload.prompts_per_step
        requests = [replace(one.request, prompt_index=one.step * per_step + one.request.prompt_index) for one in made]
        samples = self._worker._samples(-1, requests, [one.ended for one in made])
        columns: dict[str, Any] = {"versions": np.asarray([one.marks[0][0] for one in made], dtype=np.int64)}
        if self._mixes:
            columns["token_versions"] = [versions_of(one.marks, len(one.ended.tokens)) for one in made]
        return samples.with_columns(**columns)

    def _load(self) -> None:
        """Stands still, takes new weights, and goes on."""
        receiver, backend = self._receiver, self._backend
        running, self._met = backend.running(), False
        backend.hold()
        try:
            receiver.load(backend, self._worker.recorder)
        except RuntimeError:
            if not self._worker.scenario.faults or fetches(self._worker.scenario) or not self._meet_again():
                raise  # else somebody who was to take part died
            return
        finally:
            backend.go_on(forget=self._rule.kv == "recompute" or not running)
        waiting = self._marks.keys() - {one.sample for one in running}
        for one in running:
            self._marks[one.sample].append((receiver.held, one.response_tokens))
        self._marks |= {sample: [(receiver.held, 0)] for sample in waiting}  # the new weights begin them
        self.news.add(("spans", self._worker.recorder.take()), ("held", receiver.held))

    def _meet_again(self) -> bool:
        """Waits until the engines that are left have met the sender anew, and returns whether they have; what was recorded
        of the attempt is lost."""
        with self._called:
            if not self._called.wait_for(lambda: self._met, LONGEST_APART_S):
                return False
            self._met = False
        lost = [
            msgspec.structs.replace(span, attrs=span.attrs | {"lost": True}) for span in self._worker.recorder.take()
        ]
        self.news.add(("spans", lost))
        return True

    @contextmanager
    def _recorded(self, stage: str, version: int) -> Iterator[None]:
        """The span of what is done under a version; before its first sample and after its last one the engine is idle."""
        recorder, counts = self._worker.recorder, _Counts()
        self._counts, counts.start_s = counts, time.monotonic()
        with recorder.stage(stage, version * self._every, version) as notes:
            yield
            said = policy.in_flight(self._rule, self._backend.running())
            if said.abort and not self._over:
                self._stop(said.abort, "thrown")
            notes |= counts.notes(self._backend.unfinished) | {"dispatch": self._worker.scenario.rollout.dispatch}
            notes |= self._delivery.notes()
        spans = recorder.take()
        end = spans[-1].end_s if self._backend.unfinished else max(counts.start_s, counts.end_s)
        spans[-1] = msgspec.structs.replace(spans[-1], start_s=counts.start_s, end_s=end)
        self.news.add(("spans", spans))


class _Counts:
    """What an engine did under one version."""

    def __init__(self) -> None:
        self.start_s = self.end_s = 0.0
        """when the first sample came, and when the last one left"""
        self.issued = 0
        self._iterations: list[Iteration] = []
        self._samples = self._prompt = self._response = self._cached = 0

    def count(self, progress: Progress) -> None:
        self._iterations += progress.iterations

    def back(self, ended: Sequence[Ended], requests: Sequence[Request]) -> None:
        self._samples += len(ended)
        self._prompt += sum(len(request.prompt) for request in requests)
        self._response += sum(len(one.tokens) for one in ended)
        self._cached += sum(one.num_cached_tokens for one in ended)

    def notes(self, carried: int) -> dict[str, Any]:
        """What the span says; `carried`: samples that are in the engine at its end."""
        return {
            "tokens": self._prompt + self._response, "samples": self._samples, "prompt_tokens": self._prompt,
            "response_tokens": self._response, "iterations": len(self._iterations),
            "preemptions": sum(found.preempted for found in self._iterations), "cached_tokens": self._cached,
            "recomputed_tokens": sum(found.recomputed_tokens for found in self._iterations),
            "issued": self.issued, "carried": carried,
            "quantities": {"calls": 1.0, "samples": float(self._samples), "tokens": float(self._response)},
        }  # fmt: skip


def versions_of(marks: Sequence[tuple[int, int]], num_tokens: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The version that made each token, [num_tokens]; `marks`: versions, and the tokens that were there before each."""
    starts = [start for _, start in marks] + [num_tokens]
    parts = [np.full(max(after - start, 0), version) for (version, start), after in zip(marks, starts[1:], strict=True)]
    return np.concatenate(parts).astype(np.int64)
