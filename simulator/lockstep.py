"""Data-parallel copies of one engine that share experts: every iteration waits for the slowest copy.

Each copy schedules its own requests in its own KV cache. Tokens meet at the experts, so an iteration costs what the
fullest copy has in tokens and sequences, with the attention of the slowest (vLLM pads all copies to the largest).
A copy without work runs along.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from lab.placement import Worker
from lab.scenario import Scenario
from profiles.interpolate import iteration_seconds, steps_to_bend
from profiles.iteration import EngineTable, Iteration
from simulator import jump
from simulator.engine import Requests, Settings
from simulator.rollout import NO_LIMIT, Engine, Piece, settings


class LockStep:
    """Copies of an engine that iterate together; a request belongs to copy number `index % copies`."""

    def __init__(
        self, settings: Settings, table: EngineTable, requests: Requests, copies: int, max_jump: int = NO_LIMIT
    ) -> None:
        """Asynchronous scheduling is not modelled here: the copies' exchange is waited for."""
        settings = replace(settings, async_scheduling=False)
        self._table, self._max_jump = table.packed(), max_jump
        self._owned = [np.arange(copy, len(requests), copies) for copy in range(copies)]
        self._engines = [Engine(settings, table, _part(requests, owned), max_jump) for owned in self._owned]

    @property
    def busy(self) -> bool:
        return any(engine.busy for engine in self._engines)

    def arrive(self, requests: Sequence[int]) -> None:
        """These requests join the queues of their copies."""
        for index in requests:
            self._engines[index % len(self._engines)].arrive([index // len(self._engines)])

    def pieces(self) -> Iterator[Piece]:
        """Pieces until every request that waits has its response."""
        while self.busy:
            yield self.turn()

    def turn(self) -> Piece:
        """The next iteration of all copies, or as many as all of them only decode in."""
        active = [engine for engine in self._engines if engine.busy]
        steps = min(jump.jump_length(engine.state, self._max_jump) for engine in active) if self._max_jump > 1 else 0
        if steps > 1:
            steps = self._straight(active, steps)
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
            int(self._owned[copy][index]) for copy, part in zip(numbers, parts, strict=True) for index in part.ended
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
        tokens, sequences = max(one[0] for one in features), max(one[1] for one in features)
        times = []
        for one in features:
            moved = jump.later(one, after)
            moved[0], moved[1] = tokens, sequences
            times.append(float(iteration_seconds(self._table, moved)))
        return int(np.argmax(times))


def _part(requests: Requests, owned: np.ndarray) -> Requests:
    contents = None if requests.contents is None else [requests.contents[index] for index in owned]
    return Requests(prompt=requests.prompt[owned], response=requests.response[owned], contents=contents)


def start_engine(scenario: Scenario, worker: Worker, table: EngineTable, requests: Requests) -> Engine | LockStep:
    """The engine of a rollout worker, with its copies if it has any."""
    copies = worker.parallelism.data
    if copies > 1:
        return LockStep(settings(scenario, worker), table, requests, copies)
    return Engine(settings(scenario, worker), table, requests)
