"""Scenario -> Dataflow: which stages an experiment has, on whom, and what each waits for."""

from __future__ import annotations

from collections.abc import Iterator

from lab import evaluation, experience, offline
from lab.dataflow import Dataflow, Edge, Node, check
from lab.judging import one_by_one
from lab.scenario import Scenario
from lab.schedule import batch_samples, num_batches, staleness
from lab.slices import switches

_TEAMS = ("actor.generate", "actor.train", "critic.train", "reference.score", "reward.score")
_SCORES = ("reward", "reference", "value", "old_logprob")


def build(scenario: Scenario) -> Dataflow:
    """The dataflow of a scenario. Raises ValueError for a cycle that can never start."""
    nodes = tuple(_nodes(scenario))
    stages = [node.stage for node in nodes]
    switching, waits = switches(scenario, nodes)
    dataflow = Dataflow(
        nodes={node.name: node for node in (*nodes, *switching)},
        edges=(*_edges(scenario, stages), *waits),
        workers=scenario.workers,
        num_steps=scenario.num_steps * batches(scenario),
    )
    check(dataflow)
    return dataflow


def _nodes(scenario: Scenario) -> Iterator[Node]:
    """In the order of a step."""
    yield from _online(scenario) if scenario.algorithm.rolls_out else offline.nodes(scenario)
    if scenario.checkpoint.every_steps is not None:
        trained = tuple(worker.name for role in scenario.trained for worker in scenario.team(role, "train"))
        role, every = scenario.algorithm.trains[0], scenario.checkpoint.every_steps * batches(scenario)
        yield Node(stage="checkpoint", role=role, workers=trained, output="weights", every=every)
    yield from evaluation.nodes(scenario)


def _online(scenario: Scenario) -> Iterator[Node]:
    """Where the policy generates what it learns from."""
    team = {key: tuple(worker.name for worker in scenario.team(*key.split("."))) for key in _TEAMS}
    free = _continuous(scenario)
    yield Node(stage="rollout", role="actor", workers=team["actor.generate"], output="sample", continuous=free)
    if scenario.experience is not None and not free:
        ahead = scenario.experience.prefetch
        yield Node(stage="transfer", role="actor", workers=team["actor.generate"], output="sample", trailing=ahead)
    one = free and scenario.schedule.scoring == "sample"
    yield Node(stage="reward", role="reward", workers=team["reward.score"], output="sample", continuous=one)
    if scenario.algorithm.needs_reference:
        workers = team["reference.score"]
        yield Node(stage="reference", role="reference", workers=workers, output="sample", continuous=one)
    critic = "critic" in scenario.algorithm.roles
    if critic:
        yield Node(stage="value", role="critic", workers=team["critic.train"], output="sample")
    if scenario.algorithm.recomputes_logprob:
        yield Node(stage="old_logprob", role="actor", workers=team["actor.train"], output="sample")
    yield Node(stage="advantage", role="actor", workers=team["actor.train"][:1], output="batch")
    if critic:
        yield Node(stage="update_critic", role="critic", workers=team["critic.train"], output="weights")
    yield Node(stage="update_actor", role="actor", workers=team["actor.train"], output="weights")
    held = team["actor.train"] + team["actor.generate"]
    yield Node(stage="weight_sync", role="actor", workers=held, output="weights", every=batches(scenario))


def _continuous(scenario: Scenario) -> bool:
    """Whether engines generate without a barrier."""
    return scenario.schedule.mode == "asynchronous"


def batches(scenario: Scenario) -> int:
    """Iterations of the dataflow in one step."""
    return num_batches(scenario.schedule, scenario.workload.samples_per_step)


def _edges(scenario: Scenario, stages: list[str]) -> Iterator[Edge]:
    ahead = 0 if scenario.schedule.mode == "synchronous" else 1
    if scenario.algorithm.rolls_out:
        yield from _samples(scenario, stages, ahead)
        yield from _training(stages)
        yield from _weights(scenario, ahead)
    else:
        yield from offline.edges(stages, ahead)
    yield from evaluation.edges(stages, ahead)
    if "checkpoint" in stages:
        yield from _saving(stages)


def _samples(scenario: Scenario, stages: list[str], ahead: int) -> Iterator[Edge]:
    """From the engines through what scores them to the trainer.

    A head comes after the trunk that it shares; of the best of N, only what the reward chooses is scored by others.
    """
    barrier = scenario.schedule.mode != "asynchronous"
    number = None if barrier else batch_samples(scenario.schedule, scenario.workload.samples_per_step)
    for stage in [stage for stage in _SCORES if stage in stages]:
        first = experience.source(scenario, stage)
        source = "reference" if stage == "reward" and scenario.place.reward_head else first
        chosen = scenario.sampling.best_of > 1 and not (stage == "reference" and scenario.place.reward_head)
        source = "reward" if chosen and stage != "reward" else source
        streams = source != "reward" and one_by_one(scenario, stage)
        yield Edge(source=source, target=stage, unit="sample", capacity=1 + ahead, streams=streams)
        yield Edge(source=stage, target="advantage", unit="sample", capacity=1 + ahead, number=number)
    yield from experience.edges(scenario, stages, ahead)
    if "old_logprob" in stages:
        yield Edge(source="update_actor", target="old_logprob", unit="weights", lag=1)
        yield Edge(source="weight_sync", target="old_logprob", unit="order", lag=1)


def _training(stages: list[str]) -> Iterator[Edge]:
    if "update_critic" in stages:
        yield Edge(source="advantage", target="update_critic", unit="batch", capacity=1)
        yield Edge(source="update_critic", target="value", unit="weights", lag=1)
    yield Edge(source="advantage", target="update_actor", unit="batch", capacity=1)


def _weights(scenario: Scenario, ahead: int) -> Iterator[Edge]:
    """From the trainer to the engines."""
    yield Edge(source="update_actor", target="weight_sync", unit="weights", capacity=1)
    yield Edge(source="weight_sync", target="advantage", unit="order", lag=1)
    lag = _largest_lag(scenario) if _continuous(scenario) else ahead
    yield Edge(source="weight_sync", target="rollout", unit="weights", lag=1 + lag)
    if _continuous(scenario):
        return
    if ahead:
        yield Edge(source="rollout", target="weight_sync", unit="order", lag=-ahead)
    if "critic" in scenario.algorithm.roles:  # the barrier: nobody generates before all of a step is trained
        yield Edge(source="update_critic", target="rollout", unit="order", lag=1 + ahead)


def _largest_lag(scenario: Scenario) -> int:
    """Batches by which samples may be older than the batch that trains them; as many as there are where no bound holds."""
    rule = staleness(scenario.schedule, scenario.workload.samples_per_step)
    return scenario.num_steps * batches(scenario) if rule.at_bound == "down_weight" else rule.largest_lag


def _saving(stages: list[str]) -> Iterator[Edge]:
    """Trained weights to storage; the trainers are held meanwhile."""
    updates = [stage for stage in offline.UPDATES if stage in stages]
    for trained in [stage for stage in ("weight_sync", "update_critic") if stage in stages] or updates:
        yield Edge(source=trained, target="checkpoint", unit="weights")
    for following in [stage for stage in ("advantage", "value", "old_logprob") if stage in stages] or updates:
        yield Edge(source="checkpoint", target=following, unit="order", lag=1)
