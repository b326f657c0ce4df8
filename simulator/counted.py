"""One engine, played to the end of its requests by counting: nothing comes from outside, and nobody is preempted.

The decisions are those of `simulator.scheduler`, for the case that it does not matter which block is whose. All
decoding requests advance together, so each is two numbers: what its context is short of the iteration's number, and the
iteration of its last token. An event (somebody joins or ends) then costs a look at the numbers of those that run,
whatever their lengths. With the prefix cache, samples of one prompt that wait one behind the other hold its full blocks
together, for as long as one of them runs. `play` gives up, and the scheduler has to play it, where blocks run out so
that somebody would be preempted, or where a sample comes when all before it of its prompt have gone and so many blocks
were taken since that some of theirs may be among them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.compiled import compiled
from profiles.interpolate import Packed, iteration_seconds
from simulator.blocks import Ints
from simulator.decoding import Decode, decode_seconds

Floats = NDArray[np.float64]
(SLOTS, BUDGET, BLOCK, LAG, RESERVE, SPARE, ROOM) = range(7)
"""settings: sequences, tokens of an iteration, tokens of a block, iterations until an end is seen, whether all of a
prompt must fit, blocks that admissions leave free, blocks of every sequence where KV is contiguous (0: paged)"""
(WAITS, HELD, FREE, NEXT, ENDED, FIRST, LAST, PARTS, HITS, GIVEN) = range(10)
"""counts: next request to join, sequences that hold blocks, free blocks, number of the next iteration, requests that
ended, first and one past the last of `due`, requests whose prompt is not done, tokens of prompts that were found, blocks
given back so far"""
(SEQS, TOTAL, LONGEST, SHORTEST, SOONEST) = range(5)
"""of those that decode: number; sum, largest and smallest of what their context is short of the iteration's number;
iteration of the first last token"""
(START, END, ITERATIONS, SEQUENCES, TOKENS, PREFILL, PIECES) = range(7)
"""columns of a window: seconds, iterations, sequences and tokens over its iterations, tokens of prompts, pieces; the
ten after them are the largest features of its iterations"""
NUM_WINDOWS = 8
"""a history is told in at most twice so many windows"""
NEVER = 1 << 60


class Count(NamedTuple):
    """Everything that is kept."""

    setting: Ints
    count: Ints  # type: ignore[assignment]  # tuple has a method of that name, which nobody calls
    decoding: Ints
    short: Ints
    """(slots,) of those that decode: context before iteration m is short + m"""
    final: Ints
    """(slots,) iteration of the last token"""
    who: Ints
    """(slots,) request"""
    phase: Ints
    """(block,) how many decode by short % block: those of phase -m % block begin a block in iteration m"""
    part: Ints
    """(slots,) requests whose prompt is not done, in order"""
    done: Ints
    """(slots,) tokens of it that are"""
    due: Ints
    """(2, requests) iteration before which an end is seen, and who it was"""
    prompt: Ints
    response: Ints
    group: Ints
    """(requests,) whose prompt it has"""
    shared: Ints
    """(requests,) blocks of its prompt that can be found"""
    live: Ints
    """(groups,) how many hold blocks; -1: nobody has yet"""
    safe: Ints
    """(groups,) of which nobody holds blocks any more: what may be taken in all before the first of theirs is"""
    ended: Floats
    """(requests,) seconds"""
    clock: Floats
    window: Floats
    """(2 NUM_WINDOWS + 1, 17); the last row holds the number of the window that is written, and the pieces of one"""
    feature: Floats
    """(10,) of the iteration that is scheduled"""


@compiled
def needed(state: Count, tokens: int) -> int:
    """Blocks of a sequence of so many tokens."""
    if state.setting[ROOM]:
        return int(state.setting[ROOM])
    return int(-(-tokens // state.setting[BLOCK]))


@compiled
def growth(state: Count, steps: int) -> int:
    """Blocks that those who decode take in the next iterations."""
    block = state.setting[BLOCK]
    if state.setting[ROOM]:
        return 0
    total = steps // block * state.decoding[SEQS]
    for step in range(steps % block):
        total += state.phase[-(state.count[NEXT] + step) % block]
    return int(total)


@compiled
def num_taken(state: Count) -> int:
    """Blocks that were taken so far, less as many as there are."""
    return int(state.count[GIVEN] - state.count[FREE])


@compiled
def found(state: Count) -> int:
    """Blocks of the next waiting request's prompt that others of its prompt hold, or held and nobody took since."""
    request, group = state.count[WAITS], state.group[state.count[WAITS]]
    there = state.live[group] > 0 or (state.live[group] == 0 and num_taken(state) <= state.safe[group])
    return int(state.shared[request]) if there else 0


@compiled
def held(state: Count) -> int:
    """Of those that are found, blocks that somebody holds; the others are among the free ones."""
    return found(state) if state.live[state.group[state.count[WAITS]]] > 0 else 0


@compiled
def joins(state: Count, budget: int) -> int:
    """Tokens with which the next waiting request would join now; 0: it does not."""
    count, setting = state.count, state.setting
    if count[WAITS] == len(state.prompt) or count[HELD] >= setting[SLOTS] or budget <= 0:
        return 0
    prompt, hits = state.prompt[count[WAITS]], found(state)
    spare = count[FREE] + held(state) - (setting[SPARE] if count[HELD] else 0)
    if setting[RESERVE] and needed(state, prompt) > spare:
        return 0
    tokens = min(prompt - hits * setting[BLOCK], budget)
    return int(tokens) if needed(state, hits * setting[BLOCK] + tokens) <= spare else 0


@compiled
def join(state: Count, tokens: int) -> int:
    """The next waiting request joins; returns the tokens of its prompt that are done before; below 0: nobody knows."""
    count, hits, group = state.count, found(state), state.group[state.count[WAITS]]
    if state.live[group] == 0 and hits < state.shared[count[WAITS]]:
        return -1
    before = hits * state.setting[BLOCK]
    count[FREE] -= needed(state, before + tokens) - held(state)
    count[HELD] += 1
    count[HITS] += before
    state.live[group] = max(state.live[group], 0) + 1
    return int(before)


@compiled
def look(state: Count) -> None:
    """Looks at all that decode, after some of them have gone."""
    decoding = state.decoding
    longest, shortest, soonest = -NEVER, NEVER, NEVER
    for place in range(decoding[SEQS]):
        longest = max(longest, state.short[place])
        shortest = min(shortest, state.short[place])
        soonest = min(soonest, state.final[place])
    decoding[LONGEST], decoding[SHORTEST], decoding[SOONEST] = longest, shortest, soonest


@compiled
def decodes(state: Count, request: int, iteration: int) -> None:
    """The request's prompt is done in this iteration, and its first token comes out."""
    decoding, place = state.decoding, state.decoding[SEQS]
    short = state.prompt[request] - iteration - 1
    final = iteration + state.response[request] - 1
    state.short[place], state.final[place], state.who[place] = short, final, request
    state.phase[short % state.setting[BLOCK]] += 1
    decoding[SEQS] += 1
    decoding[TOTAL] += short
    decoding[LONGEST] = max(decoding[LONGEST], short)
    decoding[SHORTEST] = min(decoding[SHORTEST], short)
    decoding[SOONEST] = min(decoding[SOONEST], final)


@compiled
def end(state: Count) -> None:
    """Those whose last token the iteration before the next one made end now."""
    count, decoding, last = state.count, state.decoding, state.count[NEXT] - 1
    place = 0
    while place < decoding[SEQS]:
        if state.final[place] > last:
            place += 1
            continue
        request = state.who[place]
        state.ended[request] = state.clock[0]
        state.due[0, count[LAST]] = last + 1 + state.setting[LAG]
        state.due[1, count[LAST]] = request
        count[LAST] += 1
        count[ENDED] += 1
        decoding[SEQS] -= 1
        decoding[TOTAL] -= state.short[place]
        state.phase[state.short[place] % state.setting[BLOCK]] -= 1
        other = decoding[SEQS]
        state.short[place], state.final[place] = state.short[other], state.final[other]
        state.who[place] = state.who[other]
    look(state)


@compiled
def see(state: Count) -> None:
    """Blocks and places of those whose end is seen before the next iteration are free."""
    count = state.count
    while count[FIRST] < count[LAST] and state.due[0, count[FIRST]] <= count[NEXT]:
        request, group = state.due[1, count[FIRST]], state.group[state.due[1, count[FIRST]]]
        count[HELD] -= 1
        state.live[group] -= 1
        blocks = needed(state, state.prompt[request] + state.response[request] - 1)
        if state.live[group] > 0:
            blocks -= state.shared[request]
        else:
            state.safe[group] = count[GIVEN]  # taken so far, and those that are free by now: they are taken before
        count[FREE] += blocks
        count[GIVEN] += blocks
        count[FIRST] += 1


@compiled
def add(state: Count, tokens: int, before: int) -> None:
    """A part of a prompt is in the iteration that is scheduled."""
    feature = state.feature
    feature[0] += tokens
    feature[1] += 1.0
    feature[7] += tokens * before + tokens * (tokens + 1) / 2
    feature[8] += before + tokens
    if tokens == 1:
        feature[4] += 1.0
        feature[5] += before
        feature[6] = max(feature[6], before)
        feature[9] = min(feature[9], before)
    else:
        feature[2] += tokens
        feature[3] += tokens * (before + tokens / 2)


@compiled
def begin(state: Count) -> None:
    """The iteration that is scheduled holds a token of everybody who decodes."""
    feature, decoding, number = state.feature, state.decoding, state.count[NEXT]
    feature[:] = 0.0
    seqs = decoding[SEQS]
    feature[0] = feature[1] = feature[4] = seqs
    feature[9] = np.inf
    if seqs:
        feature[5] = decoding[TOTAL] + seqs * number
        feature[6], feature[9] = decoding[LONGEST] + number, decoding[SHORTEST] + number
    feature[7] = feature[8] = feature[5] + seqs


@compiled
def close(state: Count) -> None:
    """Nobody else joins the iteration."""
    feature = state.feature
    if feature[2] > 0.0:
        feature[3] = feature[3] / feature[2] - feature[2] / 2
    if feature[4] == 0.0:
        feature[9] = 0.0


@compiled
def schedule(state: Count) -> bool:
    """The next iteration, in `feature`; False where counting is not enough."""
    count, setting = state.count, state.setting
    taken = growth(state, 1)
    if taken > count[FREE]:
        return False
    count[FREE] -= taken
    begin(state)
    budget, parts = setting[BUDGET] - state.decoding[SEQS], count[PARTS]
    count[PARTS] = 0
    for place in range(parts):
        request, before = state.part[place], state.done[place]
        tokens = min(state.prompt[request] - before, budget)
        blocks = 0 if setting[ROOM] else needed(state, before + tokens) - needed(state, before)
        if blocks > count[FREE]:
            return False
        count[FREE] -= blocks
        budget -= tokens
        if tokens > 0:
            add(state, tokens, before)
        keep(state, request, before + tokens)
    tokens = joins(state, budget)
    while tokens > 0:
        before = join(state, tokens)
        if before < 0:
            return False
        budget -= tokens
        add(state, tokens, before)
        keep(state, count[WAITS], before + tokens)
        count[WAITS] += 1
        tokens = joins(state, budget)
    close(state)
    return True


@compiled
def keep(state: Count, request: int, tokens: int) -> None:
    """So much of a prompt is done after this iteration; if that is all of it, the request decodes from the next on."""
    count = state.count
    if tokens == state.prompt[request]:
        decodes(state, request, count[NEXT])
        return
    state.part[count[PARTS]], state.done[count[PARTS]] = request, tokens
    count[PARTS] += 1


@compiled
def note(state: Count, start: float, iterations: int) -> None:
    """Iterations of like kind, the last of which is in `feature`, are told in the windows; full windows are halved."""
    window, feature = state.window, state.feature
    size, at = int(window[-1, END]), int(window[-1, START])
    if window[at, PIECES] >= size:
        at += 1
    if at == len(window) - 1:
        for place in range(at // 2):
            merge(window, 2 * place, 2 * place + 1, place)
        window[at // 2 : at, :] = 0.0
        at //= 2
        window[-1, END] = 2 * size
    window[-1, START] = at
    row = window[at]
    if row[PIECES] == 0.0:
        row[START] = start
    row[END] = state.clock[0]
    row[ITERATIONS] += iterations
    row[SEQUENCES] += iterations * feature[1]
    row[TOKENS] += iterations * feature[0]
    row[PREFILL] += feature[2]
    row[PIECES] += 1.0
    for place in range(10):
        row[7 + place] = max(row[7 + place], feature[place])


@compiled
def merge(window: Floats, first: int, second: int, into: int) -> None:
    """Two windows that follow each other become one."""
    start = window[first, START]
    for column in range(window.shape[1]):
        if column >= 7:
            window[into, column] = max(window[first, column], window[second, column])
        elif column >= ITERATIONS:
            window[into, column] = window[first, column] + window[second, column]
    window[into, END] = window[second, END]
    window[into, START] = start


@compiled
def jump_length(state: Count) -> int:
    """Iterations in which only those decode that do now; 0 where the next one has to be scheduled."""
    count, decoding = state.count, state.decoding
    if count[PARTS] or not decoding[SEQS] or joins(state, state.setting[BUDGET] - decoding[SEQS]):
        return 0
    steps = decoding[SOONEST] - count[NEXT] + 1
    if count[FIRST] < count[LAST]:
        steps = min(steps, state.due[0, count[FIRST]] - count[NEXT])
    return int(steps) if growth(state, steps) <= count[FREE] else 1


@compiled
def play(state: Count, table: Packed, decode: Decode) -> bool:
    """Until every request has ended; False where counting is not enough."""
    count, clock = state.count, state.clock
    while count[ENDED] < len(state.prompt):
        see(state)
        steps, start = jump_length(state), clock[0]
        if steps > 0:
            taken = growth(state, steps)
            if taken > count[FREE]:
                return False
            count[FREE] -= taken
            begin(state)
            clock[0] += decode_seconds(table, decode, state.feature, steps)
        else:
            steps = 1
            if not schedule(state):
                return False
            clock[0] += iteration_seconds(table, state.feature)
        count[NEXT] += steps
        if state.feature[0] > 0.0:
            note(state, start, steps)
        if state.decoding[SOONEST] < count[NEXT]:
            end(state)
    return True
