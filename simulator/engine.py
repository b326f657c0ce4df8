"""A rollout engine's settings, the requests it gets, and the state that the compiled scheduler works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from simulator.blocks import Ints, fresh
from simulator.scheduler import KNOWN, KNOWN_AT, MAX_SEQS, OWN_AT, PROMPT, RESPONSE, ROW, SLOTS, WAITS, State


class TooSmall(Exception):
    """A sequence does not fit the KV cache."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an engine is started with; the names are vLLM's where it has one."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    """KV blocks, with the one that vLLM keeps for itself (its `num_gpu_blocks`)"""
    block_tokens: int = 16
    prefix_caching: bool = True
    async_scheduling: bool = False
    """the next iteration is scheduled while the device computes one: arrivals and ends are seen one iteration late"""
    reserve_full_isl: bool = True
    """a request joins only where all its known tokens fit, not only the first chunk of them"""
    reuse_uncached_first: bool = True
    """freed blocks whose content cannot be found again are handed out first: vLLM 0.32; False: last, as in 0.19"""
    watermark: float = 0.0
    """share of the blocks that admissions leave free beside running requests (vLLM 0.32)"""
    batching: str = "continuous"
    """continuous; or static: a batch is filled once, and the next begins when the last request of it has ended"""
    contiguous_tokens: int = 0
    """0: paged KV; else every request reserves room for so many tokens when it joins"""

    def __post_init__(self) -> None:
        smallest = min(self.max_num_seqs, self.max_num_batched_tokens, self.num_blocks - 1, self.block_tokens)
        if smallest < 1:
            raise ValueError(
                "an engine needs at least one sequence, one token of budget, one token per block, two blocks"
            )
        if self.batching not in ("continuous", "static"):
            raise ValueError(f"batching is continuous or static, not {self.batching!r}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    """What an engine is asked for, in order of arrival."""

    prompt: Ints
    """(n,) tokens"""
    response: Ints
    """(n,) tokens, at least 1"""
    arrival_s: NDArray[np.float64] | None = None
    """(n,) never falling; None: all at 0"""
    contents: Sequence[Sequence[int]] | None = None
    """for each request what its first full blocks hold, as numbers: equal numbers, equal prefixes up to there; None:
    nothing is shared"""

    def __len__(self) -> int:
        return len(self.prompt)

    def arrivals(self) -> NDArray[np.float64]:
        return np.zeros(len(self)) if self.arrival_s is None else self.arrival_s


@dataclass(eq=False)
class Contents:
    """Numbers for what blocks hold: those of prompts' blocks, and those that requests fill by themselves."""

    known: list[int] = field(default_factory=list)
    """numbers of prompts' blocks, one prompt after the other; those that the state holds already may be left out"""
    number: dict[int, int] = field(default_factory=dict)
    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    size: int = 0
    """numbers given so far"""
    num_known: int = 0
    """entries of prompts' blocks, with those left out of `known`"""

    def place(self, contents: Sequence[int]) -> int:
        """Where a prompt's contents stand among the known; samples of one prompt share their place."""
        key = tuple(contents)
        if key not in self.places:
            self.places[key] = self.num_known
            self.known += [self._number(content) for content in key]
            self.num_known += len(key)
        return self.places[key]

    def own(self, numbers: Ints) -> Ints:
        """(n,) first of so many fresh numbers each."""
        first = self.size + np.cumsum(numbers) - numbers
        self.size += int(numbers.sum())
        return first

    def _number(self, content: int) -> int:
        found = self.number.setdefault(content, self.size)
        self.size += found == self.size
        return found


def grouped(prompts: Sequence[int], groups: Sequence[int], block_tokens: int, widest: int | None = None) -> list[range]:
    """Contents of samples: those of one group share all full blocks of their prompt.

    Groups count from 0; `widest` is the number of blocks that no prompt exceeds: give it where more samples of these
    groups may follow.
    """
    if widest is None:
        widest = max((prompt // block_tokens for prompt in prompts), default=0)
    return [
        range(group * widest, group * widest + prompt // block_tokens)
        for prompt, group in zip(prompts, groups, strict=True)
    ]


def build(settings: Settings, requests: Requests, contents: Contents | None = None) -> State:
    """A fresh engine that knows all its requests; none waits yet. `contents` is told what they hold.

    Raises TooSmall where one can never fit the KV cache, ValueError where lengths or arrivals are none.
    """
    contents = Contents() if contents is None else contents
    row = rows(settings, requests, contents)
    slots = min(settings.max_num_seqs, max(len(requests), 1))
    state = State(
        setting=_numbers(settings),
        count=np.zeros(12, dtype=np.int64),
        request=row,
        running=np.zeros(slots, dtype=np.int64),
        queue=np.zeros(len(requests) + 1, dtype=np.int64),
        slots=np.arange(slots, dtype=np.int64)[::-1].copy(),
        table=np.zeros((slots, most_blocks(settings, requests) + 1), dtype=np.int32),
        blocks=fresh(settings.num_blocks, contents.size),
        known=np.array(contents.known or [0], dtype=np.int64),
        plan=np.zeros((slots, 4), dtype=np.int64),
        flight=np.zeros((slots, 4), dtype=np.int64),
        victims=np.zeros(slots, dtype=np.int64),
        done=np.zeros(slots + 1, dtype=np.int64),
    )
    contents.known = []
    state.count[SLOTS] = slots
    state.setting[MAX_SEQS] = slots
    return state


def rows(settings: Settings, requests: Requests, contents: Contents) -> NDArray[np.int64]:
    """(n, 15) requests as the state keeps them; `contents` is told what they hold. Raises as `build` does."""
    _refuse(settings, requests)
    row = np.zeros((len(requests), 15), dtype=np.int64)
    row[:, PROMPT], row[:, RESPONSE], row[:, ROW] = requests.prompt, requests.response, WAITS
    if not settings.prefix_caching:
        return row
    if requests.contents is not None:
        row[:, KNOWN_AT] = [contents.place(known) for known in requests.contents]
        row[:, KNOWN] = [len(known) for known in requests.contents]
    row[:, OWN_AT] = contents.own(num_own(row, settings.block_tokens))
    return row


def num_own(row: NDArray[np.int64], block_tokens: int) -> Ints:
    """(n,) full blocks that requests fill with contents of their own."""
    return np.asarray(np.maximum((row[:, PROMPT] + row[:, RESPONSE]) // block_tokens - row[:, KNOWN], 0))


def most_blocks(settings: Settings, requests: Requests) -> int:
    """Blocks that the longest of these requests holds in the end."""
    longest = int((requests.prompt + requests.response).max(initial=0))
    return max(-(-settings.contiguous_tokens // settings.block_tokens), -(-longest // settings.block_tokens))


def _refuse(settings: Settings, requests: Requests) -> None:
    if len(requests) and min(requests.prompt.min(), requests.response.min()) < 1:
        raise ValueError("every prompt and every response has at least one token")
    arrivals = requests.arrivals()
    if not np.all(np.isfinite(arrivals)) or np.any(np.diff(arrivals) < 0):
        raise ValueError("arrivals are times that never fall")
    longest = int((requests.prompt + requests.response).max(initial=0))
    if 0 < settings.contiguous_tokens < longest:
        raise ValueError(f"contiguous KV reserves {settings.contiguous_tokens} tokens, a sequence has {longest}")
    if most_blocks(settings, requests) > settings.num_blocks - 1:
        raise TooSmall(f"a sequence of {longest} tokens does not fit {settings.num_blocks - 1} KV blocks")


def _numbers(settings: Settings) -> Ints:
    """In the order of `simulator.scheduler`'s names."""
    reserved = -(-settings.contiguous_tokens // settings.block_tokens)
    return np.array(
        [
            settings.max_num_seqs, settings.max_num_batched_tokens, settings.block_tokens, settings.prefix_caching,
            settings.async_scheduling, settings.reserve_full_isl, settings.reuse_uncached_first,
            int(settings.watermark * settings.num_blocks), settings.batching == "static", reserved,
        ],
        dtype=np.int64,
    )  # fmt: skip
