"""An engine that nobody disturbs, played to its end in one go, where counting blocks is enough."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from profiles.interpolate import Packed
from profiles.iteration import EngineTable, Iteration
from simulator.blocks import Ints
from simulator.counted import (
    END,
    FREE,
    HITS,
    ITERATIONS,
    LONGEST,
    NEVER,
    NUM_WINDOWS,
    PIECES,
    PREFILL,
    SEQUENCES,
    SHORTEST,
    SOONEST,
    START,
    TOKENS,
    Count,
    play,
)
from simulator.decoding import Decode, decode
from simulator.engine import Requests, Settings, TooSmall


@dataclass(frozen=True, kw_only=True)
class Window:
    """What an engine did for a while; its iterations are summed up."""

    start_s: float
    end_s: float
    iterations: int
    sequences: float
    """mean of an iteration"""
    tokens: int
    """scheduled in all"""
    prefill_tokens: int
    largest: Iteration
    """every feature at its largest in any of its iterations"""

    @property
    def op(self) -> str:
        return "prefill" if 2 * self.prefill_tokens > self.tokens else "decode"


@dataclass(frozen=True, kw_only=True)
class Played:
    """An engine's requests, all of which wait from the start, at their end."""

    ended_s: NDArray[np.float64]
    """(requests,)"""
    cached_tokens: int
    """of prompts, found in the prefix cache"""
    windows: tuple[Window, ...]

    @property
    def iterations(self) -> int:
        return sum(window.iterations for window in self.windows)


@dataclass(frozen=True, kw_only=True)
class Tables:
    """An engine table in the forms that are played with; made once for all engines that share it."""

    packed: Packed
    decode: Decode

    @classmethod
    def of(cls, table: EngineTable, num_seqs: int) -> Tables:
        """For up to so many sequences at once."""
        packed = table.packed()
        return cls(packed=packed, decode=decode(packed, num_seqs))


def countable(settings: Settings, table: EngineTable) -> bool:
    """Whether counting can be enough: time depends on contexts only by mean and maximum, and batches are continuous."""
    plain = settings.batching == "continuous" and table.skews is None
    mixed = settings.prefix_caching and settings.contiguous_tokens > 0
    return plain and not mixed and settings.max_num_seqs <= settings.max_num_batched_tokens


def whole(settings: Settings, tables: Tables, requests: Requests, groups: Ints) -> Played | None:
    """The whole history of a `countable` engine; None where counting is not enough: the scheduler has to play it.

    `groups` (requests,): whose prompt each has, those of one group behind each other; `requests.contents` are not
    looked at. Raises TooSmall where a request can never fit the KV cache.
    """
    longest = int((requests.prompt + requests.response).max(initial=0))
    blocks = -(-max(longest, settings.contiguous_tokens) // settings.block_tokens)
    if blocks > settings.num_blocks - 1:
        raise TooSmall(f"a sequence of {longest} tokens does not fit {settings.num_blocks - 1} KV blocks")
    state = _fresh(settings, requests, groups)
    if not play(state, tables.packed, tables.decode):
        return None
    rows = state.window[:-1][state.window[:-1, PIECES] > 0]
    return Played(
        ended_s=state.ended, cached_tokens=int(state.count[HITS]), windows=tuple(map(window_of, rows.tolist()))
    )


def _fresh(settings: Settings, requests: Requests, groups: Ints) -> Count:
    number = np.cumsum(np.diff(groups, prepend=groups[:1]) != 0)
    shared = (requests.prompt - 1) // settings.block_tokens * settings.prefix_caching
    slots, num = settings.max_num_seqs, len(requests)
    reserved = -(-settings.contiguous_tokens // settings.block_tokens)
    setting = [
        slots, settings.max_num_batched_tokens, settings.block_tokens, settings.async_scheduling,
        settings.reserve_full_isl, int(settings.watermark * settings.num_blocks), reserved,
    ]  # fmt: skip
    state = Count(
        setting=np.array(setting, np.int64), count=np.zeros(10, np.int64), decoding=np.zeros(5, np.int64),
        short=np.zeros(slots, np.int64), final=np.zeros(slots, np.int64), who=np.zeros(slots, np.int64),
        phase=np.zeros(settings.block_tokens, np.int64), part=np.zeros(slots, np.int64), done=np.zeros(slots, np.int64),
        due=np.zeros((2, num), np.int64), prompt=requests.prompt, response=requests.response,
        group=number, shared=shared, live=np.full(num, -1), safe=np.zeros(num, np.int64), ended=np.zeros(num),
        clock=np.zeros(1), window=np.zeros((2 * NUM_WINDOWS + 1, 17)), feature=np.zeros(10),
    )  # fmt: skip
    state.count[FREE] = settings.num_blocks - 1
    state.window[-1, END] = 1
    state.decoding[[LONGEST, SHORTEST, SOONEST]] = -NEVER, NEVER, NEVER
    return state


def window_of(row: list[float]) -> Window:
    """A row of the windows of `simulator.counted`."""
    largest = row[7:]
    return Window(
        start_s=row[START], end_s=row[END], iterations=int(row[ITERATIONS]),
        sequences=row[SEQUENCES] / row[ITERATIONS], tokens=int(row[TOKENS]), prefill_tokens=int(row[PREFILL]),
        largest=Iteration(
            tokens=int(largest[0]), sequences=int(largest[1]), prefill_tokens=int(largest[2]), prefix=largest[3],
            decodes=int(largest[4]), context_sum=largest[5], context_max=largest[6], token_context=largest[7],
            context_read=largest[8],
        ),
    )  # fmt: skip
