"""An engine's part in a rollout in which engines help each other: it generates in one thread, and takes commands from
others meanwhile.

Samples are told by their place in the step: prompt × tried + sample. Whoever commands waits until the pass under way has
ended. Runs in the engine's process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from executor.diversity import diversity
from executor.experience import Samples
from executor.inference import Ended, Iteration, Request
from lab.policies.stealing import Room

if TYPE_CHECKING:
    from executor.rollout import RolloutWorker

TALK = "talk"
"""the group of an actor's threads that take commands while another call runs"""
_PATIENCE_S = 2.0
"""after which a listener is told that there is nothing new, so that no thread waits for ever"""


@dataclass(kw_only=True)
class News:
    """What has happened on an engine since it was asked last."""

    ended: list[int] = field(default_factory=list)
    """places of samples that have all their tokens"""
    dry: bool = False
    """nothing waits, and more could run"""

    def __bool__(self) -> bool:
        return bool(self.ended) or self.dry


class Seat:
    """One engine in the rollout of one step."""

    def __init__(self, worker: RolloutWorker, step: int, heats: NDArray[np.float64]) -> None:
        """`heats`: the temperature of each sample of the step, [prompts, samples]."""
        self._worker, self.step, self._heats = worker, step, heats
        self._tried = worker.scenario.num_tried
        self._changed = threading.Condition()
        self._commands: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._news = News()
        self._requests: dict[int, Request] = {}
        """of all samples that were given to it and were not taken away"""
        self._waiting: list[int] = []
        """places of those that have not begun, in the order in which they came"""
        self._ended: dict[int, Ended] = {}
        self._iterations: list[Iteration] = []
        self._busy_s = 0.0
        self._closed: dict[str, Any] | None = None
        self._gone = False
        self._dry = False

    def play(
        self, policy_version: int, given: Sequence[int], about: Mapping[str, Any]
    ) -> tuple[Samples, dict[str, Any]]:
        """Generates until it is closed. The samples that have all their tokens, and what is reported.

        `about` is added to what the stage's span says. Raises RuntimeError where the engine has another version.
        """
        worker = self._worker
        if policy_version != worker.policy_version:
            problem = f"{worker.worker.name} has policy version {worker.policy_version}"
            raise RuntimeError(f"{problem}, step {self.step} asks for {policy_version}")
        try:
            with worker.recorder.stage("rollout", self.step, policy_version) as notes:
                self._take_in(given)
                while self._closed is None:
                    self._turn()
                samples, info = self._result(notes)
                notes |= {**about, **self._closed}
            return samples, {"spans": worker.recorder.take(), **info}
        finally:
            with self._changed:
                self._gone = True
                self._obey()
                self._changed.notify_all()

    def _turn(self) -> None:
        """Obeys, and then one pass; an engine that has nothing waits for a command."""
        with self._changed:
            self._obey()
            if self._closed is not None:
                return
            self._tell_if_dry()
            if not self._worker.backend.unfinished:
                self._changed.wait_for(lambda: bool(self._commands))
                return
        progress = self._worker.backend.advance()
        for found in progress.iterations:
            self._worker._record(found, progress.start_s, progress.end_s)
        self._iterations += progress.iterations
        self._busy_s += progress.end_s - progress.start_s
        self._note(progress.ended)

    def _note(self, ended: Sequence[Ended]) -> None:
        begun = {one.sample for one in self._worker.backend.running()} | {one.index for one in ended}
        with self._changed:
            self._waiting = [place for place in self._waiting if place not in begun]
            self._ended |= {one.index: one for one in ended}
            self._news.ended += [one.index for one in ended]
            self._news.dry |= bool(ended) and self._dry
            if ended:
                self._changed.notify_all()

    def _tell_if_dry(self) -> None:
        dry = not self._num_queued and self._free_slots > 0
        if dry and not self._dry:
            self._news.dry = True
            self._changed.notify_all()
        self._dry = dry

    def _obey(self) -> None:
        for command, answer in self._commands:
            try:
                answer.set_result(command())
            except BaseException as error:  # told to whoever commands
                answer.set_exception(error)
        self._commands = []

    def _ask(self, command: Callable[[], Any]) -> Any:
        """Has the engine's thread do something between two passes; None where it is gone."""
        answer: Future[Any] = Future()
        with self._changed:
            if self._gone:
                return None
            self._commands.append((command, answer))
            self._changed.notify_all()
        return answer.result()

    def listen(self) -> News:
        """What is new, as soon as something is."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._news) or self._gone, _PATIENCE_S)
            news, self._news = self._news, News()
            return news

    def state(self) -> tuple[Room, float]:
        """What waits and runs, and how many more could; and the seconds of all passes so far."""
        return (self._ask(self._room) or self._room()), self._busy_s

    def give(self, places: Sequence[int]) -> None:
        """These samples wait in it from now on."""
        self._ask(lambda: self._take_in(places))

    def withdraw(self, number: int) -> list[int]:
        """At most so many of the samples that wait and have not begun leave, those that would begin last."""
        return self._ask(lambda: self._let_go(number)) or []

    def hand_on(self, places: Sequence[int], sinks: Sequence[Any]) -> None:
        """Those of these samples that are here go to whoever takes samples one by one."""
        self._ask(lambda: self._hand_on(places, sinks))

    def close(self, notes: Mapping[str, Any]) -> None:
        """The step needs it no more: what runs or waits is given up. `notes` are added to what the stage's span says."""
        self._ask(lambda: self._close(notes))

    def _take_in(self, places: Sequence[int]) -> None:
        if not places:
            return
        prompts = sorted({place // self._tried for place in places})
        every = self._worker._requests(self.step, prompts, self._heats[prompts])
        known = {request.prompt_index * self._tried + request.sample: request for request in every}
        self._requests |= {place: known[place] for place in places}
        self._waiting += places
        self._worker.backend.submit([known[place] for place in places], places)

    def _let_go(self, number: int) -> list[int]:
        late = self._waiting[max(len(self._waiting) - number, 0) :]
        self._worker.backend.abort(late)
        self._waiting = self._waiting[: len(self._waiting) - len(late)]
        for place in late:
            del self._requests[place]
        return late

    def _hand_on(self, places: Sequence[int], sinks: Sequence[Any]) -> None:
        mine = [place for place in places if place in self._ended]
        if not mine:
            return
        samples = self._samples(mine)
        for sink in sinks:
            sink.submit.remote(self.step, mine, samples)
        if self._worker.outgoing is not None:
            self._worker.outgoing.ended(self.step, samples)

    def _close(self, notes: Mapping[str, Any]) -> None:
        out = [place for place in self._requests if place not in self._ended]
        made = self._worker.backend.abort(out)
        aborted = {"aborted": len(out), "aborted_tokens": sum(made.values())} if out else {}
        self._closed = {**notes, **aborted}

    def _result(self, notes: dict[str, Any]) -> tuple[Samples, dict[str, Any]]:
        mine = sorted(self._ended)
        requests, ended = [self._requests[place] for place in mine], dict(enumerate(self._ended[p] for p in mine))
        notes |= self._worker._summary(requests, self._iterations, ended)
        samples = self._samples(mine)
        responses = (samples.prompts, np.asarray(samples.lengths, dtype=np.int64) - samples.num_prompt_tokens)
        info = {"responses": responses, "diversity": diversity(samples), "made": len(samples)}
        return samples, info | {"places": mine}

    def _samples(self, places: Sequence[int]) -> Samples:
        requests, ended = [self._requests[place] for place in places], [self._ended[place] for place in places]
        return self._worker._samples(self.step, requests, ended)

    def _room(self) -> Room:
        running, scenario = self._worker.backend.running(), self._worker.scenario
        last = self._iterations[-1].kv_usage if self._iterations else 0.0
        workload, rollout = scenario.workload, scenario.rollout
        block = rollout.block_tokens * self._worker._kv_bytes_per_token
        return Room(
            num_running=len(running), num_queued=self._num_queued, free_slots=self._free_slots,
            free_blocks=(1.0 - last) * rollout.kv_bytes / block if rollout.kv_bytes else float(rollout.max_num_seqs) * 1e6,
            mean_blocks=(workload.prompt_tokens.mean + workload.response_tokens.mean) / rollout.block_tokens,
        )  # fmt: skip

    @property
    def _num_queued(self) -> int:
        """Samples that do not run: not begun yet, or put back because there was no room."""
        return self._worker.backend.unfinished - len(self._worker.backend.running())

    @property
    def _free_slots(self) -> int:
        return self._worker.scenario.rollout.max_num_seqs - len(self._worker.backend.running())


def open_seat(worker: RolloutWorker, step: int, heats: NDArray[np.float64]) -> None:
    """An engine takes part in the rollout of a step."""
    worker.seat = Seat(worker, step, heats)
    if worker.outgoing is not None:
        worker.outgoing.begin(step)


def play(worker: RolloutWorker, version: int, given: Sequence[int], about: Mapping[str, Any]) -> tuple[Any, Any]:
    """`Seat.play`; where samples are sent in a stage of their own they stay here, and None is returned for them."""
    seat = worker.seat
    samples, info = seat.play(version, given, about)
    if worker.outgoing is None:
        return samples, info
    worker.outgoing.made(seat.step, samples)
    return None, info


def talk(worker: RolloutWorker, command: str, *arguments: Any) -> Any:
    """A method of the engine's seat, while it generates."""
    return getattr(worker.seat, command)(*arguments)
