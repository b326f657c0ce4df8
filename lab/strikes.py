"""When faults strike: the times that a scenario states, or draws from its seed. Both worlds go by them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lab.faults import Fault
from lab.scenario import Scenario
from lab.targets import hit
from lab.workload import uniform

DRAWS = 11
"""what the draws of faults are told apart by from all other draws"""
_SIGNALS = 80
"""stream of what is done to a process"""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault at one time, or the end of what it did."""

    at: float
    """seconds after time zero"""
    entry: int
    """place in the scenario's faults"""
    fault: Fault
    target: str
    ends: bool = False


def times(scenario: Scenario, entry: int, place: int, fault: Fault) -> Iterator[float]:
    """When a fault hits a target: once, or as a Poisson process. `place`: of the target among those of the entry."""
    if fault.at is not None:
        yield fault.at
        return
    assert fault.mtbf is not None, "one of the two is given"
    draws, at = np.random.default_rng((scenario.seed, DRAWS, entry, place)), 0.0
    while True:
        at += float(draws.exponential(fault.mtbf))
        yield at


def strikes(scenario: Scenario) -> Iterator[Strike]:
    """All strikes of a run in the order of their times; without end where one has a mean time between failures."""
    every = [
        _strikes(scenario, entry, place, target)
        for entry, fault in enumerate(scenario.faults)
        for place, target in enumerate(hit(scenario, fault))
    ]
    return heapq.merge(*every, key=lambda strike: strike.at)


def _strikes(scenario: Scenario, entry: int, place: int, target: str) -> Iterator[Strike]:
    fault = scenario.faults[entry]
    for at in times(scenario, entry, place, fault):
        yield Strike(at=at, entry=entry, fault=fault, target=target)


def missed(scenario: Scenario, end_s: float) -> list[Strike]:
    """What is stated for a time that a run of so many seconds did not reach."""
    return [strike for strike in _stated(scenario) if strike.at > end_s]


def _stated(scenario: Scenario) -> Iterator[Strike]:
    for entry, fault in enumerate(scenario.faults):
        if fault.at is not None:
            for target in hit(scenario, fault):
                yield Strike(at=fault.at, entry=entry, fault=fault, target=target)


def hangs(scenario: Scenario, entry: int, number: int) -> bool:
    """Whether a process that is struck only stops (SIGSTOP), and does not end (SIGKILL): drawn from the seed.

    `number`: of the entry's strikes before this one. Either way nobody hears of it any more.
    """
    return bool(uniform(scenario.seed, _SIGNALS, entry, np.asarray(number, dtype=np.int64), 0) < 0.5)
