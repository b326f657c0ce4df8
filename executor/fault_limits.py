"""Faults that a real run does not suffer, or not together with something else."""

from __future__ import annotations

from collections.abc import Iterator

from lab.scenario import Scenario

SHORTEST_S = 0.5
"""in which a missing heartbeat can be told from a busy machine"""
OTHER_KINDS = {
    "node_lost": "the machine that would be lost runs the driver too",
    "link_degraded": "no traffic leaves this machine",
    "preempted": "nobody preempts a process here",
}


def limits(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """Faults that are not executed: key, problem and remedy."""
    remedy = "remove it, or simulate the scenario"
    for i, fault in enumerate(scenario.faults):
        key = f"faults[{i}]"
        if fault.kind in OTHER_KINDS:
            yield f"{key}.kind", f"{fault.kind} is not executed: {OTHER_KINDS[fault.kind]}", remedy
        if fault.kind not in ("straggler", *OTHER_KINDS) and fault.detect < SHORTEST_S:
            problem = f"{fault.detect:g} s without a heartbeat say nothing on a busy machine"
            yield f"{key}.detect", problem, f"set it to at least {SHORTEST_S:g} s"
        if fault.recovery == "redundant" and scenario.schedule.mode == "asynchronous":
            problem = "without a barrier every engine generates, and none stands idle"
            yield f"{key}.recovery", problem, "set it to reassign or restart, or simulate the scenario"
        for other, problem in _together(scenario, fault.kind):
            yield other, f"{problem} is not executed together with {key} ({fault.kind})", f"remove it, or {key}"
    turning = [pool for pool, sharing in scenario.sharing.items() if sharing.how == "time_sliced"]
    if scenario.faults and turning:
        yield (
            f"sharing.{turning[0]}.how",
            "workers that take turns are not replaced when they fail",
            "set it to resident",
        )


def _together(scenario: Scenario, kind: str) -> Iterator[tuple[str, str]]:
    """What a kind of fault does not go with yet: key and what it is."""
    continuous = scenario.schedule.mode == "asynchronous"
    if kind == "buffer_lost" and not continuous:
        yield "schedule.mode", "a schedule without a buffer"
    if kind in ("worker_lost", "scorer_lost", "buffer_lost") and scenario.schedule.scoring == "sample":
        yield "schedule.scoring", "scoring sample by sample"
    if kind != "worker_lost":
        return
    if scenario.evaluate.every_steps is not None:
        yield "evaluate.every_steps", "an evaluation"
    if scenario.experience is not None and not continuous:
        yield "experience", "a way of samples of its own"
    if scenario.sampling.beams > 1:
        yield "sampling.beams", "a search"
    if scenario.rollout.over_issue:
        yield "rollout.over_issue", "over-issue"
    if scenario.rollout.stealing:
        yield "rollout.stealing", "work stealing"
    if "actor.generate" in scenario.scaling:
        yield "scaling.actor.generate", "a number of engines that changes"
