"""What a run without a barrier cannot honour: key, problem and remedy."""

from __future__ import annotations

from collections.abc import Iterator

from lab.scenario import Scenario

Refusal = tuple[str, str, str]


def limits(scenario: Scenario) -> Iterator[Refusal]:
    """Only of scenarios whose engines generate without a barrier."""
    if scenario.schedule.mode != "asynchronous":
        return
    if scenario.schedule.scoring == "sample" and scenario.place.reward_head:
        problem = "a head takes what its trunk found of a whole batch"
        yield "schedule.scoring", problem, "set it to batch, or simulate the scenario"
    if scenario.sampling.decides:
        key = "bandit" if scenario.sampling.bandit is not None else "entropy"
        problem = "it learns from one step after the other, and engines begin samples of many steps side by side"
        yield f"sampling.{key}", problem, "remove it, or set another schedule.mode"
    if scenario.experience is not None and scenario.experience.transport != "object_store":
        problem = f"without a barrier messages go through the object store, not by {scenario.experience.transport}"
        yield "experience.transport", problem, "set it to object_store, or simulate the scenario"
