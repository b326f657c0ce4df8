"""Dataflow: who does what and when it may start, without times.

A marked graph. Iteration k of a node may start when, for every edge into it, iteration k - lag of the source has
ended. A capacity is an edge back: iteration k of the source waits for iteration k - capacity of the target.
Both worlds start one process per node and ask `requirements` what to wait for; `conforms` checks the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lab.placement import Worker
from lab.timeline import Span, Timeline

SETUP_STAGES = frozenset({"setup", "restore"})


@dataclass(frozen=True, kw_only=True)
class Node:
    """A stage on its workers."""

    stage: str
    """also the node's name, unless it has a key"""
    role: str
    """the model it runs"""
    workers: tuple[str, ...]
    """all are held from its start to its end"""
    output: str
    """prompt, sample, batch or weights"""
    every: int = 1
    """it runs on the steps k with (k + 1) % every == 0"""
    continuous: bool = False
    """it works without steps of its own: it takes what comes, and its iteration k ends when batch k is handed on"""

    key: str = ""
    """the name of a node whose stage has several"""
    trailing: bool = False
    """it works beside the stage before it on nobody's time; its spans are of what is left to do when that has ended"""
    leaves: tuple[str, ...] = ()
    """of a switch: the workers that give way; the others take their turn"""

    @property
    def name(self) -> str:
        """Of the node, and the first part of its spans' ids."""
        return self.key or self.stage

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
    number: int | None = None
    """units that an iteration hands on; None: not said"""
    streams: bool = False
    """units go one by one: iteration k of the target may start once that of the source has, and ends after it"""


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
            (edge.source, min(step - edge.lag, self.num_steps - 1))
            for edge in self.edges
            if edge.target == stage and not edge.streams
        ]
        needed += [
            (edge.target, step - edge.capacity)
            for edge in self.edges
            if edge.source == stage and edge.capacity is not None
        ]
        needed.append((stage, step - self.nodes[stage].every))
        return [(name, k) for name, k in needed if k >= 0 and self.nodes[name].runs(k)]

    def streams(self, stage: str, step: int) -> list[tuple[str, int]]:
        """The (stage, step) pairs that hand on their units one by one: they must have started, and end first."""
        return [(edge.source, step) for edge in self.edges if edge.target == stage and edge.streams]

    def hands_on(self, stage: str) -> list[str]:
        """The stages that get a stage's units one by one."""
        return [edge.target for edge in self.edges if edge.source == stage and edge.streams]

    def policy_version(self, stage: str, step: int) -> int:
        """Version of the actor behind a stage: rollouts use the last one synchronised, training makes the next."""
        behind = stage in {"rollout", "reward", "reference", "value", "old_logprob", "advantage"}
        if self.continuous:
            return self.version_at(step) if behind else self.version_at(step + 1)
        return max(step + 1 - self._weights_lag, 0) if behind else step + 1

    @property
    def continuous(self) -> bool:
        """Whether engines generate without a barrier."""
        return "rollout" in self.nodes and self.nodes["rollout"].continuous

    @property
    def _weights_lag(self) -> int:
        return next((edge.lag for edge in self.edges if edge.target == "rollout" and edge.unit == "weights"), 1)

    def version_at(self, step: int) -> int:
        """Version that the trainer has published when it starts an iteration, without a barrier."""
        return step // self.nodes["weight_sync"].every

    @property
    def largest_lag(self) -> int:
        """Versions by which a sample may be older than the trainer's when it is trained, without a barrier."""
        return (self._weights_lag - 1) // self.nodes["weight_sync"].every


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
    free = _batched(dataflow, stages) if dataflow.continuous else ()
    kept = [span for span in stages if not span.lost]
    alone = _disjoint([span for span in timeline.spans if not span.op], slack)
    return [*_instantiates(dataflow, stages), *_ordered(dataflow, kept, slack), *alone, *free]


def _instantiates(dataflow: Dataflow, spans: list[Span]) -> Iterator[str]:
    for span in spans:
        node = dataflow.nodes.get(span.node)
        if node is None:
            yield f"{span.span_id}: the dataflow has no stage {span.stage}"
        elif span.worker not in node.workers or not node.runs(span.step):
            yield f"{span.span_id}: {span.stage} does not run on {span.worker} in step {span.step}"
        if span.end_s < span.start_s:
            yield f"{span.span_id}: ends before it starts"


def _ordered(dataflow: Dataflow, spans: list[Span], slack: float) -> Iterator[str]:
    starts: dict[tuple[str, int], float] = {}
    ends: dict[tuple[str, int], float] = {}
    free = set(dataflow.nodes["rollout"].workers) if dataflow.continuous else set()
    for span in spans:
        if span.node == "weight_sync" and span.worker in free:
            continue  # it takes the weights when it can, and nobody waits for it
        key = (span.node, span.step)
        starts[key] = min(span.start_s, starts.get(key, span.start_s))
        ends[key] = max(span.end_s, ends.get(key, span.end_s))
    again = {
        (span.node, span.step) for span in spans if "~" in span.span_id
    }  # a stage before them may have seen the first
    for (stage, step), start in starts.items():
        if stage not in dataflow.nodes or dataflow.nodes[stage].continuous:
            continue
        for needed in dataflow.requirements(stage, step):
            if dataflow.nodes[needed[0]].continuous:
                continue
            if needed not in ends:
                yield f"{stage} of step {step} ran without {needed[0]} of step {needed[1]}"
            elif ends[needed] > start + slack and (needed[1] <= step or needed not in again):
                yield f"{stage} of step {step} started before {needed[0]} of step {needed[1]} ended"
        for source in dataflow.streams(stage, step):
            late = source in starts and starts[source] > start + slack and not dataflow.nodes[source[0]].trailing
            if source not in starts or late or ends[source] > ends[stage, step] + slack:
                yield f"{stage} of step {step} is not beside and after {source[0]} of step {source[1]}"


def _batched(dataflow: Dataflow, spans: list[Span]) -> Iterator[str]:
    """Without a barrier: whole batches, and no sample older than it may be."""
    number = next((edge.number for edge in dataflow.edges if edge.target == "advantage" and edge.number), None)
    for span in spans:
        if span.stage != "advantage" or "lost" in span.attrs:
            continue
        if number is not None and span.attrs["samples"] != number:
            yield f"{span.span_id}: a batch of {span.attrs['samples']} samples, not of {number}"
        if span.attrs["lag_max"] > dataflow.largest_lag:
            yield f"{span.span_id}: samples lag by {span.attrs['lag_max']} versions, not by at most {dataflow.largest_lag}"


def _disjoint(spans: list[Span], slack: float) -> Iterator[str]:
    last: dict[str, Span] = {}
    for span in sorted(spans, key=lambda span: (span.resource, span.start_s, span.end_s)):
        before = last.get(span.resource)
        if before is not None and before.end_s > span.start_s + slack:
            yield f"{span.span_id} overlaps {before.span_id} on {span.resource}"
        last[span.resource] = span
