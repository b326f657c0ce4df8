"""How the learning rate moves over the optimizer steps of a run."""

from __future__ import annotations

import math
from collections.abc import Callable

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}
"""by name: the share of the full rate, from the share of the steps after the warm-up that are done"""


def learning_rate(full: float, schedule: str, update: int, num_updates: int, num_warmup: int = 0) -> float:
    """Of optimizer step `update`, counted from 0, of a run of `num_updates`.

    It rises linearly over the first `num_warmup`, the last of which has the full rate, and then follows the schedule:
    linear and cosine (Loshchilov and Hutter 2017, equation 5, without restarts) would reach 0 one step after the last.
    Beyond the last step the rate stays what it was at it.
    """
    if update < num_warmup:
        return full * (update + 1) / num_warmup
    falling = max(num_updates - num_warmup, 1)
    done = min(update - num_warmup, falling - 1) / falling
    return full * SHAPES[schedule](done)
