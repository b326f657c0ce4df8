"""Repeats of a point become one Measurement: their median, their number and their spread."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np

from lab.measurement import Measurement


def collapse(measurements: Iterable[Measurement]) -> list[Measurement]:
    """One measurement for each op and point of the grid, in the order of their first repeats.

    Seconds are the median of the repeats, `spread` reaches from their first to their third quartile. Points without
    a name are the same where their quantities are; of points with a name the quantities are averaged.
    """
    groups: dict[tuple[Any, ...], list[Measurement]] = {}
    for point in measurements:
        what = (point.point,) if point.point else tuple(sorted(point.quantities.items()))
        key = (point.op, point.model, point.device, point.neighbours, point.threads, point.source, what)
        groups.setdefault(key, []).append(point)
    return [_one(same) for same in groups.values()]


def _one(same: list[Measurement]) -> Measurement:
    seconds = [point.seconds for point in same]
    middle = median(seconds)
    low, high = np.quantile(seconds, (0.25, 0.75))
    names = {name for point in same for name in point.quantities}
    return msgspec.structs.replace(
        same[0],
        quantities={name: fmean(point.quantities.get(name, 0.0) for point in same) for name in sorted(names)},
        seconds=middle,
        repeats=len(same),
        spread=float((high - low) / middle) if middle > 0 else 0.0,
    )
