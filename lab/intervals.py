"""Sets of time intervals: unions, and how time divides among what is active in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order that cover the same time."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The parts of intervals inside a window."""
    low, high = window
    return [(max(start, low), min(end, high)) for start, end in intervals if end > low and start < high]


def without(interval: Interval, parts: Iterable[Interval]) -> list[Interval]:
    """What is left of an interval outside of these parts of it."""
    left, at = list[Interval](), interval[0]
    for start, end in union(parts):
        left.append((at, start))
        at = end
    return [(start, end) for start, end in (*left, (at, interval[1])) if end > start]


def length(intervals: Iterable[Interval]) -> float:
    """Time that intervals cover together."""
    return sum(end - start for start, end in union(intervals))


def divide(active: Mapping[str, Sequence[Interval]], window: Interval) -> tuple[dict[str, float], list[Interval]]:
    """Seconds of a window by name, every instant shared equally by the names active in it; and the gaps, where none is.

    The shares and the gaps add up to the window.
    """
    shares = dict.fromkeys(active, 0.0)
    edges = [(time, change, name) for name, parts in active.items() for start, end in union(clip(parts, window))
             for time, change in ((start, 1), (end, -1))]  # fmt: skip
    now, last, gaps = set[str](), window[0], list[Interval]()
    for time, change, name in sorted(edges, key=lambda edge: (edge[0], edge[1])):
        if time > last:
            for other in now:
                shares[other] += (time - last) / len(now)
            if not now:
                gaps.append((last, time))
            last = time
        (now.add if change > 0 else now.discard)(name)
    if window[1] > last:
        gaps.append((last, window[1]))
    return shares, gaps
