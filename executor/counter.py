"""A scoring service where there is no barrier: samples come without end, and what is scored from one moment on belongs to
the next step.

Which batches leave and when is decided as at a desk (`executor.services`), by the rule that a simulation goes by.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from executor.experience import Samples, joined
from executor.recorder import Recorder
from executor.rewards import Columns
from executor.services import Score, added
from lab.accounts import SAMPLE_WAIT
from lab.policies.scoring import Batching, leaving
from lab.timeline import Span

Told = Callable[[list[int], Columns], None]
"""is told of samples that have been scored, by their numbers, with their columns"""


@dataclass(frozen=True)
class Waiting:
    """One sample in the queue."""

    number: int
    samples: Samples
    """it alone"""
    since_s: float


class Counter:
    """One thread serves from the beginning to the end of a run. Any thread may hand in, and have the step ended."""

    def __init__(
        self, stage: str, recorder: Recorder, rule: Batching, score: Score, told: Told, num_servers: int = 1
    ) -> None:
        """`num_servers` batches may be under way together; where that is more than one, `score` records no ops."""
        self._stage, self._recorder, self._rule, self._score, self._told = stage, recorder, rule, score, told
        self._num_servers = num_servers
        self._changed = threading.Condition()
        self._waiting: list[Waiting] = []
        self._busy, self._turns, self._ended, self._over = 0, 0, 0, False
        self._error: BaseException | None = None
        self._counts: dict[str, Any] = {}
        self._spans: list[Span] = []
        """of steps that are over"""

    def begin(self, step: int, policy_version: int) -> None:
        """From now on what comes is scored, for this step at first."""
        self._next = (step, policy_version)
        threading.Thread(target=self._serve, name=self._stage, daemon=True).start()

    def submit(self, numbers: Sequence[int], samples: Samples) -> None:
        """These have all their tokens."""
        now = time.monotonic()
        with self._changed:
            self._waiting += [Waiting(number, samples.take([i]), now) for i, number in enumerate(numbers)]
            self._changed.notify_all()

    def hand_on(self, step: int, policy_version: int, *, last: bool = False) -> list[Span]:
        """The batch of the step before is made: a pass that is under way still belongs to it, the next one to `step`.

        Returns the spans of the step before. Raises what scoring failed with.
        """
        with self._changed:
            self._next, self._over = (step, policy_version), last
            self._turns += 1
            mine = self._turns
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended >= mine or self._error is not None)
            if self._error is not None:
                raise self._error
            found, self._spans = self._spans, []
            return found

    def _serve(self) -> None:
        with ThreadPoolExecutor(self._num_servers) as pool:
            turn = 0
            while not (self._over and self._ended == self._turns) and self._error is None:
                turn += 1
                self._counts = {"batches": 0}
                with self._recorder.stage(self._stage, *self._next) as notes:
                    while (batch := self._leaving(turn)) is not None:
                        if self._num_servers == 1:
                            self._work(batch)
                        else:
                            pool.submit(self._work, batch)
                    notes |= self._counts
                with self._changed:
                    self._ended, self._spans = turn, self._spans + self._recorder.take()
                    self._changed.notify_all()

    def _leaving(self, turn: int) -> list[Waiting] | None:
        """The batch that leaves next, a server being free for it; None when the step is over."""
        with self._changed:
            start = time.monotonic()
            while self._error is None:
                now = time.monotonic()
                over = self._turns >= turn
                number = 0 if over or self._busy >= self._num_servers else self._number(now)
                if (over or number) and now > start and not self._busy:
                    self._recorder.op_between(SAMPLE_WAIT, start, now)
                if over:
                    return None
                if number:
                    self._busy += 1
                    found, self._waiting = self._waiting[:number], self._waiting[number:]
                    return found
                due = self._waiting[0].since_s + self._rule.max_wait_s - now if self._waiting else None
                self._changed.wait(due if due is not None and due > 0 else None)
            return None

    def _number(self, now: float) -> int:
        lengths = [item.samples.lengths[0] for item in self._waiting[: self._rule.max_samples + 1]]
        return leaving(self._rule, lengths, now - self._waiting[0].since_s if self._waiting else 0.0)

    def _work(self, batch: Sequence[Waiting]) -> None:
        notes: dict[str, Any] = {}
        try:
            columns = self._score(joined([item.samples for item in batch]), notes)
            self._told([item.number for item in batch], columns)
        except BaseException as error:  # told to whoever ends the step
            with self._changed:
                self._error = error
        with self._changed:
            self._counts = added(self._counts, notes)
            self._counts["batches"] = self._counts.get("batches", 0) + 1
            self._busy -= 1
            self._changed.notify_all()
