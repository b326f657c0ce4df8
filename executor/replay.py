"""vLLM's scheduling decisions, iteration by iteration, of requests with imposed lengths and arrivals: the workloads and
the records. `executor.traced` takes them from vLLM; importing this module imports nothing heavy.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Source = Literal["engine", "sync", "async"]
"""the real engine, synchronous; or one of vLLM's two scheduler classes without a model"""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What a workload is replayed with; the names are vLLM's where it has one."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    """KV blocks, with the one that vLLM keeps for itself"""
    block_tokens: int
    prefix_caching: bool = True
    reserve_full_isl: bool = True
    """a request is admitted only where the blocks of all its known tokens are free"""
    async_scheduling: bool = False
    watermark: float = 0.0
    """share of the blocks that an admission leaves free where others run"""

    @property
    def capacity(self) -> int:
        """Tokens of the longest request (prompt and response) that can be served."""
        return (self.num_blocks - 1) * self.block_tokens


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    prompt: tuple[int, ...]
    """token ids"""
    response: int
    """tokens, at least 1"""
    arrival: int = 0
    """the request waits from before the scheduler's call of this number (from 0) on"""


class Scheduled(NamedTuple):
    """A request's share of an iteration."""

    request: int
    tokens: int
    before: int
    """tokens of it that were computed, or in flight, before"""


@dataclass(kw_only=True)
class TracedIteration:
    """One call of the scheduler; counts and blocks are those right after it."""

    iteration: int
    scheduled: list[Scheduled]
    running: int
    waiting: int
    blocks: int
    """KV blocks in use"""
    preempted: list[int]
    """in the order of preemption"""
    hits: list[tuple[int, int]]
    """admitted requests with the tokens that they found in the prefix cache, in the order of admission"""
    finished: list[int] = field(default_factory=list)
    """that finished between this call and the next"""


def random_workload(seed: int, block_tokens: int) -> tuple[EngineSettings, list[ReplayRequest]]:
    """A workload that is usually short of KV blocks, with prompts that share their beginnings.

    10 to 60 requests in groups of one prompt, prompts of 1 to 120 and responses of 1 to 80 tokens; all at once or one
    after another; token ids 4 to 63. Nothing but `seed` and `block_tokens` decides.
    """
    draw = random.Random(f"{seed} {block_tokens}")
    beginning = _tokens(draw, draw.randint(1, 100))
    requests: list[ReplayRequest] = []
    count, arrival, gap = draw.randint(10, 60), 0, draw.choice((0, 0, 2, 8))
    while len(requests) < count:
        shared = beginning[: draw.randint(0, len(beginning))] if draw.random() < 0.5 else ()
        prompt = (shared + _tokens(draw, draw.randint(1, 120)))[: draw.randint(1, 120)]
        for _ in range(draw.choice((1, 2, 4, 8))):
            requests.append(ReplayRequest(prompt=prompt, response=draw.randint(1, 80), arrival=arrival))
            arrival += draw.randint(0, gap)
    longest = max(len(request.prompt) + request.response for request in requests)
    return EngineSettings(
        max_num_seqs=draw.choice((2, 4, 8, 16)), max_num_batched_tokens=draw.choice((16, 32, 64, 128, 512)),
        num_blocks=1 + math.ceil(longest / block_tokens * draw.uniform(1.0, 3.0)), block_tokens=block_tokens,
        prefix_caching=draw.random() < 0.9, reserve_full_isl=draw.random() < 0.75,
        watermark=draw.choice((0.0, 0.0, 0.0, 0.1)),
    ), requests[:60]  # fmt: skip


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randint(4, 63) for _ in range(count))


def play(source: Source, settings: EngineSettings, requests: Sequence[ReplayRequest]) -> list[TracedIteration]:
    """What vLLM decides. To be called in a process of its own: on a CPU, its engine does not start beside numba."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from executor.traced import play_with

    return play_with(source, settings, requests)
