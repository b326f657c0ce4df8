"""Closed loop: C clients of one engine, each sending its next request when the last one is answered.

No arrival depends on time, so which iterations run, and what each holds, is the same whatever an iteration costs. The
time of every request is therefore linear in the cost terms, and one play gives the share of each: what constants are
fitted on, and what a prediction adds up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.compiled import compiled
from profiles.interpolate import Packed, attention, line, padded
from profiles.iteration import EngineTable

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

TERMS = ("decode", "decode_attention", "prefill", "iterations", "sequences", "prefill_iterations")
"""seconds of the first three; counts of the others: iterations, sequences summed over them, those with any prefill"""


class Loop(NamedTuple):
    """What one play gives."""

    tpot: Floats
    """(6,) mean over requests of each term per token after the first"""
    ttft: Floats
    """(6,) mean over requests of each term between the free slot and the first token"""
    iterations: int
    preemptions: int


def closed_loop(
    table: EngineTable, prompts: Counts, responses: Counts, *, clients: int, budget: int, kv_tokens: float = np.inf
) -> Loop:  # fmt: skip
    """Plays all requests in order, first come first served.

    prompts, responses: tokens of each request. budget: tokens of one iteration (`max_num_batched_tokens`); decodes go
    first, prompts are cut to what is left. kv_tokens: what the cache holds; the youngest request is preempted and
    recomputed when it is full. The constants of the table are not used.
    """
    totals = _play(
        table.packed(), prompts.astype(np.int64), responses.astype(np.int64), clients, budget, float(kv_tokens)
    )  # fmt: skip
    return Loop(tpot=totals[0], ttft=totals[1], iterations=int(totals[2]), preemptions=int(totals[3]))


@compiled
def _iteration(
    table: Packed, decodes: int, context: float, chunks: Floats, prefixes: Floats, filled: int, finished: int
) -> Floats:
    """The terms of one iteration: `filled` chunks, of which `finished` reach their first token."""
    terms = np.zeros(6)
    chunk = chunks[:filled].sum()
    rows = decodes + finished
    alone = 0.0
    if decodes > 0:
        alone = line(table.token_grid, table.token_seconds, padded(table.capture_sizes, float(decodes)))
        alone += line(table.sequence_grid, table.sequence_seconds, float(decodes))
        terms[1] = attention(table, 0.0, 0.0, float(decodes), context / decodes)
    terms[0] = alone
    if filled > 0:
        both = line(table.token_grid, table.token_seconds, padded(table.capture_sizes, decodes + chunk))
        both += line(table.sequence_grid, table.sequence_seconds, float(rows))
        for i in range(filled):
            both += attention(table, chunks[i], prefixes[i], 0.0, 0.0)
        terms[2] = max(both - alone, 0.0)
        terms[5] = 1.0
    terms[3] = 1.0
    terms[4] = float(decodes + filled)
    return terms


@compiled
def _play(
    table: Packed, prompts: Counts, responses: Counts, clients: int, budget: int, kv_tokens: float
) -> tuple[Floats, Floats, int, int]:
    number = len(prompts)
    slot = np.full(clients, -1)  # request of each running place, in order of admission
    held = np.zeros(number)  # tokens in the cache
    wanted = prompts.astype(np.float64)  # tokens to compute before the next one comes out
    given = np.zeros(number, dtype=np.int64)  # tokens that came out
    freed, first = np.zeros((number, 6)), np.zeros((number, 6))
    now, tpot, ttft = np.zeros(6), np.zeros(6), np.zeros(6)
    chunks, prefixes = np.zeros(clients), np.zeros(clients)
    queue = np.zeros(number + clients, dtype=np.int64)  # preempted ones, the last in first out
    queued, following, running, done, iterations, preemptions, counted = 0, 0, 0, 0, 0, 0, 0
    while done < number:
        left, used, decodes, context, filled, finished = budget, 0.0, 0, 0.0, 0, 0
        for i in range(running):
            used += held[slot[i]] + 1.0
        while used > kv_tokens and running > 1:  # the youngest gives way
            running -= 1
            r = slot[running]
            used -= held[r] + 1.0
            wanted[r], held[r] = prompts[r] + given[r], 0.0
            queue[queued] = r
            queued += 1
            preemptions += 1
        blocked = queued > 0 and used >= kv_tokens
        for i in range(running):
            r = slot[i]
            if wanted[r] - held[r] == 1.0 and given[r] > 0:
                decodes += 1
                context += held[r]
                left -= 1
        for i in range(running):
            r = slot[i]
            if not (wanted[r] - held[r] == 1.0 and given[r] > 0) and left > 0:
                chunks[filled] = min(float(left), wanted[r] - held[r])
                prefixes[filled] = held[r]
                left -= int(chunks[filled])
                filled += 1
            elif not (wanted[r] - held[r] == 1.0 and given[r] > 0):
                chunks[filled], prefixes[filled] = 0.0, held[r]
                filled += 1
        while left > 0 and running < clients and not blocked and (queued > 0 or following < number):
            r = queue[queued - 1] if queued > 0 else following
            if used + wanted[r] > kv_tokens and running > 0:
                break
            if queued > 0:
                queued -= 1
            else:
                following += 1
            slot[running] = r
            running += 1
            used += wanted[r]
            chunks[filled], prefixes[filled] = min(float(left), wanted[r]), 0.0
            left -= int(chunks[filled])
            filled += 1
        at = 0
        for i in range(running):
            r = slot[i]
            if not (wanted[r] - held[r] == 1.0 and given[r] > 0):
                finished += 1 if held[r] + chunks[at] >= wanted[r] else 0
                at += 1
        some = chunks[:filled] > 0.0
        now = now + _iteration(table, decodes, context, chunks[:filled][some], prefixes[:filled][some], some.sum(), finished)
        iterations += 1
        at, kept = 0, 0
        for i in range(running):
            r = slot[i]
            decoding = wanted[r] - held[r] == 1.0 and given[r] > 0
            if decoding:
                held[r] += 1.0
            else:
                held[r] += chunks[at]
                at += 1
            if held[r] >= wanted[r]:
                given[r] += 1
                wanted[r] = held[r] + 1.0
                if given[r] == 1:
                    first[r] = now
                    ttft += now - freed[r]
                if given[r] >= responses[r]:
                    done += 1
                    if responses[r] > 1:
                        counted += 1
                        tpot += (now - first[r]) / (responses[r] - 1)
                    if r + clients < number:  # this client's next request is sent now
                        freed[following + (running - 1 - i) * 0 if following < number else r] = now
                    continue
            slot[kept] = r
            kept += 1
        running = kept
    return tpot / max(counted, 1), ttft / number, iterations, preemptions
