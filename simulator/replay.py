"""Requests with given arrivals through one engine, alone: what a serving benchmark measures, or a burst of rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from profiles.iteration import EngineTable
from simulator.engine import Requests, Settings, build
from simulator.playing import play
from simulator.scheduler import (
    BEFORE,
    DONE,
    FLYING,
    PLANNED,
    REQUEST,
    RUNNING,
    TOKENS,
    VICTIMS,
    WAITING,
    State,
    schedule,
    update,
    wait,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Replayed:
    """What became of the requests; times in seconds from the same zero as their arrivals."""

    admitted_s: Floats
    """(n,) when the iteration that first computed them was scheduled"""
    first_token_s: Floats
    """(n,)"""
    last_token_s: Floats
    """(n,)"""
    iterations: int
    preemptions: int
    recomputed_tokens: int
    hit_tokens: int
    """of prompts, found in the prefix cache at the first admission"""

    @property
    def makespan_s(self) -> float:
        return float(self.last_token_s.max(initial=0.0))

    def tpot_s(self, response: NDArray[np.int64]) -> Floats:
        """(n,) time per output token after the first; nan for responses of one token."""
        steps = np.where(response > 1, response - 1, np.nan)
        return np.asarray((self.last_token_s - self.first_token_s) / steps)


def replay(table: EngineTable, settings: Settings, requests: Requests, *, exact: bool = False) -> Replayed:
    """Plays the requests to the end; `exact` steps through every iteration, else decoding is played in jumps.

    Raises simulator.engine.TooSmall where a request can never fit.
    """
    state = build(settings, requests)
    times, totals = np.full((len(requests), 3), np.nan), np.zeros(4, dtype=np.int64)
    play(state, table.packed(), requests.arrivals(), times, totals, 1 if exact else 1 << 60)
    return Replayed(
        admitted_s=times[:, 0], first_token_s=times[:, 1], last_token_s=times[:, 2], iterations=int(totals[0]),
        preemptions=int(totals[1]), recomputed_tokens=int(totals[2]), hit_tokens=int(totals[3]),
    )  # fmt: skip


class Traced(NamedTuple):
    """One call of the scheduler; counts and blocks are those right after it."""

    scheduled: list[tuple[int, int, int]]
    """(request, tokens, computed before)"""
    running: int
    waiting: int
    blocks: int
    """KV blocks in use"""
    preempted: list[int]
    finished: list[int]
    """that ended between this call and the next"""


def trace(settings: Settings, requests: Requests, arrivals: list[int]) -> list[Traced]:
    """Every decision of the scheduler; a request waits from before the call of its arrival's number on."""
    state, found = build(settings, requests), list[Traced]()
    order, arrived, left = sorted(range(len(requests)), key=lambda i: arrivals[i]), 0, len(requests)
    call = 0
    while left:
        while arrived < len(order) and arrivals[order[arrived]] <= call:
            wait(state, order[arrived])
            arrived += 1
        call += 1
        if not _busy(state):
            continue
        left -= _step(state, settings.async_scheduling, found)
    return found


def _busy(state: State) -> bool:
    return bool(state.count[RUNNING] or state.count[WAITING] or state.count[FLYING])


def _step(state: State, lagging: bool, found: list[Traced]) -> int:
    """One call of the scheduler and the results that come in before the next; returns how many requests ended."""
    schedule(state)
    count = state.count
    scheduled = [(int(e[REQUEST]), int(e[TOKENS]), int(e[BEFORE])) for e in state.plan[: count[PLANNED]]]
    record = Traced(
        scheduled, int(count[RUNNING]), int(count[WAITING]), len(state.blocks.block) - 2 - int(state.blocks.free[0]),
        [int(i) for i in state.victims[: count[VICTIMS]]], [],
    )  # fmt: skip
    if lagging:
        update(state, state.flight, count[FLYING])
        state.flight[:], count[FLYING] = state.plan, count[PLANNED]
    else:
        update(state, state.plan, count[PLANNED])
    record.finished.extend(int(i) for i in state.done[: count[DONE]])
    found.append(record)
    return len(record.finished)


def warm_up() -> None:
    """Plays one request both ways, so that the engine is compiled and kept on disk; takes half a minute the first time."""
    requests = Requests(prompt=np.array([3]), response=np.array([4]))
    for exact in (False, True):
        replay(
            EngineTable(step_s=1.0),
            Settings(max_num_seqs=1, max_num_batched_tokens=4, num_blocks=3),
            requests,
            exact=exact,
        )
