"""One engine, played alone to the end of its requests; compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lab.compiled import compiled
from profiles.interpolate import Packed, iteration_seconds
from simulator.jump import advance, decoding_seconds, describe, describe_decoding, jump_length, later, steps_until
from simulator.scheduler import (
    ASYNC,
    BEFORE,
    DONE,
    FLYING,
    GENERATED,
    HITS,
    MAX_SEQS,
    PLANNED,
    RECOMPUTED,
    REQUEST,
    RESPONSE,
    RUNNING,
    TOKENS,
    VICTIMS,
    WAITING,
    State,
    finish,
    schedule,
    update,
    wait,
)

Floats = NDArray[np.float64]
ADMITTED, FIRST, LAST = range(3)
"""columns of times"""
ITERATIONS, PREEMPTIONS, AGAIN, FOUND_TOKENS = range(4)
"""totals"""


@compiled
def play(
    state: State, table: Packed, arrivals: Floats, times: Floats, totals: NDArray[np.int64], longest_jump: int
) -> None:
    """Until every request has ended. `times` is (n, 3), `totals` (4,); both are filled.

    With asynchronous scheduling `now` is when the iteration under way began, and `under_way` its time.
    """
    now, under_way, arrived, left = 0.0, 0.0, 0, len(arrivals)
    features = np.zeros(10)
    count = state.count
    while left > 0:
        while arrived < len(arrivals) and arrivals[arrived] <= now:
            wait(state, arrived)
            arrived += 1
        if count[RUNNING] == 0 and count[WAITING] == 0 and count[FLYING] == 0:
            now = arrivals[arrived]
            continue
        steps = 0
        if longest_jump > 1:
            steps = jump_length(state, longest_jump)
        if steps > 1:
            describe_decoding(state, features)
            if arrived < len(arrivals) and count[RUNNING] < state.setting[MAX_SEQS]:
                steps = _until_arrival(state, table, features, steps, arrivals[arrived] - now, under_way)
            now, under_way = _jump(state, table, features, steps, now, under_way)
            totals[ITERATIONS] += steps
            if not state.setting[ASYNC]:
                left -= _end_jump(state, times, now)
            continue
        schedule(state)
        describe(state, features)
        _note(state, times, totals, now)
        seconds = iteration_seconds(table, features)
        if state.setting[ASYNC]:
            now += under_way
            update(state, state.flight, count[FLYING])
            _arrive(state, state.flight, count[FLYING], times, now)
            under_way = seconds
            state.flight[: count[PLANNED]] = state.plan[: count[PLANNED]]
            count[FLYING] = count[PLANNED]
        else:
            now += seconds
            update(state, state.plan, count[PLANNED])
            _arrive(state, state.plan, count[PLANNED], times, now)
        left -= count[DONE]


@compiled
def _note(state: State, times: Floats, totals: NDArray[np.int64], now: float) -> None:
    """What the call of the scheduler adds to the totals."""
    totals[ITERATIONS] += state.count[PLANNED] > 0
    totals[PREEMPTIONS] += state.count[VICTIMS]
    totals[AGAIN] += state.count[RECOMPUTED]
    totals[FOUND_TOKENS] += state.count[HITS]
    for place in range(state.count[PLANNED]):
        index = state.plan[place, REQUEST]
        if np.isnan(times[index, ADMITTED]):
            times[index, ADMITTED] = now


@compiled
def _arrive(state: State, entries: NDArray[np.int64], number: int, times: Floats, now: float) -> None:
    """First and last tokens that came out now."""
    for place in range(number):
        index = entries[place, REQUEST]
        if state.request[index, GENERATED] > 0 and np.isnan(times[index, FIRST]):
            times[index, FIRST] = now
    for place in range(state.count[DONE]):
        times[state.done[place], LAST] = now


@compiled
def _until_arrival(
    state: State, table: Packed, features: Floats, steps: int, wait_s: float, under_way: float
) -> int:
    """Iterations, at most `steps`, until the next arrival can be seen."""
    if not state.setting[ASYNC]:
        return steps_until(table, features, steps, wait_s)
    if under_way >= wait_s:
        return 1
    return min(1 + steps_until(table, features, steps, wait_s - under_way), steps)


@compiled
def _jump(
    state: State, table: Packed, features: Floats, steps: int, now: float, under_way: float
) -> tuple[float, float]:
    """Plays so many decoding iterations; returns the new time, and the time of the iteration then under way."""
    seconds, last = decoding_seconds(table, features, steps), 0.0
    if state.setting[ASYNC]:
        last = iteration_seconds(table, later(features, steps - 1))
        for place in range(state.count[RUNNING]):
            index = state.running[place]
            state.flight[place, REQUEST], state.flight[place, TOKENS] = index, 1
            state.flight[place, BEFORE], state.flight[place, 3] = 0, 1
    advance(state, steps)
    return now + under_way + seconds - last, last


@compiled
def _end_jump(state: State, times: Floats, now: float) -> int:
    """Requests that have all their tokens end, in order of admission; returns how many."""
    state.count[DONE] = 0
    ended = state.running[: state.count[RUNNING]].copy()
    for index in ended:
        if state.request[index, GENERATED] >= state.request[index, RESPONSE]:
            finish(state, index)
            times[index, LAST] = now
    return int(state.count[DONE])
