"""How many of the placed workers run: they are started and stopped with the depth of their queue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from lab.policies.scaling import Scaling
from lab.records import Record
from lab.units import Seconds

if TYPE_CHECKING:
    from lab.scenario import Scenario

LOSSES = {
    "generate": ("worker_lost", "node_lost", "preempted"),
    "score": ("scorer_lost", "node_lost", "preempted"),
}
"""by work, the faults that may take its workers"""
Scaled = Literal["actor.generate", "reward.score", "reference.score"]
"""works that can be scaled"""


class Scale(Record):
    """Between how many workers, and how quickly. Those that are down hold their devices and do nothing."""

    min: int = Field(default=1, ge=1, description="workers that run from the start")
    max: int | None = Field(default=None, ge=1, description="null: all that are placed")
    start: Seconds | None = Field(
        default=None,
        description="until a worker that is started works; null: what an engine's start costs, of scorers 30 s",
    )
    drain: Seconds | None = Field(
        default=None,
        description="there should be so many that what waits and runs is done in this time; null: 2 × start",
    )
    hold: Seconds | None = Field(
        default=None, description="nobody is stopped within this time after a change; null: 2 × start"
    )
    look: Seconds = Field(default=10.0, gt=0, description="between two looks at the queue")

    def rule(self, num_placed: int, start_s: float) -> Scaling:
        """As the policy takes it."""
        return Scaling(
            num_min=self.min, num_max=self.max or num_placed, start_s=start_s, drain_s=self.drain, hold_s=self.hold
        )


def away(scenario: Scenario) -> frozenset[str]:
    """Workers that are not up when a run begins."""
    found = [scenario.team(*work.split("."))[scale.min :] for work, scale in scenario.scaling.items()]
    return frozenset(worker.name for team in found for worker in team)


def contradictions(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """Where scaling, stealing or over-issue cannot be: key, problem and remedy."""
    for key in (key for key in ("over_issue", "stealing") if getattr(scenario.rollout, key)):
        if not scenario.algorithm.rolls_out:
            yield f"rollout.{key}", f"{scenario.algorithm.name} generates nothing", "remove it"
        if scenario.schedule.mode == "asynchronous":
            problem = "without a barrier an engine is given samples only when it has room"
            yield f"rollout.{key}", problem, "remove it, or another schedule.mode"
    for work, scale in scenario.scaling.items():
        yield from _scaled(scenario, work, scale)


def _scaled(scenario: Scenario, work: Scaled, scale: Scale) -> Iterator[tuple[str, str, str]]:
    key, (role, kind) = f"scaling.{work}", work.split(".")
    workers = scenario.team(role, kind)
    if not workers:
        yield key, f"no {work} is placed", "remove it"
    elif (scale.max or len(workers)) > len(workers):
        yield f"{key}.max", f"{len(workers)} are placed", f"set it to {len(workers)} or less, or place more"
    elif scale.min > (scale.max or len(workers)):
        most = scale.max or len(workers)
        yield f"{key}.min", f"more than the most, {most}", f"set it to {most} or less"
    sharing = [scenario.sharing[worker.pool] for worker in workers if worker.pool in scenario.sharing]
    if any(shared.how == "time_sliced" for shared in sharing):
        yield key, "its devices are used by other works in turns", "give it a pool of its own, or set how to resident"
    placed = scenario.place.reward_score
    if work == "reward.score" and placed is not None and (placed.kind != "model" or placed.shares_trunk):
        yield key, "only a model with devices of its own can be started and stopped", "remove it"
    if kind == "score" and scenario.schedule.scoring != "sample":
        yield key, "a whole batch is scored at once", "set schedule.scoring to sample"
    if kind == "generate" and scenario.evaluate.every_steps is not None:
        yield key, "an evaluation takes all engines", "remove it, or evaluate"
    if any(fault.kind in LOSSES[kind] for fault in scenario.faults):
        yield key, "a worker that fails is not replaced by one that is down", "remove it, or those faults"
