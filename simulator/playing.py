"""One engine, played alone to the end of its requests; compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lab.compiled import allocating, compiled
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
    PREFILL,
    RECOMPUTED,
    REQUEST,
    RESPONSE,
    RUNNING,
    TOKENS,
    VICTIMS,
    WAITING,
    YIELDS,
    State,
    finish,
    schedule,
    update,
    wait,
)

Floats = NDArray[np.float64]
ADMITTED, FIRST, LAST = range(3)
"""columns of times"""
ROUNDING = 1e-12
"""share of a time by which sums of iterations may miss it and still meet it"""
NOW, UNDER_WAY = range(2)
"""the clock"""
ITERATIONS, PREEMPTIONS, AGAIN, FOUND_TOKENS, PREFILLED, SEQUENCES, SCHEDULED = range(7)
"""what a piece holds: iterations, preemptions, tokens computed again, tokens found in the cache, prefill tokens, and
sequences and tokens of each iteration; the first four are totalled"""


@allocating
def play(
    state: State, table: Packed, arrivals: Floats, times: Floats, totals: NDArray[np.int64], longest_jump: int
) -> None:
    """Until every request has ended. `times` is (n, 3), `totals` (4,); both are filled."""
    arrived, left = 0, len(arrivals)
    clock, piece, features, count = np.zeros(2), np.zeros(7, dtype=np.int64), np.zeros((2, 10)), state.count
    while left > 0:
        while arrived < len(arrivals) and arrivals[arrived] <= clock[NOW]:
            wait(state, arrived)
            arrived += 1
        if count[RUNNING] == 0 and count[WAITING] == 0 and count[FLYING] == 0:
            clock[NOW] = arrivals[arrived]
            continue
        joinable = arrived < len(arrivals) and count[RUNNING] < state.setting[MAX_SEQS]
        until = arrivals[arrived] - clock[NOW] if joinable else np.inf  # where nobody could join, nobody is waited for
        turn(state, table, clock, features, piece, times, longest_jump, until)
        totals += piece[:4]
        left -= count[DONE]


@allocating
def ahead(
    state: State, table: Packed, clock: Floats, features: Floats, longest_jump: int, until_s: float
) -> tuple[int, float]:
    """Iterations and seconds of the piece that `turn` would play, if it is a jump; 0 iterations where it is not.

    Nothing changes but `features`.
    """
    steps = jump_length(state, longest_jump) if longest_jump > 1 else 0
    if steps <= 1:
        return 0, 0.0
    describe_decoding(state, features[0])
    if until_s < np.inf:
        steps = _until(state, table, features[0], steps, until_s, clock[UNDER_WAY])
    seconds = decoding_seconds(table, features[0], steps)
    if state.setting[ASYNC]:
        seconds += clock[UNDER_WAY] - iteration_seconds(table, later(features[0], steps - 1))
    return int(steps), seconds


@allocating
def land(state: State, clock: Floats, features: Floats, piece: NDArray[np.int64], times: Floats) -> None:
    """The iteration under way ends and none is scheduled after it; fills what `turn` does, of an empty iteration."""
    count = state.count
    piece[:], features[:] = 0, 0.0
    clock[NOW] += clock[UNDER_WAY]
    update(state, state.flight, count[FLYING])
    _arrive(state, state.flight, count[FLYING], times, clock[NOW])
    count[FLYING], clock[UNDER_WAY] = 0, 0.0


@allocating
def turn(
    state: State, table: Packed, clock: Floats, features: Floats, piece: NDArray[np.int64], times: Floats,
    longest_jump: int, until_s: float,
) -> None:  # fmt: skip
    """Plays one piece: a single iteration, or many in which every running request gets one token.

    `clock` is moved on; with asynchronous scheduling its second number is the time of the iteration under way, which
    passes in the next turn. Jumps end at the first iteration that can see what comes after `until_s`. Fills `features`
    (2, 10) with the first and the last iteration that were scheduled, `piece` (7,) with what they hold, and
    `state.done` with the requests that ended.
    """
    count = state.count
    steps = jump_length(state, longest_jump) if longest_jump > 1 else 0
    if steps > 1:
        describe_decoding(state, features[0])
        if until_s < np.inf:
            steps = _until(state, table, features[0], steps, until_s, clock[UNDER_WAY])
        features[1] = later(features[0], steps - 1)
        _jump(state, table, features, steps, clock)
        piece[:] = 0
        piece[ITERATIONS] = steps
        count[DONE] = 0
        if not state.setting[ASYNC]:
            _end_jump(state, times, clock[NOW])
    else:
        schedule(state)
        describe(state, features[0])
        features[1] = features[0]
        _note(state, times, piece, clock[NOW])
        _pass(state, iteration_seconds(table, features[0]), clock, times)
    piece[SEQUENCES], piece[SCHEDULED] = np.int64(features[0, 1]), np.int64(features[0, 0])


@compiled
def _pass(state: State, seconds: float, clock: Floats, times: Floats) -> None:
    """The time of one iteration passes, and its tokens come out; with a lag, those of the one before."""
    count = state.count
    if not state.setting[ASYNC]:
        clock[NOW] += seconds
        update(state, state.plan, count[PLANNED])
        _arrive(state, state.plan, count[PLANNED], times, clock[NOW])
        return
    clock[NOW] += clock[UNDER_WAY]
    update(state, state.flight, count[FLYING])
    _arrive(state, state.flight, count[FLYING], times, clock[NOW])
    clock[UNDER_WAY] = seconds
    for place in range(count[PLANNED]):
        for column in range(4):
            state.flight[place, column] = state.plan[place, column]
    count[FLYING] = count[PLANNED]


@compiled
def _note(state: State, times: Floats, piece: NDArray[np.int64], now: float) -> None:
    """What the call of the scheduler decided."""
    piece[ITERATIONS] = state.count[PLANNED] > 0
    piece[PREEMPTIONS] = state.count[VICTIMS]
    piece[AGAIN] = state.count[RECOMPUTED]
    piece[FOUND_TOKENS] = state.count[HITS]
    piece[PREFILLED] = state.count[PREFILL]
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


@allocating
def _until(state: State, table: Packed, features: Floats, steps: int, until_s: float, under_way: float) -> int:
    """Iterations, at most `steps`, that are scheduled before `until_s` has passed."""
    until_s *= 1.0 - ROUNDING
    if not state.setting[ASYNC]:
        return steps_until(table, features, steps, until_s)
    if under_way >= until_s:
        return 1
    return min(1 + steps_until(table, features, steps, until_s - under_way), steps)


@allocating
def _jump(state: State, table: Packed, features: Floats, steps: int, clock: Floats) -> None:
    """Plays so many decoding iterations."""
    clock[NOW] += decoding_seconds(table, features[0], steps)
    if state.setting[ASYNC]:
        last = iteration_seconds(table, features[1])
        clock[NOW] += clock[UNDER_WAY] - last
        clock[UNDER_WAY] = last
        for place in range(state.count[RUNNING]):
            entry = state.flight[place]
            entry[REQUEST], entry[TOKENS], entry[BEFORE], entry[YIELDS] = state.running[place], 1, 0, 1
    advance(state, steps)


@allocating
def _end_jump(state: State, times: Floats, now: float) -> None:
    """Requests that have all their tokens end, in order of admission."""
    ended = state.running[: state.count[RUNNING]].copy()
    for index in ended:
        if state.request[index, GENERATED] >= state.request[index, RESPONSE]:
            finish(state, index)
            times[index, LAST] = now
