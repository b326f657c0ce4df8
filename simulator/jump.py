"""Many iterations at once: while an engine only decodes and nobody can join, its future is arithmetic.

Every running request gets one token in each iteration until one of them ends, blocks run out, or something from
outside comes. Costs are piecewise affine in the context, so the time between two bends is a sum of an arithmetic series.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lab.compiled import allocating, compiled
from profiles.interpolate import Packed, iteration_seconds, steps_to_bend
from simulator.blocks import take
from simulator.scheduler import (
    ASYNC,
    BEFORE,
    BLOCK,
    CACHING,
    COMPUTED,
    CONTIGUOUS,
    FLYING,
    GENERATED,
    HELD,
    HIGHEST,
    MAX_SEQS,
    MAX_TOKENS,
    OPEN,
    PENDING,
    PLANNED,
    PREFILL,
    PROMPT,
    RESPONSE,
    ROW,
    RUNNING,
    STALE,
    STATIC,
    TOKENS,
    WAITING,
    State,
    fits,
    found,
    grow,
    needed,
    publish,
)

Floats = NDArray[np.float64]


@allocating
def jump_length(state: State, most: int) -> int:
    """Iterations, at most `most`, in which every running request gets one token and nothing else happens.

    0 where the next iteration has to be scheduled in full.
    """
    count, setting = state.count, state.setting
    lag, length = int(setting[ASYNC] != 0), most
    if count[RUNNING] == 0 or count[RUNNING] > setting[MAX_TOKENS] or (lag and count[FLYING] != count[RUNNING]):
        return 0
    for place in range(count[RUNNING]):
        row = state.request[state.running[place]]
        decodes = row[PENDING] == lag and row[COMPUTED] == row[PROMPT] + row[GENERATED] + lag - 1
        if not decodes or row[GENERATED] == 0 or row[COMPUTED] < row[HIGHEST]:
            return 0
        length = min(length, row[RESPONSE] - row[GENERATED] - lag)
    if length <= 1 or somebody_may_join(state):
        return 0
    return blocks_allow(state, length)


@compiled
def somebody_may_join(state: State) -> bool:
    """Whether the next call of `schedule` could admit a waiting request."""
    count, setting = state.count, state.setting
    budget = setting[MAX_TOKENS] - count[RUNNING]
    if count[WAITING] == 0 or count[RUNNING] >= setting[MAX_SEQS] or budget <= 0:
        return False
    if setting[STATIC] and not count[OPEN]:
        return False
    index = state.queue[count[1]]
    row = state.request[index]
    if row[STALE] > 0:
        return True
    hits, unheld = found(state, index)
    tokens = min(row[PROMPT] + row[GENERATED] - hits * setting[BLOCK], budget)
    return bool(fits(state, index, hits, unheld, tokens))


@allocating
def blocks_allow(state: State, length: int) -> int:
    """Iterations, at most `length`, until the blocks that decoding takes run out."""
    block = state.setting[BLOCK]
    if state.setting[CONTIGUOUS]:
        return length
    begins = np.zeros(block, dtype=np.int64)
    for place in range(state.count[RUNNING]):
        begins[-state.request[state.running[place], COMPUTED] % block] += 1
    left = state.blocks.free[0]
    for step in range(length):
        left -= begins[step % block]
        if left < 0:
            return step
    return length


@allocating
def advance(state: State, steps: int) -> None:
    """So many iterations in which every running request gets one token: blocks are taken in the engine's order."""
    setting, running = state.setting, state.running[: state.count[RUNNING]]
    if len(running) < setting[MAX_TOKENS]:
        state.count[OPEN] = 0  # as `admit` does where nobody can join
    if setting[CACHING] and not setting[CONTIGUOUS]:
        take_blocks(state, steps)
    for place in range(len(running)):
        row = state.request[running[place]]
        if not setting[CACHING]:
            grow(state, running[place], needed(state, row[COMPUTED] + steps))
        row[COMPUTED] += steps
        row[GENERATED] += steps
        row[HIGHEST] = row[COMPUTED]
        publish(state, running[place], row[COMPUTED] - row[PENDING])
    state.count[PREFILL] = 0


@allocating
def take_blocks(state: State, steps: int) -> None:
    """Iteration by iteration, in order of the running requests, whoever begins a block takes it."""
    block, running = state.setting[BLOCK], state.running[: state.count[RUNNING]]
    order = np.argsort(-state.request[running, COMPUTED] % block, kind="mergesort")
    first = 0
    starts = np.zeros(block + 1, dtype=np.int64)
    for place in order:
        starts[-state.request[running[place], COMPUTED] % block + 1] += 1
    starts = np.cumsum(starts)
    for step in range(steps):
        first = step % block
        for place in order[starts[first] : starts[first + 1]]:
            row = state.request[running[place]]
            state.table[row[ROW], row[HELD]] = take(state.blocks)
            row[HELD] += 1


@compiled
def describe(state: State, features: Floats) -> None:
    """Writes what the planned iteration holds, as `profiles.iteration.Iteration.features` does."""
    features[:] = 0.0
    work, shortest = 0.0, np.inf
    for place in range(state.count[PLANNED]):
        tokens, before = state.plan[place, TOKENS], state.plan[place, BEFORE]
        features[0] += tokens
        features[1] += 1.0
        features[7] += tokens * before + tokens * (tokens + 1) / 2
        features[8] += before + tokens
        if tokens == 1:
            features[4] += 1.0
            features[5] += before
            features[6] = max(features[6], before)
            shortest = min(shortest, before)
        else:
            features[2] += tokens
            work += tokens * (before + tokens / 2)
    if features[2] > 0.0:
        features[3] = work / features[2] - features[2] / 2
    features[9] = shortest if features[4] > 0.0 else 0.0


@compiled
def describe_decoding(state: State, features: Floats) -> None:
    """Writes what the next iteration holds if every running request gets one token."""
    features[:] = 0.0
    number = state.count[RUNNING]
    features[0] = features[1] = features[4] = number
    features[9] = np.inf
    for place in range(number):
        before = float(state.request[state.running[place], COMPUTED])
        features[5] += before
        features[6] = max(features[6], before)
        features[9] = min(features[9], before)
    features[7] = features[8] = features[5] + number


@allocating
def later(features: Floats, steps: int) -> Floats:
    """The features of a decoding iteration, so many iterations later."""
    moved = features.copy()
    moved[5] += steps * features[4]
    moved[6] += steps
    moved[7] += steps * features[4]
    moved[8] += steps * features[4]
    moved[9] += steps
    return moved


@allocating
def decoding_seconds(table: Packed, features: Floats, steps: int) -> float:
    """Time of so many decoding iterations, the first of which is described."""
    total, done, now = 0.0, 0, features
    while done < steps:
        piece = min(steps - done, steps_to_bend(table, now[5] / now[4], now[6]))
        ends = iteration_seconds(table, now) + iteration_seconds(table, later(now, piece - 1))
        total += piece * ends / 2
        done += piece
        now = later(now, piece)
    return total


@allocating
def steps_until(table: Packed, features: Floats, steps: int, seconds: float) -> int:
    """Decoding iterations, at least 1 and at most `steps`, until `seconds` have passed."""
    done, now, left = 0, features, seconds
    while done < steps:
        piece = min(steps - done, steps_to_bend(table, now[5] / now[4], now[6]))
        first, last = iteration_seconds(table, now), iteration_seconds(table, later(now, piece - 1))
        if piece * (first + last) / 2 >= left:
            rise = (last - first) / (piece - 1) if piece > 1 else 0.0
            low, high = 0, piece  # the sum of `low` iterations is too short, that of `high` is enough
            while high - low > 1:
                middle = (low + high) // 2
                if middle * first + rise * middle * (middle - 1) / 2 >= left:
                    high = middle
                else:
                    low = middle
            return done + high
        left -= piece * (first + last) / 2
        done += piece
        now = later(now, piece)
    return steps
