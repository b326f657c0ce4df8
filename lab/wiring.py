"""Scenario -> Dataflow: which stages an experiment has, on whom, and what each waits for."""

from __future__ import annotations

from collections.abc import Iterator

from lab.dataflow import Dataflow, Edge, Node, check
from lab.scenario import Scenario

_TEAMS = ("actor.generate", "actor.train", "critic.train", "reference.score", "reward.score")
_SCORES = ("reward", "reference", "value")


def build(scenario: Scenario) -> Dataflow:
    """The dataflow of a scenario. Raises ValueError for a cycle that can never start."""
    nodes = tuple(_nodes(scenario))
    stages = [node.stage for node in nodes]
    dataflow = Dataflow(
        nodes={node.stage: node for node in nodes},
        edges=tuple(_edges(scenario, stages)),
        workers=scenario.workers,
        num_steps=scenario.num_steps,
    )
    check(dataflow)
    return dataflow


def _nodes(scenario: Scenario) -> Iterator[Node]:
    """In the order of a step."""
    team = {key: tuple(worker.name for worker in scenario.team(*key.split("."))) for key in _TEAMS}
    yield Node(stage="rollout", role="actor", workers=team["actor.generate"], output="sample")
    yield Node(stage="reward", role="reward", workers=team["reward.score"], output="sample")
    if scenario.algorithm.needs_reference:
        yield Node(stage="reference", role="reference", workers=team["reference.score"], output="sample")
    critic = "critic" in scenario.algorithm.roles
    if critic:
        yield Node(stage="value", role="critic", workers=team["critic.train"], output="sample")
    yield Node(stage="advantage", role="actor", workers=team["actor.train"][:1], output="batch")
    if critic:
        yield Node(stage="update_critic", role="critic", workers=team["critic.train"], output="weights")
    yield Node(stage="update_actor", role="actor", workers=team["actor.train"], output="weights")
    yield Node(
        stage="weight_sync", role="actor", workers=team["actor.train"] + team["actor.generate"], output="weights"
    )
    if scenario.checkpoint.every_steps is not None:
        trained = team["actor.train"] + (team["critic.train"] if critic else ())
        every = scenario.checkpoint.every_steps
        yield Node(stage="checkpoint", role="actor", workers=trained, output="weights", every=every)


def _edges(scenario: Scenario, stages: list[str]) -> Iterator[Edge]:
    ahead = 1 if scenario.schedule.mode == "one_step_off" else 0
    yield from _samples(stages, ahead)
    yield from _training(stages)
    yield from _weights(ahead)
    if "checkpoint" in stages:
        yield from _saving(stages)


def _samples(stages: list[str], ahead: int) -> Iterator[Edge]:
    """From the engines through what scores them to the trainer."""
    for stage in [stage for stage in _SCORES if stage in stages]:
        yield Edge(source="rollout", target=stage, unit="sample", capacity=1 + ahead)
        yield Edge(source=stage, target="advantage", unit="sample", capacity=1 + ahead)


def _training(stages: list[str]) -> Iterator[Edge]:
    if "update_critic" in stages:
        yield Edge(source="advantage", target="update_critic", unit="batch", capacity=1)
        yield Edge(source="update_critic", target="value", unit="weights", lag=1)
    yield Edge(source="advantage", target="update_actor", unit="batch", capacity=1)


def _weights(ahead: int) -> Iterator[Edge]:
    """From the trainer to the engines."""
    yield Edge(source="update_actor", target="weight_sync", unit="weights", capacity=1)
    yield Edge(source="weight_sync", target="advantage", unit="order", lag=1)
    yield Edge(source="weight_sync", target="rollout", unit="weights", lag=1 + ahead)
    if ahead:
        yield Edge(source="rollout", target="weight_sync", unit="order", lag=-ahead)


def _saving(stages: list[str]) -> Iterator[Edge]:
    """Trained weights to storage; the trainers are held meanwhile."""
    for trained in [stage for stage in ("weight_sync", "update_critic") if stage in stages]:
        yield Edge(source=trained, target="checkpoint", unit="weights")
    for following in [stage for stage in ("advantage", "value") if stage in stages]:
        yield Edge(source="checkpoint", target=following, unit="order", lag=1)
