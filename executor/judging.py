"""The scorers of a run as its driver calls them: all of a step at once, or one by one beside the engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from executor.calls import values
from executor.crew import lead
from executor.ended import Ended
from lab.dataflow import Dataflow

Info = dict[str, Any]


class Judges:
    """Scoring stages on their workers. Which of them score samples as they come is the dataflow's to say."""

    def __init__(self, dataflow: Dataflow, scorers: Mapping[str, Sequence[Any]], *, head: bool) -> None:
        """`scorers`: actors by stage. `head`: the reward is a head on the reference's trunk."""
        self._dataflow, self._scorers, self._head = dataflow, scorers, head
        self._ended = Ended(dataflow)
        self._led = set[str]()
        """stages whose first worker hands batches on to the others"""
        self.now: Callable[[], float] = time.monotonic
        """the clock of the run"""

    async def begin(self, scaled: Collection[str]) -> None:
        """All workers are ready; `scaled`: the stages whose workers start and stop."""
        self._led = set(scaled)
        for stage in scaled:
            first, *others = self._scorers[stage]
            await first.__ray_call__.remote(lead, others)

    def _team(self, stage: str) -> Sequence[Any]:
        """The workers of a stage that samples are handed to."""
        return self._scorers.get(stage, ())[:1] if stage in self._led else self._scorers.get(stage, ())

    @property
    def sinks(self) -> list[Any]:
        """Actors that engines hand every sample to as soon as it has ended."""
        return self.takers("rollout")

    def takers(self, source: str) -> list[Any]:
        """Actors that a stage hands every sample to as soon as it is through with it."""
        if source not in self._dataflow.nodes:
            return []
        return [actor for stage in self._dataflow.hands_on(source) for actor in self._team(stage)]

    def ended(self, stage: str, step: int) -> None:
        """A stage of a step has ended on all of its workers."""
        if self._dataflow.hands_on(stage):
            self._ended.add(stage, step)

    async def sources_ended(self, stage: str, step: int) -> None:
        """What hands its samples on to this stage one by one has handed on all of a step."""
        for source in self._dataflow.streams(stage, step):
            await self._ended.wait(*source)

    async def score(self, stage: str, step: int, samples: Mapping[int, Any]) -> tuple[list[Any], list[Info]]:
        """One reference to columns for each worker, and what they report. `samples`: references by step, once there."""
        team = self._team(stage)
        if {"rollout", "transfer"} & {source for source, _ in self._dataflow.streams(stage, step)}:
            version = self._dataflow.policy_version(stage, step)
            await values([worker.open.remote(step, version, self.now()) for worker in team])
            await self.sources_ended(stage, step)
            calls = [worker.collect.options(num_returns=2).remote(step, samples[step]) for worker in team]
        else:
            await self.sources_ended(stage, step)
            trunks = [[trunk.trunk.remote(step)] for trunk in self._trunks(stage)] or [[]] * len(team)
            calls = [
                worker.score.options(num_returns=2).remote(step, samples[step], *left)
                for worker, left in zip(team, trunks, strict=True)
            ]
        infos = await values([info for _, info in calls])
        return [columns for columns, _ in calls], infos

    def _trunks(self, stage: str) -> Sequence[Any]:
        return self._scorers["reference"] if stage == "reward" and self._head else ()
