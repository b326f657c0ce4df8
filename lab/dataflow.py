"""Dataflow: who does what and when it may start, without times.

A marked graph. Iteration k of a node may start when, for every edge into it, iteration k - lag of the source has
ended. A capacity is an edge back: iteration k of the source waits for iteration k - capacity of the target.
Both worlds start one process per node and ask `requirements` what to wait for; `conforms` checks the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lab.placement import Worker
from lab.scenario import Scenario
from lab.timeline import Span, Timeline

SETUP_STAGES = frozenset({"setup", "restore"})


@dataclass(frozen=True, kw_only=True)
class Node:
    """A stage on its workers."""

    stage: str
    """also the node's name"""
    role: str
    """the model it runs"""
    workers: tuple[str, ...]
    """all are held from its start to its end"""
    output: str
    """prompt, sample, batch or weights"""
    every: int = 1
    """it runs on the steps k with (k + 1) % every == 0"""

    def runs(self, step: int) -> bool:
        return (step + 1) % self.every == 0


@dataclass(frozen=True, kw_only=True)
class Edge:
    """What flows from one node to another."""

    source: str
    target: str
    unit: str
    """prompt, sample, batch, weights, or order (nothing flows; a barrier)"""
    lag: int = 0
    """iteration k of the target uses iteration k - lag of the source; negative for a barrier that looks ahead"""
    capacity: int | None = None
    """iterations of output that may wait; None: unbounded"""


@dataclass(frozen=True, kw_only=True)
class Dataflow:
    """Nodes and edges of one scenario."""

    nodes: dict[str, Node]
    edges: tuple[Edge, ...]
    workers: dict[str, Worker]
    num_steps: int

    def steps(self, stage: str) -> Iterator[int]:
        """The steps in which a node runs."""
        return (step for step in range(self.num_steps) if self.nodes[stage].runs(step))

    def requirements(self, stage: str, step: int) -> list[tuple[str, int]]:
        """The (stage, step) pairs that must have ended before this one starts; its own previous run among them."""
        needed = [
            (edge.source, min(step - edge.lag, self.num_steps - 1)) for edge in self.edges if edge.target == stage
        ]
        needed += [
            (edge.target, step - edge.capacity)
            for edge in self.edges
            if edge.source == stage and edge.capacity is not None
        ]
        needed.append((stage, step - self.nodes[stage].every))
        return [(name, k) for name, k in needed if k >= 0 and self.nodes[name].runs(k)]

    def policy_version(self, stage: str, step: int) -> int:
        """Version of the actor behind a stage: rollouts use the last one synchronised, training makes the next."""
        lag = next(edge.lag for edge in self.edges if edge.target == "rollout" and edge.unit == "weights")
        behind = {"rollout", "reward", "reference", "value", "advantage"}
        return max(step + 1 - lag, 0) if stage in behind else step + 1


def build(scenario: Scenario) -> Dataflow:
    """The dataflow of a scenario. Raises ValueError for a cycle that can never start."""
    ppo, reference = scenario.algorithm.name == "ppo", scenario.algorithm.needs_reference
    team = {key: tuple(worker.name for worker in scenario.team(*key.split("."))) for key in _TEAMS}
    nodes = [
        Node(stage="rollout", role="actor", workers=team["actor.generate"], output="sample"),
        Node(stage="reward", role="reward", workers=team["reward.score"], output="sample"),
    ]
    if reference:
        nodes.append(Node(stage="reference", role="reference", workers=team["reference.score"], output="sample"))
    if ppo:
        nodes.append(Node(stage="value", role="critic", workers=team["critic.train"], output="sample"))
    nodes.append(Node(stage="advantage", role="actor", workers=team["actor.train"][:1], output="batch"))
    if ppo:
        nodes.append(Node(stage="update_critic", role="critic", workers=team["critic.train"], output="weights"))
    nodes.append(Node(stage="update_actor", role="actor", workers=team["actor.train"], output="weights"))
    sync = team["actor.train"] + team["actor.generate"]
    nodes.append(Node(stage="weight_sync", role="actor", workers=sync, output="weights"))
    if scenario.checkpoint.every_steps is not None:
        trained = team["actor.train"] + (team["critic.train"] if ppo else ())
        nodes.append(
            Node(
                stage="checkpoint",
                role="actor",
                workers=trained,
                output="weights",
                every=scenario.checkpoint.every_steps,
            )
        )
    dataflow = Dataflow(
        nodes={node.stage: node for node in nodes},
        edges=tuple(_edges([node.stage for node in nodes], scenario.schedule.mode)),
        workers=scenario.workers,
        num_steps=scenario.num_steps,
    )
    check(dataflow)
    return dataflow


_TEAMS = ("actor.generate", "actor.train", "critic.train", "reference.score", "reward.score")


def _edges(stages: list[str], mode: str) -> Iterator[Edge]:
    ahead = 1 if mode == "one_step_off" else 0
    scores = [stage for stage in ("reward", "reference", "value") if stage in stages]
    for stage in scores:
        yield Edge(source="rollout", target=stage, unit="sample", capacity=1 + ahead)
        yield Edge(source=stage, target="advantage", unit="sample", capacity=1 + ahead)
    if "update_critic" in stages:
        yield Edge(source="advantage", target="update_critic", unit="batch", capacity=1)
        yield Edge(source="update_critic", target="value", unit="weights", lag=1)
    yield Edge(source="advantage", target="update_actor", unit="batch", capacity=1)
    yield Edge(source="update_actor", target="weight_sync", unit="weights", capacity=1)
    yield Edge(source="weight_sync", target="advantage", unit="order", lag=1)
    yield Edge(source="weight_sync", target="rollout", unit="weights", lag=1 + ahead)
    if ahead:
        yield Edge(source="rollout", target="weight_sync", unit="order", lag=-ahead)
    if "checkpoint" in stages:
        for trained in [stage for stage in ("weight_sync", "update_critic") if stage in stages]:
            yield Edge(source=trained, target="checkpoint", unit="weights")
        for following in [stage for stage in ("advantage", "value") if stage in stages]:
            yield Edge(source="checkpoint", target=following, unit="order", lag=1)


def check(dataflow: Dataflow) -> None:
    """Raises ValueError where a cycle has no lag, so that no step of it could ever start.

    Bellman–Ford over weights lag × (n + 1) − 1, which are negative around a cycle exactly when its lags sum to ≤ 0.
    """
    links = [(edge.source, edge.target, edge.lag) for edge in dataflow.edges]
    links += [(edge.target, edge.source, edge.capacity) for edge in dataflow.edges if edge.capacity is not None]
    distance = dict.fromkeys(dataflow.nodes, 0)
    changed: list[str] = []
    for _ in range(len(distance) + 1):
        changed = []
        for source, target, lag in links:
            longer = distance[source] + lag * (len(distance) + 1) - 1
            if longer < distance[target]:
                distance[target] = longer
                changed.append(target)
    if changed:
        raise ValueError(f"the dataflow waits for itself without a lag around {', '.join(sorted(set(changed)))}")


def conforms(dataflow: Dataflow, timeline: Timeline) -> list[str]:
    """What in a timeline contradicts the dataflow, one sentence each; empty for a lawful run.

    Times may differ by the clock residual that the timeline's header states.
    """
    slack = timeline.header.clock_residual_s + 1e-9
    stages = [span for span in timeline.spans if not span.op and span.stage not in SETUP_STAGES]
    return [*_instantiates(dataflow, stages), *_ordered(dataflow, stages, slack), *_disjoint(stages, slack)]


def _instantiates(dataflow: Dataflow, spans: list[Span]) -> Iterator[str]:
    for span in spans:
        node = dataflow.nodes.get(span.stage)
        if node is None:
            yield f"{span.span_id}: the dataflow has no stage {span.stage}"
        elif span.worker not in node.workers or not node.runs(span.step):
            yield f"{span.span_id}: {span.stage} does not run on {span.worker} in step {span.step}"
        if span.end_s < span.start_s:
            yield f"{span.span_id}: ends before it starts"


def _ordered(dataflow: Dataflow, spans: list[Span], slack: float) -> Iterator[str]:
    starts: dict[tuple[str, int], float] = {}
    ends: dict[tuple[str, int], float] = {}
    for span in spans:
        key = (span.stage, span.step)
        starts[key] = min(span.start_s, starts.get(key, span.start_s))
        ends[key] = max(span.end_s, ends.get(key, span.end_s))
    for (stage, step), start in starts.items():
        if stage not in dataflow.nodes:
            continue
        for needed in dataflow.requirements(stage, step):
            if needed not in ends:
                yield f"{stage} of step {step} ran without {needed[0]} of step {needed[1]}"
            elif ends[needed] > start + slack:
                yield f"{stage} of step {step} started before {needed[0]} of step {needed[1]} ended"


def _disjoint(spans: list[Span], slack: float) -> Iterator[str]:
    last: dict[str, Span] = {}
    for span in sorted(spans, key=lambda span: (span.resource, span.start_s, span.end_s)):
        before = last.get(span.resource)
        if before is not None and before.end_s > span.start_s + slack:
            yield f"{span.span_id} overlaps {before.span_id} on {span.resource}"
        last[span.resource] = span
