"""When engines take new weights, who sends them to whom, and what becomes of what is being generated."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
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

    trigger: Literal["push", "pull", "event"] = "event"
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


Send = tuple[int, int]
"""(from, to); 0 is the trainer, 1 … num_engines are engines"""


def flat(num_engines: int) -> list[list[Send]]:
    """One round: the trainer sends to everybody at once, and all share its link."""
    return [[(0, engine) for engine in range(1, num_engines + 1)]] if num_engines else []


def tree(num_engines: int) -> list[list[Send]]:
    """Whoever has the weights sends them to one who has not: ⌈log2(num_engines + 1)⌉ rounds (a binomial tree)."""
    rounds, num_holders = list[list[Send]](), 1
    while num_holders <= num_engines:
        reached = min(2 * num_holders, num_engines + 1)
        rounds.append([(node - num_holders, node) for node in range(num_holders, reached)])
        num_holders = reached
    return rounds


def pulled(num_engines: int) -> list[list[Send]]:
    """Every engine fetches by itself from where the weights lie (place 0)."""
    return flat(num_engines)


TOPOLOGIES: dict[str, Callable[[int], list[list[Send]]]] = {"flat": flat, "tree": tree, "pulled": pulled}
"""by name: the sends of each round, for a number of engines; a send may start when its sender has the weights"""


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
