"""Over-issue with early stop: send out more than is needed, go on when enough came back, abort the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Returns:
    """What came back of what was sent. A unit is a prompt with all its samples, or a sample."""

    num_needed: int
    issued: tuple[int, ...]
    """units that were sent, in order"""
    finished: tuple[int, ...]
    """units that came back, in the order in which they did"""


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """Whether to go on, with what, and what to abort."""

    stop: bool
    keep: tuple[int, ...] = ()
    """the first that came back, as many as are needed"""
    surplus: tuple[int, ...] = ()
    """came back too late; dropped"""
    abort: tuple[int, ...] = ()
    """still running"""


def num_to_issue(num_needed: int, extra: float) -> int:
    """Units to send where `num_needed` must come back: `extra` is the share on top, 0.25 for a quarter more."""
    return num_needed + math.ceil(num_needed * extra - 1e-9)


def early_stop(returns: Returns) -> EarlyStop:
    """Stop as soon as enough came back."""
    needed, finished = returns.num_needed, returns.finished
    if len(finished) < needed:
        return EarlyStop(stop=False)
    return EarlyStop(
        stop=True,
        keep=finished[:needed],
        surplus=finished[needed:],
        abort=_without(returns.issued, finished),
    )


def _without(units: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    gone = set(others)
    return tuple(unit for unit in units if unit not in gone)
