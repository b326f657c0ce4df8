"""Rollout engines of a scenario: the compiled scheduler, played piece by piece so that others can come between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.fates import INDEX, STEP, Fates
from lab.fates import PROMPT as PROMPT_TOKENS
from lab.fates import RESPONSE as RESPONSE_TOKENS
from lab.library import device
from lab.placement import Worker
from lab.scenario import Scenario
from profiles.iteration import EngineTable, Iteration
from profiles.memory import kv_blocks
from simulator import playing
from simulator.blocks import Ints
from simulator.engine import Contents, Requests, Settings, build, grouped
from simulator.jump import describe_decoding
from simulator.requests import compacted, enlarged, leave, num_gone, rows_of, youngest
from simulator.scheduler import (
    DONE,
    FLYING,
    GENERATED,
    GONE,
    PROMPT,
    ROW,
    RUNNING,
    WAITING,
    State,
    forget_all,
    interrupt,
    wait,
)

NO_LIMIT = 1 << 60
PROMPTS_OF_A_STEP = 1 << 32
"""more than a step has, so that every prompt of a run has a number of its own"""
FEW = 64
"""rows from which on those of ended requests are given up"""
NOBODY = Requests(prompt=np.zeros(0, dtype=np.int64), response=np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Iterations that follow each other with the same requests; one iteration, or many that only decode."""

    seconds: float
    """alone on the engine's devices"""
    iterations: int
    sequences: int
    tokens: int
    """scheduled in each iteration"""
    prefill_tokens: int
    first: Iteration
    last: Iteration
    preempted: int
    recomputed_tokens: int
    cached_tokens: int
    """of prompts, found in the prefix cache"""
    ended: tuple[int, ...]
    """requests that have all their tokens now"""

    @property
    def op(self) -> str:
        return "prefill" if self.prefill_tokens else "decode"


class Engine:
    """One engine, or one data-parallel copy of it.

    Requests have numbers in the order in which the engine gets them. Those of the start wait from `arrive` on, those
    that are added wait at once.
    """

    def __init__(
        self, settings: Settings, table: EngineTable, requests: Requests | None = None, max_jump: int = NO_LIMIT
    ) -> None:
        """`max_jump` 1 steps through every iteration. Raises TooSmall where a request can never fit the KV cache."""
        known = NOBODY if requests is None else requests
        self._settings, self._contents = settings, Contents()
        self.state: State = build(settings, known, self._contents)
        self.times = np.full((len(known), 3), np.nan)
        self._ids, self._num_known = np.arange(len(known)), len(known)
        self._table, self._max_jump = table.packed(), max_jump
        self._clock, self._features, self._piece = np.zeros(2), np.zeros((2, 10)), np.zeros(7, dtype=np.int64)

    @property
    def busy(self) -> bool:
        """Whether a request runs, waits, or has tokens under way."""
        count = self.state.count
        return bool(count[RUNNING] or count[WAITING] or count[FLYING])

    @property
    def num_running(self) -> int:
        return int(self.state.count[RUNNING])

    @property
    def num_waiting(self) -> int:
        return int(self.state.count[WAITING])

    @property
    def free_blocks(self) -> int:
        return int(self.state.blocks.free[0])

    def arrive(self, requests: Sequence[int]) -> None:
        """These requests join the queue."""
        for row in rows_of(self._ids, requests):
            wait(self.state, row)

    def add(self, requests: Requests) -> range:
        """More requests, which join the queue now; returns their numbers. Raises TooSmall as the constructor does."""
        size = len(self._ids)
        if size >= FEW and 2 * num_gone(self.state, size) > size:
            self.state, kept = compacted(self.state, size, self._settings, self._contents)
            self._ids, self.times = self._ids[kept], self.times[kept]
            size = len(kept)
        self.state = enlarged(self.state, size, self._settings, requests, self._contents)
        new = range(self._num_known, self._num_known + len(requests))
        self._num_known = new.stop
        self._ids = np.concatenate([self._ids, np.arange(new.start, new.stop)])
        self.times = np.concatenate([self.times, np.full((len(requests), 3), np.nan)])
        for row in range(size, size + len(requests)):
            wait(self.state, row)
        return new

    def running(self) -> list[tuple[int, int, int]]:
        """Number, prompt tokens and generated tokens of every request that runs, in order of admission."""
        rows = self.state.running[: self.num_running]
        found = self.state.request[rows][:, [PROMPT, GENERATED]].tolist()
        return [(request, *pair) for request, pair in zip(self._ids[rows].tolist(), found, strict=True)]

    def have(self, requests: Sequence[int], tokens: Sequence[int]) -> None:
        """These requests, which wait, have so many tokens already; their keys and values are computed anew."""
        self.state.request[rows_of(self._ids, requests), GENERATED] = tokens

    def abort(self, requests: Sequence[int]) -> None:
        """These requests leave, with what they hold; those that have ended are gone already."""
        for row in rows_of(self._ids, [request for request in requests if request in self._ids]):
            if self.state.request[row, ROW] != GONE:
                leave(self.state, row)

    def withdraw(self, number: int) -> list[int]:
        """At most so many of those that wait and would start last leave; fewer where those after them have tokens."""
        found = list[int]()
        while len(found) < number and (row := youngest(self.state)) >= 0:
            leave(self.state, row)
            found.append(int(self._ids[row]))
        return found[::-1]

    def land(self) -> Piece:
        """What the device has under way ends, and nothing is scheduled after it: the engine stands still."""
        before = float(self._clock[0])
        playing.land(self.state, self._clock, self._features, self._piece, self.times)
        return self._described(float(self._clock[0]) - before)

    def turn(self, until_s: float = np.inf) -> Piece:
        """The next piece; it ends at the first iteration after `until_s` where somebody could join then."""
        before = self._clock[0]
        playing.turn(
            self.state, self._table, self._clock, self._features, self._piece, self.times, self._max_jump, until_s
        )
        return self._described(float(self._clock[0] - before))

    def ahead(self, until_s: float = np.inf) -> tuple[int, float]:
        """Iterations and seconds of the next piece if it only decodes; (0, 0.0) where the next iteration does more.

        Nothing happens yet: `turn` with the same time plays it.
        """
        steps, seconds = playing.ahead(
            self.state, self._table, self._clock, self._features, self._max_jump, until_s
        )  # fmt: skip
        return int(steps), float(seconds)

    def pieces(self) -> Iterator[Piece]:
        """Pieces until every request that waits has its response."""
        while self.busy:
            yield self.turn()

    def decoding(self) -> NDArray[np.float64]:
        """(10,) features of the next iteration if every running request gets one token."""
        features = np.zeros(10)
        describe_decoding(self.state, features)
        return features

    def steps(self, number: int) -> Piece:
        """A piece of so many decoding iterations, as `jump_length` allows; 0 or 1: a single iteration."""
        allowed, self._max_jump = self._max_jump, max(number, 1)
        piece = self.turn()
        self._max_jump = allowed
        return piece

    def interrupt(self, forget: bool) -> int:
        """Puts every running request back to be computed again, as a weight update in mid-flight does; returns how many.

        `forget` empties the prefix cache: keys and values of other weights are worth nothing. Nothing may be under way
        on the device: with asynchronous scheduling `land` comes first.
        """
        number = int(interrupt(self.state))
        if forget:
            forget_all(self.state)
        return number

    def _described(self, seconds: float) -> Piece:
        found, features = self._piece.tolist(), self._features.tolist()
        return Piece(
            seconds=seconds, iterations=found[playing.ITERATIONS], sequences=found[playing.SEQUENCES],
            tokens=found[playing.SCHEDULED], prefill_tokens=found[playing.PREFILLED], first=_iteration(features[0]),
            last=_iteration(features[1]), preempted=found[playing.PREEMPTIONS], recomputed_tokens=found[playing.AGAIN],
            cached_tokens=found[playing.FOUND_TOKENS],
            ended=tuple(self._ids[self.state.done[: self.state.count[DONE]]].tolist()),
        )  # fmt: skip


def _iteration(features: list[float]) -> Iteration:
    return Iteration(
        tokens=int(features[0]), sequences=int(features[1]), prefill_tokens=int(features[2]), prefix=features[3],
        decodes=int(features[4]), context_sum=features[5], context_max=features[6], token_context=features[7],
        context_read=features[8], context_min=features[9],
    )  # fmt: skip


def settings(scenario: Scenario, worker: Worker) -> Settings:
    """How a scenario starts an engine. The transformers library fills whole batches, and has no blocks to share."""
    rollout, plain = scenario.rollout, worker.backend == "transformers"
    on_gpu = device(scenario.hardware.node_of(worker.devices[0]).device).kind == "gpu"
    ahead = on_gpu if rollout.async_scheduling is None else rollout.async_scheduling
    contiguous = plain or rollout.kv_layout == "contiguous"
    return Settings(
        max_num_seqs=rollout.max_num_seqs, max_num_batched_tokens=rollout.max_num_batched_tokens,
        num_blocks=kv_blocks(scenario, worker), block_tokens=rollout.block_tokens,
        prefix_caching=rollout.prefix_caching and not plain, async_scheduling=ahead and not plain,
        reserve_full_isl=rollout.reserve_full_isl, batching="static" if plain else rollout.batching,
        reuse_uncached_first=rollout.reuse_uncached_first, watermark=rollout.watermark,
        contiguous_tokens=scenario.workload.max_sequence_tokens if contiguous else 0,
    )  # fmt: skip


def samples(scenario: Scenario, ledger: Fates, numbers: Ints) -> Requests:
    """What an engine is asked for these samples of the ledger; those of one prompt share its full blocks."""
    prompt, response = ledger.column(PROMPT_TOKENS)[numbers], ledger.column(RESPONSE_TOKENS)[numbers]
    if not scenario.rollout.prefix_caching:
        return Requests(prompt=prompt, response=response)
    prompts = ledger.column(INDEX)[numbers] // scenario.num_tried
    prompts += ledger.column(STEP)[numbers] * PROMPTS_OF_A_STEP
    width = scenario.workload.max_sequence_tokens // scenario.rollout.block_tokens + 1
    contents = grouped(prompt.tolist(), prompts.tolist(), scenario.rollout.block_tokens, width)
    return Requests(prompt=prompt, response=response, contents=contents)
