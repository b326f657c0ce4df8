"""How much of a run's time made progress, and how often to save so that most of it does.

Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly, "A higher order estimate of the
optimum checkpoint interval for restart dumps" (2006).
"""

from __future__ import annotations

import math


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
