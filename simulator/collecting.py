"""The experience buffer in virtual time: `lab.collecting`, with events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simpy

from lab import collecting
from lab.collecting import Group as Group
from lab.collecting import Made
from lab.fates import VERSION
from lab.schedule import staleness as rule_of
from simulator.world import World


class Collecting(collecting.Collecting):
    """The buffer of a run."""

    def __init__(self, world: World, freed: Callable[[], None]) -> None:
        """`freed` is called when samples left, so that others may be issued."""
        super().__init__(world.scenario, world.ledger, freed, world.first_step)
        self._world = world
        self._arrival: simpy.Event | None = None
        self.turned = world.turned

    def arrival(self) -> simpy.Event:
        """The event that another group is complete, and enough of them are for a batch."""
        self._arrival = self._world.env.event()
        return self._arrival

    def _arrived(self) -> None:
        if self._arrival is not None:
            arrived, self._arrival = self._arrival, None
            arrived.succeed()

    def decide(self) -> tuple[Made, list[int]]:
        """As of any buffer; the world remembers it."""
        decision, versions = super().decide()
        self._world.decided["rollout", self.next] = decision
        return decision, versions


def ages(world: World, step: int) -> dict[str, Any]:
    """What the span of a batch's advantages says of its age where there is no barrier."""
    if not world.dataflow.continuous:
        return {}
    rule = rule_of(world.scenario.schedule, world.scenario.workload.samples_per_step)
    versions = world.ledger.column(VERSION)[world.ledger.batches[step]]
    newest, decision = world.dataflow.version_at(step), world.decided["rollout", step]
    return collecting.ages(rule, step, newest, versions, decision, world.turned[step])
