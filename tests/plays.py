"""Whole simulations with the world that they leave behind, for laws that look behind the timeline."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from lab.fates import INDEX, STEP
from lab.scenario import Scenario
from lab.timeline import Span, Timeline
from lab.wiring import build
from profiles.cost import CostModel
from profiles.profile import Profile, datasheet
from simulator import run
from simulator.world import World

SHEETS = {device: datasheet(device) for device in ("cpu-core", "a100-80g-sxm", "l40s")}
FATES = ("trained", "dropped", "aborted", "lost", "buffered", "in_flight")
SLACK = 1e-9
"""relative to the length of a run"""


@dataclass(frozen=True)
class Played:
    """A simulation that has ended."""

    scenario: Scenario
    world: World
    timeline: Timeline

    def stages(self, *names: str) -> list[Span]:
        return [span for span in self.timeline.stages() if span.stage in names]

    def stages_all(self) -> list[Span]:
        """Stage spans, with those that a fault undid and set-up."""
        return [span for span in self.timeline.spans if not span.op]

    @property
    def makespan(self) -> float:
        return max(span.end_s for span in self.timeline.stages())

    @property
    def samples(self) -> dict[str, int]:
        return self.timeline.header.samples


def fresh(scenario: Scenario, profiles: dict[str, Profile] | None = None) -> World:
    return World(scenario, build(scenario), CostModel(scenario, profiles or SHEETS))


def play(scenario: Scenario, profiles: dict[str, Profile] | None = None) -> Played:
    """What `simulate` does; the world is kept."""
    worlds = list[World]()

    def world(*parts: Any) -> World:
        worlds.append(World(*parts))
        return worlds[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "World", world)
        timeline = run.simulate(scenario, profiles or SHEETS)
    return Played(scenario, worlds[0], timeline)


def start(world: World) -> None:
    """Starts a simulation without faults, which then is played as far as one likes."""
    run._start(world)


def ended_by(played: Played, time: float, stages: str) -> set[int]:
    """Steps in which all stages whose names begin so had ended."""
    spans = [span for span in played.timeline.stages() if span.stage.startswith(stages)]
    return {span.step for span in spans} - {span.step for span in spans if span.end_s > time}


def overlaps(spans: Iterable[Span], slack: float) -> list[tuple[str, str]]:
    """Pairs of neighbours on one resource that are there at the same time."""
    by_resource: dict[str, list[Span]] = {}
    for span in spans:
        by_resource.setdefault(span.resource, []).append(span)
    found = []
    for own in by_resource.values():
        own.sort(key=lambda span: (span.start_s, span.end_s))
        found += [(a.span_id, b.span_id) for a, b in pairwise(own) if a.end_s > b.start_s + slack]
    return found


def drawn_for(world: World, step: int) -> list[tuple[int, int]]:
    """What a batch is of: step and place in it that each sample was drawn for."""
    numbers = world.ledger.batches[step]
    return list(zip(*(world.ledger.column(column)[numbers].tolist() for column in (STEP, INDEX)), strict=True))


def num_batches(played: Played) -> int:
    return played.world.dataflow.num_steps


def batches(world: World) -> list[np.ndarray]:
    return [world.ledger.batches[step] for step in sorted(world.ledger.batches)]
