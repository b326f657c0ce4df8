"""Requests come to an engine and leave it: its arrays grow, and rows of requests that have ended are given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lab.compiled import compiled
from simulator.blocks import CONTENT, Blocks, Ints
from simulator.engine import Contents, Requests, Settings, most_blocks, num_own, rows
from simulator.scheduler import (
    DONE,
    FLYING,
    GENERATED,
    GONE,
    HEAD,
    KNOWN,
    KNOWN_AT,
    MAX_SEQS,
    OWN_AT,
    REQUEST,
    ROW,
    RUNNING,
    SLOTS,
    STALE,
    WAITING,
    State,
    finish,
)

Kind = TypeVar("Kind", np.int64, np.int32)


def enlarged(state: State, size: int, settings: Settings, requests: Requests, contents: Contents) -> State:
    """The state with rows for more requests after its first `size`; they do not wait yet. Raises as `build` does."""
    new = rows(settings, requests, contents)
    end = size + len(new)
    state = _slots(state, min(settings.max_num_seqs, end), most_blocks(settings, requests) + 1)
    request = _longer(state.request, end)
    request[size:end] = new
    start, end_known = contents.num_known - len(contents.known), contents.num_known
    known = _longer(state.known, end_known)
    known[start:end_known] = contents.known
    contents.known = []
    return state._replace(
        request=request, known=known, queue=_queue(state, len(request) + 1),
        blocks=state.blocks._replace(holder=_longer(state.blocks.holder, contents.size, fill=-1)),
    )  # fmt: skip


def _longer(array: NDArray[Kind], size: int, fill: int = 0) -> NDArray[Kind]:
    """The array itself where it is long enough, else one of at least twice its length."""
    if size <= len(array):
        return array
    more = np.full((max(size, 2 * len(array)), *array.shape[1:]), fill, dtype=array.dtype)
    more[: len(array)] = array
    return more


def _queue(state: State, size: int) -> Ints:
    """The ring of waiting requests, with so many places."""
    if size <= len(state.queue):
        return state.queue
    queue, count = np.zeros(size, dtype=np.int64), state.count
    queue[: count[WAITING]] = waiting(state)
    count[HEAD] = 0
    return queue


def _slots(state: State, number: int, width: int) -> State:
    """Room for so many running requests, of so many blocks each."""
    had, free = len(state.slots), state.count[SLOTS]
    rows, columns = max(number, had), max(width, state.table.shape[1])
    if (rows, columns) == state.table.shape:
        return state
    table = np.zeros((rows, columns), dtype=np.int32)
    table[:had, : state.table.shape[1]] = state.table
    slots = _padded(state.slots, rows)
    slots[free : free + rows - had] = np.arange(had, rows)
    state.count[SLOTS] += rows - had
    state.setting[MAX_SEQS] = rows
    return state._replace(
        table=table, slots=slots, running=_padded(state.running, rows), plan=_padded(state.plan, rows),
        flight=_padded(state.flight, rows), victims=_padded(state.victims, rows), done=_padded(state.done, rows + 1),
    )  # fmt: skip


def _padded(array: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    more = np.zeros((size, *array.shape[1:]), dtype=array.dtype)
    more[: len(array)] = array
    return more


def waiting(state: State) -> Ints:
    """Rows of the requests that wait, from the front."""
    places = state.count[HEAD] + np.arange(state.count[WAITING])
    return np.asarray(state.queue[places % len(state.queue)])


def num_gone(state: State, size: int) -> int:
    """Rows, of the first `size`, of requests that have ended or left."""
    return int((state.request[:size, ROW] == GONE).sum())


def compacted(state: State, size: int, settings: Settings, contents: Contents) -> tuple[State, Ints]:
    """The state without the rows of requests that are gone, and the rows that it had before of those that stay."""
    stays = state.request[:size, ROW] != GONE
    stays[state.flight[: state.count[FLYING], REQUEST]] = True  # what the device has of them is still to come
    kept, place = np.flatnonzero(stays), np.cumsum(stays) - 1
    request, count = state.request[kept], state.count
    queue, running, flight = np.zeros(len(kept) + 1, dtype=np.int64), state.running.copy(), state.flight.copy()
    queue[: count[WAITING]] = place[waiting(state)]
    running[: count[RUNNING]] = place[running[: count[RUNNING]]]
    flight[: count[FLYING], REQUEST] = place[flight[: count[FLYING], REQUEST]]
    count[HEAD] = 0
    state = state._replace(request=request, queue=queue, running=running, flight=flight)
    return (_renumbered(state, settings, contents) if settings.prefix_caching else state), kept


def _renumbered(state: State, settings: Settings, contents: Contents) -> State:
    """Contents that neither a request nor a block knows lose their numbers."""
    request, block = state.request, state.blocks.block.copy()
    held = block[:, CONTENT]
    parts, moved = _known_parts(state)
    known = np.concatenate([*parts, np.zeros(0, dtype=np.int64)])
    own, change = num_own(request, settings.block_tokens), np.zeros(contents.size + 1, dtype=np.int64)
    np.add.at(change, request[:, OWN_AT], 1)
    np.add.at(change, request[:, OWN_AT] + own, -1)
    used = np.cumsum(change)[:-1] > 0
    used[known] = used[held[held >= 0]] = True
    number = np.append(np.cumsum(used) - 1, -1)  # its last entry is for nothing known
    block[:, CONTENT] = number[held]
    request[:, OWN_AT] = number[np.where(own > 0, request[:, OWN_AT], -1)]
    request[:, KNOWN_AT] = [moved.get(int(at), 0) for at in request[:, KNOWN_AT]]
    contents.places = {key: moved[at] for key, at in contents.places.items() if key and at in moved}
    contents.number = {content: int(number[old]) for content, old in contents.number.items() if used[old]}
    contents.size, contents.num_known = int(used.sum()), len(known)
    holder = np.concatenate([state.blocks.holder[: len(used)][used], np.full(1, -1, dtype=np.int32)])
    return state._replace(
        known=number[known] if len(known) else np.zeros(1, dtype=np.int64),
        blocks=Blocks(block=block, holder=holder, free=state.blocks.free),
    )  # fmt: skip


def _known_parts(state: State) -> tuple[list[Ints], dict[int, int]]:
    """Known contents that requests still refer to, prompt by prompt, and where each part moves."""
    at, lengths = state.request[:, KNOWN_AT], state.request[:, KNOWN]
    parts, moved, end = list[Ints](), dict[int, int](), 0
    pairs = sorted(set(zip(at[lengths > 0].tolist(), lengths[lengths > 0].tolist(), strict=True)))
    for start, length in pairs:
        moved[start] = end
        parts.append(state.known[start : start + length])
        end += length
    return parts, moved


@compiled
def leave(state: State, index: int) -> None:
    """A request that runs or waits goes for good; its blocks are given back."""
    state.count[DONE] = 0
    finish(state, index)
    state.count[DONE] = 0


@compiled
def youngest(state: State) -> int:
    """The waiting request that would start last, if it has no tokens yet; -1 where there is none."""
    count = state.count
    if count[WAITING] == 0:
        return -1
    index = state.queue[(count[HEAD] + count[WAITING] - 1) % len(state.queue)]
    row = state.request[index]
    return -1 if row[GENERATED] > 0 or row[STALE] > 0 else int(index)


def rows_of(ids: Ints, wanted: Sequence[int]) -> Ints:
    """Rows of requests, from the numbers that rising rows have."""
    found = np.searchsorted(ids, np.asarray(wanted, np.int64))
    if np.any(found >= len(ids)) or np.any(ids[np.minimum(found, len(ids) - 1)] != wanted):
        raise KeyError(f"not all of these requests are known: {list(wanted)}")
    return np.asarray(found)
