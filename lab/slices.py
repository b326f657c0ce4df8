"""Works that take a pool's devices in turns: who is loaded together, and the turns of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from lab.dataflow import Edge, Node

if TYPE_CHECKING:
    from lab.placement import Worker
    from lab.scenario import Scenario

UNBOUND = frozenset({"advantage", "transfer"})
"""stages that compute on the host: they run in whatever turn they come to, which lasts until they end"""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Stages of a step that find the same works loaded on a pool."""

    slice: str
    stages: tuple[str, ...]


def slice_of(scenario: Scenario, worker: Worker) -> str:
    """The slice of its pool that a worker is loaded in; empty where it stays loaded."""
    sharing = scenario.sharing.get(worker.pool)
    work = "reference.score" if _is_head(scenario, worker) else f"{worker.role}.{worker.work}"
    return sharing.slice_of(work) if sharing and is_loaded(scenario, worker) else ""


def _is_head(scenario: Scenario, worker: Worker) -> bool:
    """Whether a worker is the reward's head on the reference's trunk."""
    return worker.role == "reward" and worker.work == "score" and scenario.place.reward_head


def is_loaded(scenario: Scenario, worker: Worker) -> bool:
    """Whether a worker has a model that takes memory; only a reward may be something else."""
    part = scenario.scored.get(worker.role) if worker.work == "score" else None
    return getattr(part, "kind", "model") == "model"


def turns(scenario: Scenario, pool: str, nodes: Sequence[Node]) -> list[Turn]:
    """In the order of a step; neighbours in the same slice are one turn. Weights are sent in the trainer's turn."""
    found: list[tuple[str, str]] = []
    for node in nodes:
        workers = [scenario.workers[name] for name in node.workers if scenario.workers[name].pool == pool]
        if node.stage in UNBOUND and workers and found:
            found.append((found[-1][0], node.name))
        elif node.stage not in UNBOUND and (name := _slice(scenario, workers)):
            found.append((name, node.name))
    return [
        Turn(slice=name, stages=tuple(stage for _, stage in group))
        for name, group in groupby(found, lambda row: row[0])
    ]


def _slice(scenario: Scenario, workers: Sequence[Worker]) -> str:
    trained = [worker for worker in workers if worker.work == "train"]
    return next((slice_of(scenario, worker) for worker in trained or workers), "")


def switches(scenario: Scenario, nodes: Sequence[Node]) -> tuple[list[Node], list[Edge]]:
    """The switches between the turns of every pool that is sliced, and what waits for them.

    The last turn of a step is followed by the first of the next, in a step of its own or as one turn with it.
    """
    new: list[Node] = []
    edges: list[Edge] = []
    for pool, sharing in scenario.sharing.items():
        found = turns(scenario, pool, nodes) if sharing.how == "time_sliced" else []
        before = ""
        for number, turn in enumerate(found):
            following, lag = (found[number + 1], 0) if number + 1 < len(found) else (found[0], 1)
            if following.slice == turn.slice:
                edges += _handed_on(turn, following, lag)
                continue
            node = _switch(scenario, pool, number, turn.slice, following.slice)
            if not node.workers:
                edges += _handed_on(turn, following, lag)
                edges += _handed_on(turn, found[0], 1) if _same_as_first(found, number + 1) else ()
                continue
            new.append(node)
            ends = [*turn.stages, *([before] if before else [])]
            edges += [Edge(source=stage, target=node.name, unit="order") for stage in ends]
            edges += [Edge(source=node.name, target=stage, unit="order", lag=lag) for stage in following.stages]
            if _same_as_first(found, number + 1):
                edges += [Edge(source=node.name, target=stage, unit="order", lag=1) for stage in found[0].stages]
            before = node.name
    return new, edges


def _same_as_first(found: Sequence[Turn], number: int) -> bool:
    """Whether a turn, as an evaluation which not every step has, ends the step and leaves loaded what the next begins
    with: then that waits by itself for what the turn waits for."""
    return 0 < number == len(found) - 1 and found[number].slice == found[0].slice


def _handed_on(turn: Turn, following: Turn, lag: int) -> Iterator[Edge]:
    """Nothing is moved, but the devices are free only when the turn has ended."""
    if turn is not following or lag:
        for stage in turn.stages:
            yield from (Edge(source=stage, target=other, unit="order", lag=lag) for other in following.stages)


def _switch(scenario: Scenario, pool: str, number: int, leaving: str, coming: str) -> Node:
    """Engines alone move where the others stay loaded."""
    moves = [
        (worker.name, slice_of(scenario, worker))
        for worker in scenario.workers.values()
        if worker.pool == pool and (scenario.sharing[pool].switch != "sleep" or worker.work == "generate")
    ]
    leaves = tuple(name for name, slice in moves if slice == leaving)
    comes = tuple(name for name, slice in moves if slice == coming)
    return Node(
        stage="switch", key=f"switch:{pool}:{number}", role="", workers=leaves + comes, leaves=leaves, output="order"
    )


def spills(scenario: Scenario, leaving: Sequence[Worker]) -> bool:
    """Whether these workers, who give way, write the samples to disk that were just generated, for those who come: the
    pool of the first engine does where everything of it ends."""
    engines = scenario.team("actor", "generate")[:1]
    first = bool(engines) and tuple(leaving[:1]) == engines
    return first and scenario.sharing[leaving[0].pool].switch == "reload"
