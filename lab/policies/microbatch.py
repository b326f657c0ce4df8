"""How the samples of a mini-batch become forward and backward passes. Both worlds call these."""

from __future__ import annotations

from collections.abc import Sequence


def deal(num_samples: int, num_ranks: int) -> list[list[int]]:
    """Indices of the samples of each rank: rank r takes r, r + ranks, …"""
    return [list(range(rank, num_samples, num_ranks)) for rank in range(num_ranks)]


def minibatches(num_samples: int, minibatch_samples: int) -> list[list[int]]:
    """Indices of the samples of each optimizer step, in order."""
    return [list(range(i, i + minibatch_samples)) for i in range(0, num_samples, minibatch_samples)]


def pack(lengths: Sequence[int], max_tokens: int, max_samples: int | None = None) -> list[list[int]]:
    """Groups of samples of similar length whose padded size, samples × longest, stays within `max_tokens`.

    Longest first, so the first pass is the largest one. Every sample is in exactly one group; a sample longer
    than `max_tokens` is a group of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    for i in order:
        full = groups and (
            (len(groups[-1]) + 1) * lengths[groups[-1][0]] > max_tokens
            or (max_samples is not None and len(groups[-1]) >= max_samples)
        )
        if not groups or full:
            groups.append([])
        groups[-1].append(i)
    return groups
