"""How the samples of a mini-batch become forward and backward passes. Both worlds call these.

`together` consecutive samples, for example the two responses of a pair, are never parted.
"""

from __future__ import annotations

from collections.abc import Sequence


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
    groups: list[list[int]] = []
    longest = 0
    for unit in _longest_first(lengths, together):
        full = groups and (
            (len(groups[-1]) + len(unit)) * longest > max_tokens
            or (max_samples is not None and len(groups[-1]) + len(unit) > max_samples)
        )
        if not groups or full:
            groups.append([])
            longest = max(lengths[i] for i in unit)
        groups[-1] += unit
    return groups


def pack_tight(
    lengths: Sequence[int], max_tokens: int, max_samples: int | None = None, together: int = 1
) -> list[list[int]]:
    """Groups of samples laid end to end without padding, whose tokens stay within `max_tokens`.

    First fit decreasing: each sample goes to the first group that has room (Johnson 1973: at most 11/9 of the least
    number of groups, and 6/9 of one). Limits and exceptions as for `pack`.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for unit in _longest_first(lengths, together):
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


def imbalance(loads: Sequence[float]) -> float:
    """By how much the most loaded rank is above the mean, as a share of it; 0 where all have the same."""
    mean = sum(loads) / len(loads) if loads else 0.0
    return max(loads) / mean - 1.0 if mean else 0.0


def _longest_first(lengths: Sequence[int], together: int) -> list[list[int]]:
    """Samples that stay together, the ones with the longest sample first."""
    units = [list(range(i, min(i + together, len(lengths)))) for i in range(0, len(lengths), together)]
    return sorted(units, key=lambda unit: (-max(lengths[i] for i in unit), unit[0]))
