"""Rollout engines of a scenario: the compiled scheduler, played piece by piece so that others can come between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.library import device
from lab.placement import Worker
from lab.scenario import Scenario
from profiles.iteration import EngineTable, Iteration
from profiles.memory import kv_blocks
from simulator import playing
from simulator.engine import Requests, Settings, build, grouped
from simulator.jump import describe_decoding
from simulator.scheduler import DONE, FLYING, RUNNING, WAITING, State, forget_all, interrupt, wait

NO_LIMIT = 1 << 60


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
    """One engine, or one data-parallel copy of it. Requests are known from the start and wait from `arrive` on."""

    def __init__(self, settings: Settings, table: EngineTable, requests: Requests, max_jump: int = NO_LIMIT) -> None:
        """`max_jump` 1 steps through every iteration. Raises TooSmall where a request can never fit the KV cache."""
        self.state: State = build(settings, requests)
        self.times = np.full((len(requests), 3), np.nan)
        self._table, self._max_jump = table.packed(), max_jump
        self._clock, self._features, self._piece = np.zeros(2), np.zeros((2, 10)), np.zeros(7, dtype=np.int64)

    @property
    def busy(self) -> bool:
        """Whether a request runs, waits, or has tokens under way."""
        count = self.state.count
        return bool(count[RUNNING] or count[WAITING] or count[FLYING])

    @property
    def running(self) -> int:
        return int(self.state.count[RUNNING])

    @property
    def free_blocks(self) -> int:
        return int(self.state.blocks.free[0])

    def arrive(self, requests: Sequence[int]) -> None:
        """These requests join the queue."""
        for index in requests:
            wait(self.state, index)

    def turn(self, until_s: float = np.inf) -> Piece:
        """The next piece; it ends at the first iteration after `until_s` where somebody could join then."""
        before = self._clock[0]
        playing.turn(
            self.state, self._table, self._clock, self._features, self._piece, self.times, self._max_jump, until_s
        )
        return self._described(float(self._clock[0] - before))

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

        `forget` empties the prefix cache: keys and values of other weights are worth nothing. What the device has
        under way ends first: call this between turns of an engine without asynchronous scheduling.
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
            ended=tuple(self.state.done[: self.state.count[DONE]].tolist()),
        )  # fmt: skip


def _iteration(features: list[float]) -> Iteration:
    return Iteration(
        tokens=int(features[0]), sequences=int(features[1]), prefill_tokens=int(features[2]), prefix=features[3],
        decodes=int(features[4]), context_sum=features[5], context_max=features[6], token_context=features[7],
        context_read=features[8], context_min=features[9],
    )  # fmt: skip


def settings(scenario: Scenario, worker: Worker) -> Settings:
    """How a scenario starts an engine."""
    rollout = scenario.rollout
    on_gpu = device(scenario.hardware.node_of(worker.devices[0]).device).kind == "gpu"
    ahead = on_gpu if rollout.async_scheduling is None else rollout.async_scheduling
    return Settings(
        max_num_seqs=rollout.max_num_seqs, max_num_batched_tokens=rollout.max_num_batched_tokens,
        num_blocks=kv_blocks(scenario, worker), block_tokens=rollout.block_tokens, prefix_caching=rollout.prefix_caching,
        async_scheduling=ahead, reserve_full_isl=rollout.reserve_full_isl, batching=rollout.batching,
        reuse_uncached_first=rollout.reuse_uncached_first, watermark=rollout.watermark,
        contiguous_tokens=scenario.workload.max_sequence_tokens if rollout.kv_layout == "contiguous" else 0,
    )  # fmt: skip


def samples(scenario: Scenario, step: int, prompts: Sequence[int]) -> Requests:
    """All samples of these prompts of a step, prompt by prompt; the samples of one share its full blocks."""
    sizes = scenario.workload.prompt_lengths(scenario.seed, step)
    lengths = scenario.workload.response_lengths(scenario.seed, step)
    number = lengths.shape[1]
    prompt = np.repeat(sizes[list(prompts)], number).astype(np.int64)
    groups = np.repeat(np.arange(len(prompts)), number)
    return Requests(
        prompt=prompt, response=lengths[list(prompts)].ravel().astype(np.int64),
        contents=grouped(prompt.tolist(), groups.tolist(), scenario.rollout.block_tokens),
    )  # fmt: skip
