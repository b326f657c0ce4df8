"""Which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Reason = Literal["latest", "best", "milestone", "recovery", "in_use", "being_written"]


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What must be kept; anything else goes."""

    latest: int = 1
    """so many of the last ones"""
    best: int = 0
    """so many with the highest score"""
    milestone_every: int | None = None
    """those after every so many steps, counted as the intervals of checkpoints are: steps count from 0"""
    recovery: bool = True
    """the last one from which training can go on exactly: weights, optimizer, random state and place in the data"""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One that lies in storage."""

    step: int
    score: float | None = None
    """of the evaluation at this step; higher is better; None: not evaluated"""
    complete: bool = True
    """whether its write has ended and was verified"""
    resumable: bool = True
    """whether training can go on from it; not so where only weights were saved"""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What is kept, why, and what goes."""

    keep: dict[int, tuple[Reason, ...]]
    """step to its reasons, in order of steps"""
    delete: tuple[int, ...]


def kept(rule: Retention, checkpoints: Sequence[Checkpoint], in_use: Collection[int] = ()) -> Kept:
    """Which steps' checkpoints are kept. `in_use`: steps that somebody is reading.

    An incomplete checkpoint is never counted. It is left alone while it is newer than all complete ones, for then it is
    being written; an older one is what a failed write left, and goes.
    """
    reasons: dict[int, list[Reason]] = {one.step: [] for one in sorted(checkpoints, key=lambda one: one.step)}
    for step, reason in _reasons(rule, checkpoints, in_use):
        reasons[step].append(reason)
    return Kept(
        keep={step: tuple(found) for step, found in reasons.items() if found},
        delete=tuple(step for step, found in reasons.items() if not found),
    )


def _reasons(
    rule: Retention, checkpoints: Sequence[Checkpoint], in_use: Collection[int]
) -> Iterator[tuple[int, Reason]]:
    complete = sorted((one for one in checkpoints if one.complete), key=lambda one: -one.step)
    scored = [one for one in complete if one.score is not None]
    yield from ((one.step, "latest") for one in complete[: rule.latest])
    yield from ((one.step, "best") for one in sorted(scored, key=lambda one: -(one.score or 0.0))[: rule.best])
    if rule.milestone_every:
        yield from ((one.step, "milestone") for one in complete if (one.step + 1) % rule.milestone_every == 0)
    if rule.recovery:
        yield from ((one.step, "recovery") for one in [one for one in complete if one.resumable][:1])
    yield from ((one.step, "in_use") for one in complete if one.step in in_use)
    newest = complete[0].step if complete else -1
    yield from ((one.step, "being_written") for one in checkpoints if not one.complete and one.step > newest)
