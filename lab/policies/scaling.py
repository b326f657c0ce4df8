"""How many workers to keep, from the depth of their queue."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The limits and the hysteresis."""

    num_min: int
    num_max: int
    start_s: float
    """from the decision until a new worker works"""
    drain_s: float | None = None
    """there should be so many that what waits and runs is done in this time; null: twice `start_s`"""
    hold_s: float | None = None
    """nobody is stopped within this time after a change; null: twice `start_s`"""

    @property
    def drain_seconds(self) -> float:
        """`drain_s`, at least a millisecond."""
        return max(2 * self.start_s if self.drain_s is None else self.drain_s, 1e-3)

    @property
    def hold_seconds(self) -> float:
        return 2 * self.start_s if self.hold_s is None else self.hold_s


@dataclass(frozen=True, kw_only=True)
class Depth:
    """What is to be done and who does it."""

    num_queued: int
    """units of work that wait"""
    num_running: int
    rate: float
    """units that one worker finishes per second, from the ledger; 0 where none was finished yet"""
    num_ready: int
    num_starting: int = 0
    since_change_s: float = math.inf
    """since workers were last started or stopped"""

    @property
    def num_workers(self) -> int:
        return self.num_ready + self.num_starting


@dataclass(frozen=True, kw_only=True)
class Target:
    """How many there should be."""

    num_workers: int
    """with those that are starting"""
    change: int
    """workers to start, or to stop where it is negative"""
    why: Literal["limits", "unknown_rate", "backlog", "idle", "too_soon", "not_worth_it", "enough"]


def target(rule: Scaling, depth: Depth) -> Target:
    """Grow when the backlog outlives a start, shrink when half the time would do and nothing changed for a while.

    Between the number that drains the work in time and the one that drains it in half the time nothing changes, so a
    steady load never makes the number swing.
    """
    now = min(max(depth.num_workers, rule.num_min), rule.num_max)
    if now != depth.num_workers:
        return _target(depth, now, "limits")
    if not depth.rate:
        return _target(depth, now, "unknown_rate")
    work_s = (depth.num_queued + depth.num_running) / depth.rate
    enough = _within(rule, math.ceil(work_s / rule.drain_seconds - 1e-9))
    plenty = _within(rule, math.ceil(2 * work_s / rule.drain_seconds - 1e-9))
    if now < enough:
        pays = not now or work_s / now > rule.start_s
        return _target(depth, enough, "backlog") if pays else _target(depth, now, "not_worth_it")
    if now <= plenty:
        return _target(depth, now, "enough")
    rested = depth.since_change_s >= rule.hold_seconds and not depth.num_starting
    return _target(depth, plenty, "idle") if rested else _target(depth, now, "too_soon")


def _within(rule: Scaling, num: int) -> int:
    return min(max(num, rule.num_min), rule.num_max)


def _target(
    depth: Depth,
    num: int,
    why: Literal["limits", "unknown_rate", "backlog", "idle", "too_soon", "not_worth_it", "enough"],
) -> Target:
    return Target(num_workers=num, change=num - depth.num_workers, why=why)
