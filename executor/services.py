"""A scoring service in real time: samples come one by one, wait in one queue, and are scored in batches.

When a batch leaves is decided by the same rule as in a simulation (`lab.policies.scoring.leaving`). What a sample scores
does not depend on its batch, so neither do the numbers on when which sample came.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from executor.experience import Samples, joined
from executor.recorder import Recorder
from executor.rewards import Columns, RewardFailed
from lab.accounts import SAMPLE_WAIT
from lab.policies.scoring import Batching, leaving
from lab.timeline import Span

if TYPE_CHECKING:
    from executor.crew import Crew

Score = Callable[[Samples, dict[str, Any]], Columns]
"""(samples, what the span shall say) -> columns"""
ELSEWHERE = "elsewhere"
"""a note of a batch that another worker scored, who counts it"""
Key = tuple[int, int]
"""a sample of a step: its prompt, its index"""


@dataclass(frozen=True)
class Waiting:
    """One sample in the queue."""

    key: Key
    samples: Samples
    """it alone"""
    since_s: float


class Desk:
    """Where the samples of a step are handed in while it is generated, and its scores are collected.

    One thread serves a step from its first sample on; samples of later steps wait until it has been collected. Any
    thread may call.
    """

    def __init__(self, stage: str, recorder: Recorder, rule: Batching, score: Score, num_servers: int = 1) -> None:
        """`num_servers` batches may be under way together; where that is more than one, `score` records no ops."""
        self._stage, self._recorder, self._rule, self._score = stage, recorder, rule, score
        self._own_servers = num_servers
        self._crew: Crew | None = None
        self._changed = threading.Condition()
        self._waiting: dict[int, list[Waiting]] = {}
        self._given: dict[int, set[Key]] = {}
        self._scored: dict[Key, tuple[Columns, int]] = {}
        self._busy, self._inside, self._closed, self._ended = 0, 0, False, -1
        self._error: BaseException | None = None
        self._counts: dict[str, Any] = {}
        self._thread: threading.Thread | None = None

    def led_by(self, crew: Crew) -> None:
        """From now on the batches of this queue go to a crew whose number changes."""
        self._crew = crew

    @property
    def _num_servers(self) -> int:
        return self._own_servers if self._crew is None else self._crew.num_servers

    def submit(self, step: int, samples: Samples) -> None:
        """These have all their tokens. Those of a step that is collected are nobody's any more."""
        with self._changed:
            if step > self._ended:
                self._enter(step, samples)
                self._changed.notify_all()

    def _enter(self, step: int, samples: Samples) -> None:
        given, now = self._given.setdefault(step, set()), time.monotonic()
        for i, key in enumerate(keys(samples)):
            if key not in given:
                given.add(key)
                self._waiting.setdefault(step, []).append(Waiting(key, samples.take([i]), now))

    def open(self, step: int, policy_version: int, now_s: float = 0.0) -> None:
        """From now on samples of this step are scored; `now_s` by the clock of the run."""
        assert self._thread is None, "one step after the other"
        self._closed, self._error, self._scored, self._counts = False, None, {}, {"batches": 0}
        if self._crew is not None:
            self._crew.open(step, policy_version)
            threading.Thread(target=self._look, args=(self._crew, step, now_s), daemon=True).start()
        self._thread = threading.Thread(target=self._serve, args=(step, policy_version), daemon=True)
        self._thread.start()

    def _look(self, crew: Crew, step: int, now_s: float) -> None:
        """Looks at the queue until the step is through."""
        begun = time.monotonic()
        while self._ended < step and self._error is None:
            with self._changed:
                queued, inside = len(self._waiting.get(step, ())), self._inside
            crew.look(queued, inside, now_s + time.monotonic() - begun)
            with self._changed:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._ended >= step, crew.look_s)

    def others(self) -> list[Span]:
        """What the rest of the crew did for the step that was collected."""
        return [] if self._crew is None else self._crew.close()

    def collect(self, step: int, samples: Samples) -> Columns:
        """The columns of these samples, which are all that the step has; those never handed in are scored now.

        Raises whatever `score` raised for one of its batches.
        """
        assert self._thread is not None, "opened before"
        with self._changed:
            ahead = len(self._given.get(step, ()))
            self._enter(step, samples)
            self._counts["ahead"], self._closed = ahead, True
            self._changed.notify_all()
        self._thread.join()
        self._thread = None
        with self._changed:
            self._ended = max(self._ended, step)
            self._changed.notify_all()
            for later in [known for known in self._given if known <= step]:
                self._given.pop(later), self._waiting.pop(later, None)
        if self._error is not None:
            raise self._error
        return whole([self._scored[key] for key in keys(samples)])

    def _serve(self, step: int, policy_version: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting.get(step) or self._closed)
        with (
            self._recorder.stage(self._stage, step, policy_version) as notes,
            ThreadPoolExecutor(self._own_servers if self._crew is None else self._crew.most) as pool,
        ):
            while (batch := self._next(step)) is not None:
                if self._own_servers == 1 and self._crew is None:
                    self._work(batch)
                else:
                    pool.submit(self._work, batch)
            pool.shutdown()
            notes |= self._counts | ({"scaling": self._crew.decisions} if self._crew is not None else {})

    def _next(self, step: int) -> list[Waiting] | None:
        """The batch that leaves next, a server being free for it; None when no more come."""
        with self._changed:
            start = time.monotonic()
            while self._error is None:
                queue, now = self._waiting.get(step, []), time.monotonic()
                if self._closed and not queue:
                    return None
                if self._busy < self._num_servers and (number := self._leaving(queue, now)):
                    if now > start and not self._busy:
                        self._recorder.op_between(SAMPLE_WAIT, start, now)
                    self._busy += 1
                    self._inside += number
                    self._waiting[step] = queue[number:]
                    return queue[:number]
                due = queue[0].since_s + self._rule.max_wait_s - now if queue else None
                self._changed.wait(due if due is not None and due > 0 else None)
            return None

    def _leaving(self, queue: Sequence[Waiting], now: float) -> int:
        lengths = [item.samples.lengths[0] for item in queue[: self._rule.max_samples + 1]]
        waited = now - queue[0].since_s if queue else 0.0
        return leaving(self._rule, lengths, waited, more=not self._closed)

    def _work(self, batch: Sequence[Waiting]) -> None:
        notes: dict[str, Any] = {}
        try:
            samples = joined([item.samples for item in batch])
            crew = self._crew
            columns = self._score(samples, notes) if crew is None else crew.score(samples, notes, self._score)
        except BaseException as error:  # told to whoever collects
            with self._changed:
                self._error, self._busy, self._inside = error, self._busy - 1, self._inside - len(batch)
                self._changed.notify_all()
            return
        with self._changed:
            self._scored |= {item.key: (columns, i) for i, item in enumerate(batch)}
            if not notes.pop(ELSEWHERE, False):
                self._counts = added(self._counts, notes)
                self._counts["batches"] += 1
            self._busy, self._inside = self._busy - 1, self._inside - len(batch)
            self._changed.notify_all()


def keys(samples: Samples) -> list[Key]:
    """Of each sample its prompt within the step and its index among those of the prompt."""
    return list(zip(samples.prompts.tolist(), samples.indices.tolist(), strict=True))


def added(counts: dict[str, Any], notes: dict[str, Any]) -> dict[str, Any]:
    """Sums by name, of quantities too."""
    found = dict(counts)
    for name, value in notes.items():
        found[name] = added(found.get(name, {}), value) if isinstance(value, dict) else found.get(name, 0) + value
    return found


def whole(rows: Sequence[tuple[Columns, int]]) -> Columns:
    """Columns of samples from the batches that they were scored in: each row is a place in the columns of one batch.

    Raises RewardFailed where batches have different columns.
    """
    found: Columns = {}
    for columns, _ in rows[1:]:
        if columns.keys() != rows[0][0].keys():
            names = [", ".join(sorted(given)) for given in (rows[0][0], columns)]
            raise RewardFailed(f"samples of one step have different scores: {names[0]}; then {names[1]}")
    for name, column in (rows[0][0] if rows else {}).items():
        values = [columns[name][i] for columns, i in rows]
        found[name] = values if isinstance(column, list) else np.asarray(values)
    return found
