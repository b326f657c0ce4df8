"""How each stage of a dataflow runs on its workers.

Samples go from worker to worker as references; only spans and numbers of interest come back to the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from executor import judgement, parcel
from executor.checkpoint import staging
from executor.earlier import CHECKPOINTS, Earlier
from executor.evaluating import Evaluation
from executor.experience import Samples
from executor.judging import Judges
from executor.offline import Reading, scored
from executor.recording import Recording
from executor.sampling import Decisions, keep_best
from executor.switching import Switching
from executor.workers import HOST, Workers
from lab.dataflow import Dataflow
from lab.dealing import Dealer
from lab.offline import UPDATES
from lab.scenario import Scenario

Info = dict[str, Any]
"""`spans`, and where there is something to say `learning`: numbers by name"""


class Stages:
    """Runs stages; keeps references to the samples of steps that are under way."""

    def __init__(self, scenario: Scenario, dataflow: Dataflow, workers: Workers, folder: Path) -> None:
        self.scenario, self.dataflow, self.folder = scenario, dataflow, folder
        self.engines = workers.team("actor", "generate")
        self.trainers = {role: workers.team(role, "train") for role in ("actor", "critic", "reward")}
        self.scorers = {role: workers.team(role, "score") for role in ("reference", "reward")}
        self.judges = Judges(dataflow, self.scorers, head=scenario.place.reward_head)
        self.dealer = Dealer(scenario)
        self.decisions = Decisions(scenario)
        self.recording = Recording(scenario, folder)
        judged = self.trainers.get(scenario.algorithm.trains[0], [])
        self.evaluation = Evaluation(scenario, folder, self.engines, judged, self.scorers)
        self.reading = None if scenario.algorithm.rolls_out else Reading(scenario)
        """of the data set, where samples come from one"""
        self.attempt = 0
        """attempts at the run before this one"""
        self.switching = Switching(scenario, dataflow, workers.actors, folder)
        self._workers = workers
        self._samples: dict[int, Any] = {}
        self._rolled: dict[int, Any] = {}
        """as the engines left them, until they are trained"""
        self._columns: dict[int, list[Any]] = {}
        self._batches: dict[int, Any] = {}
        self._ended: set[tuple[str, int]] = set()
        self._begun: dict[tuple[str, int], asyncio.Future[list[Info]]] = {}
        self._after: dict[tuple[str, int], list[Any]] = {}
        """references to what calls of a stage wait for, where it has begun ahead"""

    async def setup(self) -> list[Info]:
        """Every worker builds what it needs; the sender and the engines meet."""
        infos = await self.switching.ready()
        if self.engines:
            await self._meet()
        await self.evaluation.begin()
        return infos

    async def _meet(self) -> None:
        engines = self.scenario.team("actor", "generate")
        meeting = (HOST, self._workers.weight_port, 1 + sum(engine.parallelism.tensor for engine in engines))
        joining = [self.switching.joining(engine, *meeting) for engine in engines]
        bare = (
            any(self.switching.takes_turns(engine) for engine in engines) or self.scenario.model("actor").lora is None
        )
        await _all([self.trainers["actor"][0].connect.remote(*meeting, bare=bare), *joining])

    async def run(self, stage: str, step: int) -> list[Info]:
        """One stage of one step, on all of its workers; while they update, the step's record is written."""
        if stage in UPDATES and step in self._batches:
            batch = self._batches[step]
            await self.recording.begin(step, lambda: _value(batch))
        if self.reading is not None and stage in ("reference", *UPDATES) and step not in self._samples:
            self._samples[step] = self.reading.reference(step)
        if self.dataflow.nodes[stage].stage == "switch":
            return await self.switching.switch(stage, step, self._samples)
        infos = await (self._begun.pop((stage, step), None) or STAGES[stage](self, step))
        self._ended.add((stage, step))
        self.judges.ended(stage, step)
        if stage == "rollout":
            self.recording.obtained(step)
        return infos

    def _ahead(self, source: str, step: int, after: Sequence[Any] = ()) -> None:
        """Calls what follows a stage before it has ended: workers wait for what it returns, or for `after`, and start
        without a word from the driver between. Only where nothing else is still to be waited for.
        """
        for stage, later in HANDED_ON.get(source, ()):
            run = (stage, step + later)
            if stage not in self.dataflow.nodes or not self.dataflow.nodes[stage].runs(run[1]):
                continue
            others = set(self.dataflow.requirements(*run)) - {(source, step)}
            if others <= self._ended and not self.dataflow.streams(*run):
                self._after[run] = list(after)
                self._begun[run] = asyncio.ensure_future(STAGES[stage](self, run[1]))
                self._begun[run].add_done_callback(_retrieved)

    async def finish(self) -> None:
        """Waits for what is still written beside the run, and judges a reward model. Raises OSError where it cannot be."""
        await self.recording.finish()
        if self.scenario.algorithm.name == "reward_model":
            await judgement.write(self.scenario, self.trainers["reward"], self.folder, self.scenario.num_steps)

    async def rollout(self, step: int) -> list[Info]:
        version, after = self.dataflow.policy_version("rollout", step), self._after.pop(("rollout", step), [])
        heats, sinks = self.decisions.temperatures(step), self.judges.sinks
        calls = [
            engine.generate.options(num_returns=2).remote(
                step, version, share.prompts, share.notes, heats[share.prompts], sinks, *after
            )
            for engine, share in zip(self.engines, self.dealer.deal(step), strict=True)
            if share.prompts
        ]
        if len(calls) == 1 and self.scenario.sampling.best_of == 1 and not self.decisions.wants_rewards:
            self._samples[step] = calls[0][0]
            self._ahead("rollout", step)
        infos = await _all([info for _, info in calls])
        for info in infos:
            self.dealer.returned(*info.pop("responses"))
        infos[0]["learning"] = self.decisions.rolled(step, infos)
        parts = [part for part, _ in calls]
        self._samples[step] = parts[0] if len(parts) == 1 else self.engines[0].merge.remote(*parts)
        self._rolled[step] = self._samples[step]
        return infos

    async def reward(self, step: int) -> list[Info]:
        infos = await self._judged("reward", step)
        if self.decisions.wants_rewards:
            infos[0]["learning"] = self.decisions.rewarded(step, await _all(self._columns[step]))
        if (best_of := self.scenario.sampling.best_of) > 1:
            select = self.scorers["reward"][0].__ray_call__.options(num_returns=2)
            found = select.remote(keep_best, best_of, self._samples[step], *self._columns[step])
            self._samples[step], self._columns[step] = found[0], [found[1]]
        return infos

    async def reference(self, step: int) -> list[Info]:
        return await self._judged("reference", step)

    async def _judged(self, stage: str, step: int) -> list[Info]:
        columns, infos = await self.judges.score(stage, step, self._samples)
        self._columns.setdefault(step, []).extend(columns)
        return infos

    async def value(self, step: int) -> list[Info]:
        await self.judges.sources_ended("value", step)
        return await self._scored(step, [rank.values for rank in self.trainers["critic"]])

    async def _scored(self, step: int, methods: list[Any]) -> list[Info]:
        calls = [method.options(num_returns=2).remote(step, self._samples[step]) for method in methods]
        infos = await _all([info for _, info in calls])
        self._columns.setdefault(step, []).extend(columns for columns, _ in calls)
        return infos

    async def advantage(self, step: int) -> list[Info]:
        """Every earlier batch has been used by now, so it is let go."""
        self._batches.clear()
        self._rolled.pop(step, None)
        method = self.trainers["actor"][0].advantage.options(num_returns=2)
        batch, info = method.remote(step, self._samples.pop(step), *self._columns.pop(step))
        self._batches[step] = batch
        self._ahead("advantage", step)
        return await _all([info])

    async def old_logprob(self, step: int) -> list[Info]:
        await self.judges.sources_ended("old_logprob", step)
        return await self._scored(step, [rank.old_logprobs for rank in self.trainers["actor"]])

    async def update_actor(self, step: int) -> list[Info]:
        if self.reading is not None:
            return await self._update_from(self.reading, "actor", step)
        calls = [rank.update.remote(step, self._batches[step]) for rank in self.trainers["actor"]]
        if self._synchronous:
            self._ahead("update_actor", step, calls)
        return await _all(calls)

    async def update_critic(self, step: int) -> list[Info]:
        """Of the critic, or of the reward model."""
        if self.reading is not None:
            return await self._update_from(self.reading, "reward", step)
        return await _all([rank.update.remote(step, self._batches[step]) for rank in self.trainers["critic"]])

    async def _update_from(self, reading: Reading, role: str, step: int) -> list[Info]:
        """On samples of the data set, and what scorers said of them."""
        samples, columns = self._samples.pop(step), self._columns.pop(step, [])
        calls = [rank.update.remote(step, samples, *columns) for rank in self.trainers[role]]
        self.recording.obtained(step)
        await self.recording.begin(step, lambda: scored(reading.trained(step), columns))
        reading.ahead(step)
        return await _all(calls)

    async def weight_sync(self, step: int) -> list[Info]:
        """Sends the weights; where rollouts run a version behind, then compares log-probs on a few samples.

        In a synchronous run the first forward pass of every update makes this comparison on the step's own samples.
        """
        after = self._after.pop(("weight_sync", step), [])
        calls = [rank.send_weights.remote(step) for rank in self.trainers["actor"]]
        calls += [self.switching.receiving(engine, step, after) for engine in self.scenario.team("actor", "generate")]
        if self._synchronous and not self.judges.sinks and not self._saves(step):
            self._ahead("weight_sync", step, calls)
        infos = await _all(calls)
        if not self._synchronous:
            infos.append({"spans": [], "learning": {"logprob_gap": await self._gap(step)}})
        return infos

    @property
    def _synchronous(self) -> bool:
        return self.scenario.schedule.mode == "synchronous"

    def _saves(self, step: int) -> bool:
        """Whether a checkpoint takes the state of the driver as it is after a step, before anything of a later one."""
        node = self.dataflow.nodes.get("checkpoint")
        return node is not None and node.runs(step)

    async def _gap(self, step: int) -> float:
        """max |log-prob of the engine - log-prob of the trainer| over a few fresh tokens of every engine."""
        probes = [engine.probe.remote(step) for engine in self.engines]
        theirs = await _all(
            [rank.logprobs.remote(probe) for probe in probes for rank in self.trainers["actor"]]
        )  # every rank takes part in every pass: sharded weights are gathered together
        first = theirs[:: len(self.trainers["actor"])]
        samples: list[Samples] = await _all(probes)
        return max(largest_gap(mine.logprobs, other) for mine, other in zip(samples, first, strict=True))

    async def evaluate(self, step: int) -> list[Info]:
        return await self.evaluation.run(step, self.dataflow.policy_version("evaluate", step))

    async def checkpoint(self, step: int) -> list[Info]:
        """Every rank writes its part, at once or beside the next steps; `executor.store` makes one of them."""
        folder = staging(self.folder / CHECKPOINTS, step, self.attempt)
        about = {"step": step, "digest": self.scenario.digest, "attempt": self.attempt}
        return await _all([rank.save.remote(folder, step, about) for rank in self.ranks])

    @property
    def ranks(self) -> list[Any]:
        """Of all trainers."""
        return [rank for team in self.trainers.values() for rank in team]

    def state(self) -> dict[str, Any]:
        """What the driver decides by, fit for JSON: a checkpoint holds it."""
        return {"dealer": self.dealer.state(), "decisions": self.decisions.state()}

    def in_flight(self, step: int) -> dict[int, Any]:
        """By step, references to the samples that were generated for later steps than this one."""
        return {number: found for number, found in self._rolled.items() if number > step}

    async def restore(self, earlier: Earlier) -> list[Info]:
        """After setup: everybody takes the state of the checkpoint, the engines the weights of the trainers."""
        if earlier.checkpoint is None:
            return []
        for _, step in earlier.kept:
            samples = parcel.read(earlier.checkpoint / parcel.name(step))
            self._samples[step] = self._rolled[step] = ray.put(samples)
            self.judges.ended("rollout", step)  # scorers that take samples one by one find all of them at once
            self.recording.obtained(step)
        self.dealer.restore(earlier.stages["dealer"])
        self.decisions.restore(earlier.stages["decisions"])
        return await self.switching.resumed(lambda: self._restored(earlier.checkpoint, earlier.first_step))

    async def _restored(self, checkpoint: Path | None, step: int) -> list[Info]:
        infos = await _all([rank.restore.remote(checkpoint, step) for rank in self.ranks])
        return infos + (await self.weight_sync(step - 1) if self.engines else [])

    async def settle(self) -> None:
        """Waits for the writes that go on beside the run. Raises OSError where one failed."""
        await _all([rank.settle.remote() for rank in self.ranks])


HANDED_ON: dict[str, Sequence[tuple[str, int]]] = {
    "rollout": [("reward", 0), ("reference", 0)],
    "advantage": [(stage, 0) for stage in UPDATES],
    "update_actor": [("weight_sync", 0)],
    "weight_sync": [("rollout", 1)],
}
"""stages that may be called before another one has ended, and how many steps later"""

STAGES: dict[str, Callable[[Stages, int], Awaitable[list[Info]]]] = {
    "rollout": Stages.rollout,
    "reward": Stages.reward,
    "reference": Stages.reference,
    "value": Stages.value,
    "old_logprob": Stages.old_logprob,
    "advantage": Stages.advantage,
    "update_critic": Stages.update_critic,
    "update_actor": Stages.update_actor,
    "weight_sync": Stages.weight_sync,
    "evaluate": Stages.evaluate,
    "checkpoint": Stages.checkpoint,
}


def largest_gap(ours: list[Any], theirs: list[Any]) -> float:
    """max |a - b| over two lists of arrays of the same lengths."""
    return max(float(np.max(np.abs(a - b))) for a, b in zip(ours, theirs, strict=True))


def _retrieved(done: asyncio.Future[Any]) -> None:
    """What went wrong is told by whoever awaits it, if anybody still does."""
    if not done.cancelled():
        done.exception()


async def _all(references: list[Any]) -> list[Any]:
    """The values of object references; raises as soon as one of them fails."""
    return list(await asyncio.gather(*(_value(reference) for reference in references)))


async def _value(reference: Any) -> Any:
    return await reference
