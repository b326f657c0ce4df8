"""The scheduler of a rollout engine, decision by decision as vLLM V1 makes them (v1/core/sched/scheduler.py).

Each iteration: running requests first, in order of admission, each as many tokens as it lacks and the token budget
allows; where blocks run out the last one running is preempted, to be computed again; if none was preempted, waiting
requests join from the front while budget, sequences and blocks allow. All functions are compiled; they take `State`,
a view on arrays that `simulator.engine` makes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.compiled import compiled
from simulator.blocks import CONTENT, REFERENCES, Blocks, Ints, forget, give_back, remember, share, take

(MAX_SEQS, MAX_TOKENS, BLOCK, CACHING, ASYNC, RESERVE, UNKNOWN_FIRST, WATERMARK, STATIC, CONTIGUOUS) = range(10)
"""settings: most sequences, token budget, tokens of a block, flags, blocks kept free at admission, blocks of every
sequence where KV is contiguous (0: paged)"""
(RUNNING, HEAD, WAITING, PLANNED, FLYING, VICTIMS, DONE, SLOTS, OPEN, PREFILL, RECOMPUTED, HITS) = range(12)
"""counts: of running, head and length of the waiting queue, rows of plan and flight, of victims and of done, free
rows of the block table, whether a static batch still fills, and tokens of this iteration"""
(PROMPT, RESPONSE, COMPUTED, GENERATED, PENDING, FLIGHTS, STALE, HIGHEST, HELD, FOUND, ROW, KNOWN_AT, KNOWN, OWN_AT,
 PREEMPTED) = range(15)  # fmt: skip
"""columns of a request: lengths; tokens computed and generated; tokens under way; iterations under way, and those that
began before a preemption; most ever computed; blocks held and blocks that can be found; its row of the block table
(-1: waiting, -2: done); its known contents, and where its own begin; times preempted"""
WAITS, GONE = -1, -2
REQUEST, TOKENS, BEFORE, YIELDS = range(4)
"""columns of plan and flight: request, scheduled tokens, computed before, whether a token comes out"""


class State(NamedTuple):
    """Everything an engine keeps."""

    setting: Ints
    count: Ints  # type: ignore[assignment]  # tuple has a method of that name, which nobody calls
    request: NDArray[np.int64]
    """(requests, 15)"""
    running: Ints
    queue: Ints
    """(requests + 1,) ring of waiting requests"""
    slots: Ints
    """free rows of `table`"""
    table: NDArray[np.int32]
    """(max_num_seqs, blocks) block table"""
    blocks: Blocks
    known: Ints
    """contents of prompts' full blocks, one prompt after the other"""
    plan: NDArray[np.int64]
    """(max_num_seqs, 4) what the last call of `schedule` decided"""
    flight: NDArray[np.int64]
    """(max_num_seqs, 4) what the device computes meanwhile, with asynchronous scheduling"""
    victims: Ints
    done: Ints


@compiled
def wait(state: State, index: int) -> None:
    """A request joins the end of the queue."""
    count, queue = state.count, state.queue
    queue[(count[HEAD] + count[WAITING]) % len(queue)] = index
    count[WAITING] += 1


@compiled
def unqueue(state: State, position: int) -> None:
    """The request at a position of the queue leaves it; those before it keep their order."""
    count, queue = state.count, state.queue
    size = len(queue)
    for place in range(position, 0, -1):
        queue[(count[HEAD] + place) % size] = queue[(count[HEAD] + place - 1) % size]
    count[HEAD] = (count[HEAD] + 1) % size
    count[WAITING] -= 1


@compiled
def needed(state: State, tokens: int) -> int:
    """Blocks of a sequence of so many tokens."""
    if state.setting[CONTIGUOUS]:
        return int(state.setting[CONTIGUOUS])
    return int(-(-tokens // state.setting[BLOCK]))


@compiled
def content(state: State, index: int, position: int) -> int:
    """What a full block of a request holds."""
    row = state.request[index]
    if position < row[KNOWN]:
        return int(state.known[row[KNOWN_AT] + position])
    return int(row[OWN_AT] + position - row[KNOWN])


@compiled
def grow(state: State, index: int, blocks: int) -> None:
    """Takes blocks until the request holds so many; they must be free. Without a prefix cache only their number counts."""
    row = state.request[index]
    if not state.setting[CACHING] and row[HELD] < blocks:
        state.blocks.free[0] -= blocks - row[HELD]
        row[HELD] = blocks
    while row[HELD] < blocks:
        state.table[row[ROW], row[HELD]] = take(state.blocks)
        row[HELD] += 1


@compiled
def publish(state: State, index: int, tokens: int) -> None:
    """Full blocks of the first `tokens` tokens can be found from now on."""
    row, block = state.request[index], state.setting[BLOCK]
    if not state.setting[CACHING]:
        return
    while (row[FOUND] + 1) * block <= tokens:
        remember(state.blocks, state.table[row[ROW], row[FOUND]], content(state, index, row[FOUND]))
        row[FOUND] += 1


@compiled
def release(state: State, index: int) -> None:
    """A request gives back its blocks and its row of the table."""
    row = state.request[index]
    if state.setting[CACHING]:
        give_back(state.blocks, state.table[row[ROW]], row[HELD], state.setting[UNKNOWN_FIRST] != 0)
    else:
        state.blocks.free[0] += row[HELD]
    state.slots[state.count[SLOTS]] = row[ROW]
    state.count[SLOTS] += 1
    row[HELD] = row[FOUND] = 0
    row[ROW] = WAITS


@compiled
def preempt(state: State) -> int:
    """The last running request goes back to the front of the queue, to be computed again."""
    count = state.count
    count[RUNNING] -= 1
    index = state.running[count[RUNNING]]
    row = state.request[index]
    release(state, index)
    row[COMPUTED] = row[PENDING] = 0
    row[STALE] = row[FLIGHTS]
    row[PREEMPTED] += 1
    count[HEAD] = (count[HEAD] - 1) % len(state.queue)
    state.queue[count[HEAD]] = index
    count[WAITING] += 1
    return int(index)


@compiled
def plan(state: State, index: int, tokens: int) -> None:
    """The request gets so many tokens in this iteration."""
    count, row = state.count, state.request[index]
    before = row[COMPUTED]
    publish(state, index, min(before + tokens, row[PROMPT] + row[GENERATED]))
    row[COMPUTED] = before + tokens
    yields = row[COMPUTED] >= row[PROMPT] + row[GENERATED] + row[PENDING]
    if before < max(row[PROMPT], row[HIGHEST]):
        count[PREFILL] += tokens
    count[RECOMPUTED] += max(min(row[HIGHEST], row[COMPUTED]) - before, 0)
    row[HIGHEST] = max(row[HIGHEST], row[COMPUTED])
    row[FLIGHTS] += 1
    if state.setting[ASYNC] and yields:
        row[PENDING] += 1
    entry = state.plan[count[PLANNED]]
    entry[REQUEST], entry[TOKENS], entry[BEFORE], entry[YIELDS] = index, tokens, before, yields
    count[PLANNED] += 1


@compiled
def schedule(state: State) -> int:
    """Decides the next iteration into `state.plan`; returns its tokens."""
    count, setting = state.count, state.setting
    count[PLANNED] = count[VICTIMS] = count[PREFILL] = count[RECOMPUTED] = count[HITS] = 0
    if count[RUNNING] == 0:
        count[OPEN] = 1
    budget, position = setting[MAX_TOKENS], 0
    while position < count[RUNNING] and budget > 0:
        index = state.running[position]
        row = state.request[index]
        lacking = row[PROMPT] + row[GENERATED] + row[PENDING] - row[COMPUTED]
        last = row[PENDING] > 0 and row[COMPUTED] + 2 - row[PENDING] >= row[PROMPT] + row[RESPONSE]
        tokens = min(lacking, budget)
        if last or tokens == 0:
            position += 1
            continue
        blocks = needed(state, row[COMPUTED] + tokens)
        while blocks - row[HELD] > state.blocks.free[0]:
            victim = preempt(state)
            state.victims[count[VICTIMS]] = victim
            count[VICTIMS] += 1
            if victim == index:
                break
        if row[ROW] < 0:
            break
        grow(state, index, blocks)
        plan(state, index, tokens)
        budget -= tokens
        position += 1
    if count[VICTIMS] == 0:
        budget = admit(state, budget)
    return int(setting[MAX_TOKENS] - budget)


@compiled
def found(state: State, index: int) -> tuple[int, int]:
    """Full blocks of the request that the cache holds, from the start, and how many of those nobody holds now.

    The last token is always computed, for its logits.
    """
    row = state.request[index]
    if not state.setting[CACHING]:
        return 0, 0
    most, hits, unheld = (row[PROMPT] + row[GENERATED] - 1) // state.setting[BLOCK], 0, 0
    while hits < most:
        block = state.blocks.holder[content(state, index, hits)]
        if block < 0:
            break
        unheld += state.blocks.block[block, REFERENCES] == 0
        hits += 1
    return hits, unheld


@compiled
def fits(state: State, index: int, hits: int, unheld: int, tokens: int) -> bool:
    """Whether blocks allow a waiting request to join with its next `tokens` tokens."""
    row, setting = state.request[index], state.setting
    spare = state.blocks.free[0] - unheld + hits - (setting[WATERMARK] if state.count[RUNNING] else 0)
    if setting[RESERVE] and needed(state, row[PROMPT] + row[GENERATED]) > spare:
        return False
    return bool(needed(state, hits * setting[BLOCK] + tokens) <= spare)


@compiled
def admit(state: State, budget: int) -> int:
    """Waiting requests join the running ones; returns what is left of the token budget."""
    count, setting = state.count, state.setting
    skipped = 0
    while budget > 0:
        if setting[STATIC] and not count[OPEN]:
            break
        if skipped == count[WAITING] or count[RUNNING] >= setting[MAX_SEQS]:
            count[OPEN] = 0
            break
        index = state.queue[(count[HEAD] + skipped) % len(state.queue)]
        row = state.request[index]
        if row[STALE] > 0:  # what it had under way when it was preempted is still to come
            skipped += 1
            continue
        hits, unheld = found(state, index)
        tokens = min(row[PROMPT] + row[GENERATED] - hits * setting[BLOCK], budget)
        if not fits(state, index, hits, unheld, tokens):
            count[OPEN] = 0
            break
        unqueue(state, skipped)
        join(state, index, hits)
        grow(state, index, needed(state, row[COMPUTED] + tokens))
        plan(state, index, tokens)
        budget -= tokens
    return budget


@compiled
def join(state: State, index: int, hits: int) -> None:
    """A request starts to run, on blocks that the cache holds already."""
    count, row = state.count, state.request[index]
    count[SLOTS] -= 1
    row[ROW] = state.slots[count[SLOTS]]
    for position in range(hits):
        block = state.blocks.holder[content(state, index, position)]
        share(state.blocks, block)
        state.table[row[ROW], position] = block
    row[HELD] = row[FOUND] = hits
    row[COMPUTED] = hits * state.setting[BLOCK]
    count[HITS] += row[COMPUTED] if row[PREEMPTED] == 0 else 0
    state.running[count[RUNNING]] = index
    count[RUNNING] += 1


@compiled
def update(state: State, entries: NDArray[np.int64], number: int) -> int:
    """The device has computed `entries`: tokens come out, finished requests go; returns how many are in `state.done`."""
    count = state.count
    count[DONE] = 0
    for place in range(number):
        index = entries[place, REQUEST]
        row = state.request[index]
        if row[ROW] == GONE:
            continue
        row[FLIGHTS] -= 1
        stale = row[STALE] > 0
        row[STALE] -= stale
        if not entries[place, YIELDS]:
            continue
        row[GENERATED] += 1
        if row[PENDING] > 0 and not stale:
            row[PENDING] -= 1
        if row[ROW] >= 0 and state.setting[ASYNC]:
            publish(state, index, row[COMPUTED] - row[PENDING])
        if row[GENERATED] >= row[RESPONSE]:
            finish(state, index)
    return int(count[DONE])


@compiled
def finish(state: State, index: int) -> None:
    """A request has all its tokens."""
    count, row = state.count, state.request[index]
    if row[ROW] >= 0:
        release(state, index)
        kept = 0
        for position in range(count[RUNNING]):
            state.running[kept] = state.running[position]
            kept += state.running[position] != index
        count[RUNNING] = kept
    else:
        for position in range(count[WAITING]):
            if state.queue[(count[HEAD] + position) % len(state.queue)] == index:
                unqueue(state, position)
                break
    row[ROW] = GONE
    state.done[count[DONE]] = index
    count[DONE] += 1


@compiled
def interrupt(state: State) -> int:
    """Every running request is put back, to be computed again; returns how many. Nothing may be under way."""
    number = state.count[RUNNING]
    while state.count[RUNNING] > 0:
        preempt(state)
    return int(number)


@compiled
def forget_all(state: State) -> None:
    """The prefix cache is emptied, as after a weight update; blocks that are held stay held."""
    for index in range(1, len(state.blocks.block) - 1):
        if state.blocks.block[index, CONTENT] >= 0:
            forget(state.blocks, index)
    for place in range(state.count[RUNNING]):
        row = state.request[state.running[place]]
        row[FOUND] = row[HELD]  # what they hold now is not to be found again
