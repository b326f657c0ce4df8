"""Data-parallel copies of one engine that share experts: every iteration waits for the slowest copy.

Each copy schedules its own requests in its own KV cache. Tokens meet at the experts, so an iteration costs what the
fullest copy has in tokens and sequences, with the attention of the slowest (vLLM pads all copies to the largest).
A copy without work runs along.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from lab.placement import Worker
from lab.scenario import Scenario
from profiles.interpolate import iteration_seconds, steps_to_bend
from profiles.iteration import EngineTable, Iteration
from simulator import jump
from simulator.engine import Requests, Settings
from simulator.playing import ROUNDING
from simulator.rollout import NO_LIMIT, NOBODY, Engine, Piece, settings


class LockStep:
    """Copies of an engine that iterate together; a request belongs to copy number `index % copies`."""

    def __init__(
        self, settings: Settings, table: EngineTable, requests: Requests | None, copies: int, max_jump: int = NO_LIMIT
    ) -> None:
        """Asynchronous scheduling is not modelled here: the copies' exchange is waited for."""
        settings = replace(settings, async_scheduling=False)
        self._table, self._max_jump = table.packed(), max_jump
        known = NOBODY if requests is None else requests
        parts = [_part(known, np.arange(copy, len(known), copies)) for copy in range(copies)]
        self._engines = [Engine(settings, table, part, max_jump) for part in parts]
        self._num_known = len(known)

    @property
    def busy(self) -> bool:
        return any(engine.busy for engine in self._engines)

    @property
    def num_running(self) -> int:
        return sum(engine.num_running for engine in self._engines)

    @property
    def num_waiting(self) -> int:
        return sum(engine.num_waiting for engine in self._engines)

    @property
    def free_blocks(self) -> int:
        return sum(engine.free_blocks for engine in self._engines)

    def arrive(self, requests: Sequence[int]) -> None:
        """These requests join the queues of their copies."""
        for engine, owned in self._split(requests):
            engine.arrive(owned)

    def add(self, requests: Requests) -> range:
        """More requests, which join the queues now; returns their numbers."""
        new, copies = range(self._num_known, self._num_known + len(requests)), len(self._engines)
        for copy, engine in enumerate(self._engines):
            engine.add(_part(requests, np.arange((copy - new.start) % copies, len(requests), copies)))
        self._num_known = new.stop
        return new

    def running(self) -> list[tuple[int, int, int]]:
        """Number, prompt tokens and generated tokens of every request that runs, copy by copy."""
        return [
            (self._number(copy, request), prompt, generated)
            for copy, engine in enumerate(self._engines)
            for request, prompt, generated in engine.running()
        ]

    def abort(self, requests: Sequence[int]) -> None:
        """These requests leave, with what they hold."""
        for engine, owned in self._split(requests):
            engine.abort(owned)

    def withdraw(self, number: int) -> list[int]:
        """At most so many of those that would start last leave, each from the longest queue."""
        found = list[int]()
        while len(found) < number:
            copy = max(range(len(self._engines)), key=lambda copy: self._engines[copy].num_waiting)
            taken = self._engines[copy].withdraw(1)
            if not taken:
                break
            found.append(self._number(copy, taken[0]))
        return found[::-1]

    def interrupt(self, forget: bool) -> int:
        """Puts every running request back, as an engine does; returns how many."""
        return sum(engine.interrupt(forget) for engine in self._engines)

    def land(self) -> Piece:
        """Nothing is under way between iterations: the empty piece."""
        return self._engines[0].land()

    def _split(self, requests: Sequence[int]) -> list[tuple[Engine, list[int]]]:
        copies = len(self._engines)
        return [
            (engine, [index // copies for index in requests if index % copies == copy])
            for copy, engine in enumerate(self._engines)
        ]

    def _number(self, copy: int, request: int) -> int:
        return request * len(self._engines) + copy

    def pieces(self) -> Iterator[Piece]:
        """Pieces until every request that waits has its response."""
        while self.busy:
            yield self.turn()

    def ahead(self, until_s: float = np.inf) -> tuple[int, float]:
        """Iterations and seconds of the next piece if all copies only decode in it, as `Engine.ahead` says."""
        active = [engine for engine in self._engines if engine.busy]
        steps = min(jump.jump_length(engine.state, self._max_jump) for engine in active) if self._max_jump > 1 else 0
        if steps > 1:
            steps = self._straight(active, steps)
        if steps <= 1:
            return 0, 0.0
        features = [engine.decoding() for engine in active]
        first, last = self._seconds(features, 0), self._seconds(features, steps - 1)
        rise = (last - first) / (steps - 1)

        def seconds(number: int) -> float:
            return number * first + rise * number * (number - 1) / 2

        if until_s < seconds(steps):
            until_s *= 1 - ROUNDING
            steps = 1 + bisect_left(range(1, steps), True, key=lambda number: seconds(number) >= until_s)
        return steps, seconds(steps)

    def turn(self, until_s: float = np.inf) -> Piece:
        """The next iteration of all copies, or as many as all of them only decode in."""
        active = [engine for engine in self._engines if engine.busy]
        steps, _ = self.ahead(until_s)
        parts = [engine.steps(steps) for engine in active]
        first, last = self._together([p.first for p in parts]), self._together([p.last for p in parts])
        iterations = max(part.iterations for part in parts)
        return Piece(
            seconds=max(iterations, 1) * (first + last) / 2,
            iterations=iterations, sequences=sum(p.sequences for p in parts),
            tokens=sum(p.tokens for p in parts), prefill_tokens=sum(p.prefill_tokens for p in parts),
            first=max((p.first for p in parts), key=lambda it: it.tokens),
            last=max((p.last for p in parts), key=lambda it: it.tokens),
            preempted=sum(p.preempted for p in parts), recomputed_tokens=sum(p.recomputed_tokens for p in parts),
            cached_tokens=sum(p.cached_tokens for p in parts), ended=self._ended(active, parts),
        )  # fmt: skip

    def _ended(self, active: list[Engine], parts: list[Piece]) -> tuple[int, ...]:
        numbers = [self._engines.index(engine) for engine in active]
        return tuple(
            self._number(copy, index) for copy, part in zip(numbers, parts, strict=True) for index in part.ended
        )

    def _together(self, iterations: list[Iteration]) -> float:
        """Time of one iteration: all copies are as full as the fullest, and wait for the slowest attention."""
        tokens, sequences = max(it.tokens for it in iterations), max(it.sequences for it in iterations)
        padded = [replace(it, tokens=tokens, sequences=sequences) for it in iterations if it.tokens]
        return max((float(iteration_seconds(self._table, it.features())) for it in padded), default=0.0)

    def _straight(self, active: list[Engine], steps: int) -> int:
        """Iterations, at most `steps`, in which the time of all copies together is a straight line."""
        features = [engine.decoding() for engine in active]
        for one in features:
            steps = min(steps, int(steps_to_bend(self._table, one[5] / one[4], one[6])))
        while steps > 2 and self._slowest(features, 0) != self._slowest(features, steps - 1):
            steps //= 2  # one copy overtakes another on the way
        return steps

    def _slowest(self, features: list[np.ndarray], after: int) -> int:
        return int(np.argmax(self._times(features, after)))

    def _seconds(self, features: list[np.ndarray], after: int) -> float:
        return max(self._times(features, after))

    def _times(self, features: list[np.ndarray], after: int) -> list[float]:
        """Time of each copy's iteration, so many iterations after the one described."""
        tokens, sequences = max(one[0] for one in features), max(one[1] for one in features)
        times = []
        for one in features:
            moved = jump.later(one, after)
            moved[0], moved[1] = tokens, sequences
            times.append(float(iteration_seconds(self._table, moved)))
        return times


def _part(requests: Requests, owned: np.ndarray) -> Requests:
    contents = None if requests.contents is None else [requests.contents[index] for index in owned]
    return Requests(prompt=requests.prompt[owned], response=requests.response[owned], contents=contents)


def start_engine(
    scenario: Scenario, worker: Worker, table: EngineTable, requests: Requests | None = None
) -> Engine | LockStep:
    """The engine of a rollout worker, with its copies if it has any."""
    copies = worker.parallelism.data
    if copies > 1:
        return LockStep(settings(scenario, worker), table, requests, copies)
    return Engine(settings(scenario, worker), table, requests)
