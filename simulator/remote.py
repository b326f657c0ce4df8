"""Many calls of one service elsewhere, of which only so many may be under way together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lab.compiled import compiled


def makespan(seconds: NDArray[np.float64], concurrency: int) -> float:
    """When the last of these calls has its answer: each goes out, in order, as soon as fewer than so many are under way."""
    free = np.zeros(max(min(concurrency, len(seconds)), 1))
    _go_out(free, seconds)
    return float(free.max())


@compiled
def _go_out(free: NDArray[np.float64], seconds: NDArray[np.float64]) -> None:
    """`free` is a heap of the times at which the places are free: the first is the earliest."""
    for call in range(len(seconds)):
        free[0] += seconds[call]
        place, least = -1, 0
        while place != least:
            place = least
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(free) and free[child] < free[least]:
                    least = child
            free[place], free[least] = free[least], free[place]
