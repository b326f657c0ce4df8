"""Ways of weights to the engines that a real run cannot go: key, problem and remedy."""

from __future__ import annotations

from collections.abc import Iterator

from executor.publishing import fetches
from lab.scenario import Scenario
from lab.slices import slice_of


def limits(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """What the engines that a scenario has cannot do with its weights."""
    turning = [worker.name for worker in scenario.team("actor", "generate") if slice_of(scenario, worker)]
    if turning and fetches(scenario):
        problem = f"{turning[0]} takes turns, and is not there to fetch weights when they are published"
        yield "weight_sync.trigger", problem, "remove it, or place the engines on a pool without turns"
