"""When engines take new weights, who sends them to whom, and what becomes of what is being generated."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class WeightsReady:
    """The event that the trainer publishes."""

    version: int
    place: str
    """where the weights lie"""
    digest: str
    """of their bytes"""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one engine knows when it may act."""

    held_version: int
    published_version: int
    """latest that the trainer published, as far as the engine can know under its trigger"""
    since_pull_s: float = 0.0
    """since it last looked and found nothing new, or loaded"""
    num_running: int = 0
    """samples that it is generating"""


@dataclass(frozen=True, kw_only=True)
class Sync:
    """Whether and when weights are taken."""

    trigger: Literal["push", "pull", "event"] = "push"
    """push: the trainer sends on publication; pull: the engine looks every `every_s`; event: it is told and pulls"""
    every_s: float | None = None
    """for pull"""
    in_flight: Literal["drain", "interrupt", "mix"] = "drain"
    """drain: running samples end first; interrupt: they are thrown away; mix: they go on under the new weights"""
    kv: Literal["recompute", "keep"] = "recompute"
    """of samples that go on: compute their KV anew, or keep what the old weights computed"""


Act = Literal["none", "look", "drain", "load"]
"""look: ask for the latest version; drain: take no new sample and ask again when none runs; load: take the weights"""


def due(rule: Sync, seen: Seen) -> Act:
    """What the engine does now."""
    newer = seen.published_version > seen.held_version
    if rule.trigger == "pull" and seen.since_pull_s < (rule.every_s or 0.0):
        return "none"
    if not newer:
        return "look" if rule.trigger == "pull" else "none"
    return "drain" if rule.in_flight == "drain" and seen.num_running else "load"


def next_look(every_s: float, last_s: float, index: int = 0, num_engines: int = 1) -> float:
    """When an engine that last looked at `last_s` looks again; engines are spread evenly over the period."""
    phase = every_s * index / num_engines
    return phase + every_s * (math.floor((last_s - phase) / every_s + 1e-9) + 1)


def wanted(event: WeightsReady, held_version: int) -> bool:
    """Whether an event is news: one that was overtaken, or came twice, is not."""
    return event.version > held_version


@dataclass(frozen=True, kw_only=True)
class Running:
    """A sample that is being generated when weights arrive."""

    sample: int
    prompt_tokens: int
    response_tokens: int
    """generated so far"""


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """What becomes of the running samples."""

    wait_for: tuple[int, ...] = ()
    abort: tuple[int, ...] = ()
    """thrown away and issued again"""
    carry: tuple[int, ...] = ()
    """go on under the new weights; their tokens are from two versions"""
    wasted_tokens: int = 0
    """response tokens that are thrown away"""
    recomputed_tokens: int = 0
    """whose KV is computed anew"""


def in_flight(rule: Sync, running: Sequence[Running]) -> InFlight:
    """What becomes of the samples that run when new weights are there."""
    samples = tuple(one.sample for one in running)
    if rule.in_flight == "drain":
        return InFlight(wait_for=samples)
    tokens = sum(one.prompt_tokens + one.response_tokens for one in running)
    if rule.in_flight == "interrupt":
        return InFlight(abort=samples, wasted_tokens=sum(one.response_tokens for one in running))
    return InFlight(carry=samples, recomputed_tokens=tokens if rule.kv == "recompute" else 0)


@dataclass(frozen=True, kw_only=True)
class Near:
    """Who has the weights, or is fetching them, on one's machine, at one's site, or anywhere."""

    num_holders: int
    free: int | None = None
    """the first of the holders that gives them to nobody now; a store gives them to many"""
    num_fetching: int = 0


def nearest(levels: Sequence[Near]) -> int | None:
    """Which holder one who wants the weights fetches them from; None: wait until somebody has them or is free.

    `levels`: from the nearest to the farthest. A machine takes them from another machine once, and a site from another
    site once; whoever comes later waits for those who are nearer. As every holder serves one at a time, their number
    doubles: ⌈log2(n + 1)⌉ rounds for n.
    """
    for level in levels:
        if level.num_holders:
            return level.free
        if level.num_fetching:
            return None
    return None


SCALE_BYTES = 4.0 / 128
"""of eight-bit weights, per parameter: an fp32 scale for each block of 128 (DeepSeek-V3 report 2024, section 3.3)"""


def payload_bytes(parameters: int, width: float, payload: str, delta_share: float | None = None) -> float:
    """Bytes that are sent of so many parameters of `width` bytes each.

    delta: values of those that changed, and where they are: an index of four bytes each, or a bit for every parameter
    where that is less.
    """
    if payload == "delta":
        share = delta_share or 0.0
        return parameters * (share * width + min(4.0 * share, 0.125))
    return parameters * (1.0 + SCALE_BYTES if payload == "int8" else width)


@dataclass(frozen=True, kw_only=True)
class Barrier:
    """Whether all have acknowledged a version."""

    passed: bool
    timed_out: bool
    absent: tuple[str, ...]
    """who has not acknowledged, in the order in which they were expected"""


def barrier(expected: Sequence[str], acknowledged: Collection[str], waited_s: float, timeout_s: float) -> Barrier:
    """The barrier after a wait. It passes when nobody is absent, however late; else it times out at `timeout_s`."""
    absent = tuple(name for name in expected if name not in acknowledged)
    return Barrier(passed=not absent, timed_out=bool(absent) and waited_s >= timeout_s, absent=absent)
