"""Scores of samples that are generated without a barrier: each is scored when it ends, by everybody who has to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simulator.scorers import ScoringService, start
from simulator.world import World


class Judges:
    """The scoring services of a run. A sample is judged when all of them have scored it.

    A head on a trunk has its samples from the trunk. Where scoring goes batch by batch there is no service, and a sample
    is judged at once.
    """

    def __init__(self, world: World, judged: Callable[[int], object]) -> None:
        self._world, self._judged = world, judged
        nodes = world.dataflow.nodes
        stages = [stage for stage in ("reward", "reference") if stage in nodes and nodes[stage].continuous]
        self._services = {stage: start(world, stage, world.first_step) for stage in stages}
        self._first = list(self._services.values())
        self._missing: dict[int, int] = {}
        if world.scenario.place.reward_head and len(self._services) == 2:
            self._first = [self._services["reference"]]
            self._services["reference"].on_scored(self._services["reward"].submit)
        for service in self._services.values():
            service.on_scored(self._scored)
            service.begin()

    @property
    def none(self) -> bool:
        """Whether there is no service."""
        return not self._services

    def submit(self, samples: Sequence[int]) -> None:
        """These have all their tokens."""
        if not self._services:
            for sample in samples:
                self._judged(sample)
            return
        self._missing.update(dict.fromkeys(samples, len(self._services)))
        for service in self._first:
            service.submit(samples)

    def hand_on(self, step: int) -> None:
        """The batch of a step is made: its scores are there, and what is scored from now on is for the next one."""
        last = step + 1 == self._world.dataflow.num_steps
        for stage, service in self._services.items():
            self._world.started(stage, step).succeed()
            self._world.finished(stage, step).succeed()
            self._move(service, step, last)

    def _move(self, service: ScoringService, step: int, last: bool) -> None:
        if last:
            service.leave()  # nobody trains on what it would score now
        else:
            service.hand_on(step + 1)

    def _scored(self, samples: list[int]) -> None:
        for sample in samples:
            self._missing[sample] -= 1
            if not self._missing[sample]:
                del self._missing[sample]
                self._judged(sample)
