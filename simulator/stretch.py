"""A counted engine, played for a while: until it has room that nobody waits for, until a time, or for so many iterations."""

from __future__ import annotations

from lab.compiled import compiled
from profiles.interpolate import Packed, iteration_seconds
from simulator.counted import (
    FIRST,
    FREE,
    HELD,
    LAG,
    LAST,
    NEXT,
    PARTS,
    SEQS,
    SLOTS,
    SOONEST,
    WAITS,
    Count,
    begin,
    end,
    growth,
    jump_length,
    note,
    schedule,
    see,
)
from simulator.decoding import Decode, decode_seconds

UNCOUNTABLE, EMPTY, DRY, REACHED = range(4)
"""why a stretch ends: counting is not enough, nothing is left, somebody could join and nobody waits, time is up"""
NOW, DRY_AT = range(2)
"""the clock, and when the engine was dry: where ends are seen one iteration late, before the last one had ended"""
ROUNDING = 1e-12


@compiled
def dry(state: Count) -> bool:
    """Whether nobody waits and somebody who came now could join as soon as one who comes can."""
    count = state.count
    places = state.setting[SLOTS] - count[HELD] + count[LAST] - count[FIRST]
    return bool(count[WAITS] == len(state.prompt) and places > 0)


@compiled
def until(state: Count, table: Packed, decode: Decode, steps: int, left_s: float) -> int:
    """Of so many decoding iterations, those up to the first that ends after `left_s` or with it."""
    low, high = 1, steps
    while low < high:
        middle = (low + high) // 2
        if decode_seconds(table, decode, state.feature, middle) >= left_s:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def stretch(state: Count, table: Packed, decode: Decode, until_s: float, most: int, stop_dry: bool) -> int:
    """To the first end of an iteration at or after `until_s`, after `most` iterations, or, where that is asked, to where
    it is dry; to its end at the latest. The iteration that is under way then is played to its end."""
    count, clock, played = state.count, state.clock, 0
    while count[WAITS] < len(state.prompt) or count[PARTS] > 0 or state.decoding[SEQS] > 0:
        if played >= most or clock[NOW] >= until_s * (1.0 - ROUNDING):
            return REACHED
        if stop_dry and dry(state):
            clock[DRY_AT] = clock[NOW]
            return DRY
        see(state)
        steps, start = min(jump_length(state), most - played), clock[NOW]
        if steps > 0:
            begin(state)
            if steps > 1 and start + decode_seconds(table, decode, state.feature, steps) > until_s:
                steps = until(state, table, decode, steps, until_s * (1.0 - ROUNDING) - start)
            taken = growth(state, steps)
            if taken > count[FREE]:
                return UNCOUNTABLE
            count[FREE] -= taken
            clock[NOW] += decode_seconds(table, decode, state.feature, steps)
        else:
            steps = 1
            if not schedule(state):
                return UNCOUNTABLE
            clock[NOW] += iteration_seconds(table, state.feature)
        emptied = stop_dry and state.setting[LAG] > 0 and dry(state)
        played += steps
        count[NEXT] += steps
        if state.feature[0] > 0.0:
            note(state, start, steps)
        if state.decoding[SOONEST] < count[NEXT]:
            end(state)
        if emptied:
            clock[DRY_AT] = start
            return DRY
    return EMPTY
