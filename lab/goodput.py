"""How much of a run's time made progress, and how often to save so that most of it does.

Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly, "A higher order estimate of the
optimum checkpoint interval for restart dumps" (2006).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lab.intervals import Interval, clip, length, union, without
from lab.timeline import Timeline


def young(write_s: float, mtbf_s: float) -> float:
    """Seconds of work between two checkpoints that cost `write_s` each: √(2 δ M)."""
    return math.sqrt(2 * write_s * mtbf_s)


def daly(write_s: float, mtbf_s: float) -> float:
    """Daly's estimate of the same, eq. 37; as long as the time between failures where a write takes half of it or more."""
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    share = write_s / (2 * mtbf_s)
    return young(write_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - write_s


def expected_seconds(work_s: float, interval_s: float, write_s: float, mtbf_s: float, restart_s: float) -> float:
    """Mean wall seconds of so much work under failures that follow a Poisson process, Daly's eq. 20.

    After every `interval_s` of work a write; after a failure, `restart_s` and the work since the last write anew.
    Failures may hit writes and restarts too.
    """
    segments = work_s / interval_s
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + write_s) / mtbf_s) * segments


def system_mtbf(rates: dict[float, int]) -> float | None:
    """Mean seconds between failures of a whole: `rates` counts its parts by the mean time of each. None without any."""
    rate = sum(number / each for each, number in rates.items())
    return 1 / rate if rate else None


def goodput(timeline: Timeline, makespan_s: float) -> float:
    """Share of a run's time that made progress, from 0 to 1: 1 − (lost + held + away) / makespan.

    lost: seconds since the state that the run went back to, and until it went on. held: seconds in which nothing but a
    checkpoint went on. away: of the other seconds, the share of all devices whose workers come back from a fault by
    themselves. Left out: that the others wait for them, the samples that went with an engine (`tokens.lost`), and what
    stragglers and degraded links cost; the makespan beside that of a run without faults tells all of it.
    """
    gone = union([*lost(timeline), *held(timeline)])
    lanes, devices = timeline.header.lanes, {name for pool in timeline.header.pools.values() for name in pool}
    num_workers = {name: sum(name in lane.devices for lane in lanes.values()) for name in devices}
    away = 0.0
    for span in timeline.stages():
        if span.stage == "restore":
            own = (span.start_s, span.end_s)
            parts = without(own, clip(gone, own))
            away += length(parts) * sum(1 / num_workers[name] for name in lanes[span.worker].devices if name in devices)
    share = length(clip(gone, (0.0, makespan_s))) + (away / len(devices) if devices else 0.0)
    return min(max(1 - share / makespan_s, 0.0), 1.0)


def lost(timeline: Timeline) -> list[Interval]:
    """When the run did what a fault undid, or stood still after one."""
    return union((fault["from_s"], fault["until_s"]) for fault in timeline.header.faults if "from_s" in fault)


def held(timeline: Timeline) -> list[Interval]:
    """When nothing but checkpoints went on, lost work and lost checkpoints left out."""
    writes = [(span.start_s, span.end_s) for span in timeline.stages() if span.stage == "checkpoint"]
    others = [span for span in [*timeline.stages(), *timeline.lost()] if span.stage != "checkpoint"]
    busy: Sequence[Interval] = [*((span.start_s, span.end_s) for span in others), *lost(timeline)]
    return [part for write in union(writes) for part in without(write, clip(busy, write))]
