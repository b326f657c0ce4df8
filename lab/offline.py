"""Stages of algorithms that read their samples from a data set: no engine, no reward, no weights on their way."""

from __future__ import annotations

from collections.abc import Iterator

from lab.dataflow import Edge, Node
from lab.scenario import Scenario

UPDATES = ("update_critic", "update_actor")
"""stages that change weights, in the order of a step"""


def update_of(role: str) -> str:
    """The stage that trains a role: update_actor, or for networks that judge with one number update_critic."""
    return "update_actor" if role == "actor" else "update_critic"


def nodes(scenario: Scenario) -> Iterator[Node]:
    """The frozen reference where one is needed, and the trainer."""
    if scenario.algorithm.needs_reference:
        workers = tuple(worker.name for worker in scenario.team("reference", "score"))
        yield Node(stage="reference", role="reference", workers=workers, output="sample")
    for role in scenario.algorithm.trains:
        workers = tuple(worker.name for worker in scenario.team(role, "train"))
        yield Node(stage=update_of(role), role=role, workers=workers, output="weights")


def edges(stages: list[str], ahead: int) -> Iterator[Edge]:
    """The reference scores the samples that an update is about to use; `ahead` batches beside the one under way."""
    if "reference" in stages:
        [update] = [stage for stage in UPDATES if stage in stages]
        yield Edge(source="reference", target=update, unit="sample", capacity=1 + ahead)


def contradictions(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """Schedules that need a rollout: key, problem and remedy."""
    if scenario.algorithm.rolls_out:
        return
    problem = f"{scenario.algorithm.name} generates nothing"
    if scenario.schedule.mode == "asynchronous":
        yield "schedule.mode", problem, "set it to synchronous or one_step_off"
    if scenario.schedule.scoring == "sample":
        yield "schedule.scoring", problem, "set it to batch"
