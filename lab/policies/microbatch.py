"""How the samples of a mini-batch become forward and backward passes. Both worlds call these.

`together` consecutive samples, for example the two responses of a pair, are never parted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np


def deal(num_samples: int, num_ranks: int, together: int = 1) -> list[list[int]]:
    """Indices of the samples of each rank: rank r takes r, r + ranks, …"""
    units = [range(i, min(i + together, num_samples)) for i in range(0, num_samples, together)]
    return [[i for unit in units[rank::num_ranks] for i in unit] for rank in range(num_ranks)]


def minibatches(num_samples: int, minibatch_samples: int) -> list[list[int]]:
    """Indices of the samples of each optimizer step, in order."""
    return [list(range(i, i + minibatch_samples)) for i in range(0, num_samples, minibatch_samples)]


def pack(lengths: Sequence[int], max_tokens: int, max_samples: int | None = None, together: int = 1) -> list[list[int]]:
    """Groups of samples of similar length whose padded size, samples × longest, stays within `max_tokens`.

    Longest first, so the first pass is the largest one. Every sample is in exactly one group; a sample (or a pair)
    that alone exceeds a limit is a group of its own.
    """
    order, longest = _longest_first(lengths, together)
    return [
        [i for unit in order[first:last] for i in range(unit * together, min((unit + 1) * together, len(lengths)))]
        for first, last in parts(longest, max_tokens, max_samples, together)
    ]


def parts(
    longest: Sequence[int], max_tokens: int, max_samples: int | None = None, together: int = 1
) -> list[tuple[int, int]]:
    """Where each group of `pack` begins and ends in units of `together` samples, the longest unit first; `longest` is
    the longest sample of each."""
    found, first = list[tuple[int, int]](), 0
    while first < len(longest):
        room = max_tokens // max(longest[first], 1)
        size = max(min(room, room if max_samples is None else max_samples) // together, 1)
        found.append((first, min(first + size, len(longest))))
        first += size
    return found


def pack_tight(
    lengths: Sequence[int], max_tokens: int, max_samples: int | None = None, together: int = 1
) -> list[list[int]]:
    """Groups of samples laid end to end without padding, whose tokens stay within `max_tokens`.

    First fit decreasing: each sample goes to the first group that has room (Johnson 1973: at most 11/9 of the least
    number of groups, and 6/9 of one). Limits and exceptions as for `pack`.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for first in _longest_first(lengths, together)[0]:
        unit = list(range(first * together, min((first + 1) * together, len(lengths))))
        size = sum(lengths[i] for i in unit)
        fits = (
            k
            for k, left in enumerate(room)
            if size <= left and (max_samples is None or len(groups[k]) + len(unit) <= max_samples)
        )
        k = next(fits, len(groups))
        if k == len(groups):
            groups.append([])
            room.append(max_tokens)
        groups[k] += unit
        room[k] -= size
    return groups


def pack_shared(
    lengths: Sequence[int], prompts: Sequence[int], prompt_tokens: Sequence[int], max_tokens: int,
    max_samples: int | None = None, together: int = 1,
) -> list[list[int]]:  # fmt: skip
    """Groups of samples laid end to end in their order, in which the samples of a prompt share its tokens.

    `prompts` says which samples have the same one, `prompt_tokens` how long it is, of each sample. A group's tokens, a
    prompt counted once, stay within `max_tokens`; exceptions as for `pack`.
    """
    groups: list[list[int]] = []
    known, held = set[int](), 0
    for first in range(0, len(lengths), together):
        unit = list(range(first, min(first + together, len(lengths))))
        size = shared_tokens(unit, lengths, prompts, prompt_tokens, known)
        full = max_samples is not None and groups and len(groups[-1]) + len(unit) > max_samples
        if not groups or full or held + size > max_tokens:
            groups.append([])
            known, held = set(), 0
            size = shared_tokens(unit, lengths, prompts, prompt_tokens, known)
        groups[-1] += unit
        known.update(prompts[i] for i in unit)
        held += size
    return groups


def shared_tokens(
    group: Sequence[int], lengths: Sequence[int], prompts: Sequence[int], prompt_tokens: Sequence[int],
    known: Collection[int] = (),
) -> int:  # fmt: skip
    """Tokens of some samples laid end to end, each prompt once, and none of those that are `known`."""
    seen, total = set(known), 0
    for i in group:
        total += lengths[i] - (prompt_tokens[i] if prompts[i] in seen else 0)
        seen.add(prompts[i])
    return total


def imbalance(loads: Sequence[float]) -> float:
    """By how much the most loaded rank is above the mean, as a share of it; 0 where all have the same."""
    mean = sum(loads) / len(loads) if loads else 0.0
    return max(loads) / mean - 1.0 if mean else 0.0


def _longest_first(lengths: Sequence[int], together: int) -> tuple[list[int], list[int]]:
    """Units of samples that stay together, the ones with the longest sample first, and that length of each."""
    if not len(lengths):
        return [], []
    most = np.maximum.reduceat(np.asarray(lengths), np.arange(0, len(lengths), together))
    order = np.argsort(-most, kind="stable")
    return order.tolist(), most[order].tolist()
