"""When a scoring service's batch leaves, which answers are known already, and how long others take to give theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lab.workload import spread_of, uniform

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_CACHE, _LATENCY, _ANGLE, _FAILURE = 11, 12, 13, 14
"""streams of `lab.workload.uniform`: its own draws have 1 to 4"""


@dataclass(frozen=True, kw_only=True)
class Batching:
    """What one forward pass may hold, and how long its first sample may wait for others."""

    max_samples: int
    max_tokens: int | None = None
    """padded: samples × longest; None: no limit"""
    max_wait_s: float = 0.0


def fitting(rule: Batching, lengths: Sequence[int]) -> int:
    """How many of the waiting samples, the oldest first, one batch holds; at least the first of them."""
    longest = 0
    for number, length in enumerate(lengths[: rule.max_samples]):
        longest = max(longest, length)
        if number and rule.max_tokens is not None and (number + 1) * longest > rule.max_tokens:
            return number
    return min(len(lengths), rule.max_samples)


def leaving(rule: Batching, lengths: Sequence[int], waited_s: float, *, more: bool = True) -> int:
    """How many samples leave now; 0 to wait.

    A batch leaves when it is full, when its oldest sample has waited `max_wait_s`, or when no `more` can come.
    """
    if not lengths:
        return 0
    held = fitting(rule, lengths)
    full = held == rule.max_samples or held < len(lengths)
    return held if full or not more or waited_s >= rule.max_wait_s else 0


def known(hit_share: float | Floats, seed: int, step: Ints, index: Ints) -> Bools:
    """Which samples a cache knows, each with the chance `hit_share`; depends on seed, step and index in it alone."""
    return np.asarray(uniform(seed, _CACHE, step, index, 0) < hit_share)


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A service elsewhere that is called once for every batch."""

    latency_s: float
    """mean"""
    p95_s: float | None = None
    """95th percentile of lognormal latencies; None: all take the mean"""
    timeout_s: float = math.inf
    """an answer that takes longer counts as none"""
    failure_share: float = 0.0
    """answers that are errors"""
    retries: int = 0
    """further attempts, each at once after the one that failed"""


@dataclass(frozen=True, kw_only=True)
class Calls:
    """How calls of a remote service end; one entry each.

    Attributes:
        seconds: until the answer, or until nobody tries again.
        attempts: 1 or more.
        answered: whether an answer came.
    """

    seconds: Floats
    attempts: Ints
    answered: Bools


def calls(rule: Remote, seed: int, step: Ints, index: Ints) -> Calls:
    """Calls for batches whose first samples have these steps and indices; they depend on the seed and these alone."""
    seconds, attempts = np.zeros(index.shape), np.zeros(index.shape, np.int64)
    answered = np.zeros(index.shape, np.bool_)
    for attempt in range(rule.retries + 1):
        took = _latency(rule, seed, step, index, attempt)
        good = (took <= rule.timeout_s) & (uniform(seed, _FAILURE, step, index, attempt) >= rule.failure_share)
        seconds += np.where(answered, 0.0, np.minimum(took, rule.timeout_s))
        attempts += ~answered
        answered |= good
    return Calls(seconds=seconds, attempts=attempts, answered=answered)


def _latency(rule: Remote, seed: int, step: Ints, index: Ints, attempt: int) -> Floats:
    """Lognormal; see `lab.workload.Lognormal`, whose mean and 95th percentile mean the same."""
    if rule.p95_s is None:
        return np.full(index.shape, rule.latency_s)
    sigma = spread_of(rule.latency_s, rule.p95_s)
    radius = np.sqrt(-2 * np.log(uniform(seed, _LATENCY, step, index, attempt)))
    normal = radius * np.cos(2 * np.pi * uniform(seed, _ANGLE, step, index, attempt))
    return np.asarray(np.exp(math.log(rule.latency_s) - sigma**2 / 2 + sigma * normal))
