"""How each stage of a dataflow runs on its workers.

Samples go from worker to worker as references; only spans and numbers of interest come back to the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from executor.experience import Samples
from executor.workers import HOST, Workers
from lab.dataflow import Dataflow
from lab.dealing import Dealer
from lab.scenario import Scenario

Info = dict[str, Any]
"""`spans`, and where there is something to say `learning`: numbers by name"""


class Stages:
    """Runs stages; keeps references to the samples of steps that are under way."""

    def __init__(self, scenario: Scenario, dataflow: Dataflow, workers: Workers, folder: Path) -> None:
        self.scenario, self.dataflow, self.folder = scenario, dataflow, folder
        self.engines = workers.team("actor", "generate")
        self.trainers = {role: workers.team(role, "train") for role in ("actor", "critic")}
        self.scorers = {role: workers.team(role, "score") for role in ("reference", "reward")}
        self.dealer = Dealer(scenario)
        self._workers = workers
        self._samples: dict[int, Any] = {}
        self._columns: dict[int, list[Any]] = {}
        self._batches: dict[int, Any] = {}

    async def setup(self) -> list[Info]:
        """Every worker builds what it needs; the sender and the engines meet."""
        infos = await _all([actor.ready.remote() for actor in self._workers.actors.values()])
        meeting = (HOST, self._workers.weight_port, 1 + len(self.engines))
        await _all([end.connect.remote(*meeting) for end in (self.trainers["actor"][0], *self.engines)])
        return infos

    async def run(self, stage: str, step: int) -> list[Info]:
        """One stage of one step, on all of its workers."""
        return await STAGES[stage](self, step)

    async def rollout(self, step: int) -> list[Info]:
        version = self.dataflow.policy_version("rollout", step)
        calls = [
            engine.generate.options(num_returns=2).remote(step, version, share.prompts, share.notes)
            for engine, share in zip(self.engines, self.dealer.deal(step), strict=True)
            if share.prompts
        ]
        infos = await _all([info for _, info in calls])
        for info in infos:
            self.dealer.returned(*info.pop("responses"))
        parts = [part for part, _ in calls]
        self._samples[step] = parts[0] if len(parts) == 1 else self.engines[0].merge.remote(*parts)
        return infos

    async def reward(self, step: int) -> list[Info]:
        return await self._scored(step, [self.scorers["reward"][0].score])

    async def reference(self, step: int) -> list[Info]:
        return await self._scored(step, [self.scorers["reference"][0].score])

    async def value(self, step: int) -> list[Info]:
        return await self._scored(step, [rank.values for rank in self.trainers["critic"]])

    async def _scored(self, step: int, methods: list[Any]) -> list[Info]:
        calls = [method.options(num_returns=2).remote(step, self._samples[step]) for method in methods]
        infos = await _all([info for _, info in calls])
        self._columns.setdefault(step, []).extend(columns for columns, _ in calls)
        return infos

    async def advantage(self, step: int) -> list[Info]:
        """Every earlier batch has been used by now, so it is let go."""
        self._batches.clear()
        method = self.trainers["actor"][0].advantage.options(num_returns=2)
        batch, info = method.remote(step, self._samples.pop(step), *self._columns.pop(step))
        self._batches[step] = batch
        return await _all([info])

    async def update_actor(self, step: int) -> list[Info]:
        return await _all([rank.update.remote(step, self._batches[step]) for rank in self.trainers["actor"]])

    async def update_critic(self, step: int) -> list[Info]:
        return await _all([rank.update.remote(step, self._batches[step]) for rank in self.trainers["critic"]])

    async def weight_sync(self, step: int) -> list[Info]:
        """Sends the weights; where rollouts run a version behind, then compares log-probs on a few samples.

        In a synchronous run the first forward pass of every update makes this comparison on the step's own samples.
        """
        sends = [rank.send_weights.remote(step) for rank in self.trainers["actor"]]
        infos = await _all([*sends, *(engine.receive_weights.remote(step) for engine in self.engines)])
        if self.scenario.schedule.mode != "synchronous":
            infos.append({"spans": [], "learning": {"logprob_gap": await self._gap(step)}})
        return infos

    async def _gap(self, step: int) -> float:
        """max |log-prob of the engine - log-prob of the trainer| over a few fresh tokens of every engine."""
        probes = [engine.probe.remote(step) for engine in self.engines]
        theirs = await _all(
            [rank.logprobs.remote(probe) for probe in probes for rank in self.trainers["actor"]]
        )  # every rank takes part in every pass: sharded weights are gathered together
        first = theirs[:: len(self.trainers["actor"])]
        samples: list[Samples] = await _all(probes)
        return max(largest_gap(mine.logprobs, other) for mine, other in zip(samples, first, strict=True))

    async def checkpoint(self, step: int) -> list[Info]:
        ranks = [rank for team in self.trainers.values() for rank in team]
        return await _all([rank.save.remote(self.folder / "checkpoints", step) for rank in ranks])


STAGES: dict[str, Callable[[Stages, int], Awaitable[list[Info]]]] = {
    "rollout": Stages.rollout,
    "reward": Stages.reward,
    "reference": Stages.reference,
    "value": Stages.value,
    "advantage": Stages.advantage,
    "update_critic": Stages.update_critic,
    "update_actor": Stages.update_actor,
    "weight_sync": Stages.weight_sync,
    "checkpoint": Stages.checkpoint,
}


def largest_gap(ours: list[Any], theirs: list[Any]) -> float:
    """max |a - b| over two lists of arrays of the same lengths."""
    return max(float(np.max(np.abs(a - b))) for a, b in zip(ours, theirs, strict=True))


async def _all(references: list[Any]) -> list[Any]:
    """The values of object references; raises as soon as one of them fails."""
    return list(await asyncio.gather(*(_value(reference) for reference in references)))


async def _value(reference: Any) -> Any:
    return await reference
