"""How each stage of a dataflow runs on its workers.

Samples go from worker to worker as references; only spans and numbers of interest come back to the driver.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray

from executor import judgement, parcel, spilling, syncing
from executor.asynchronous import Production
from executor.calls import retrieved, value, values
from executor.checkpoint import staging
from executor.earlier import CHECKPOINTS, Earlier
from executor.evaluating import Evaluation
from executor.handing import Handing, made
from executor.joint import together
from executor.judging import Judges
from executor.ledger import Ledger
from executor.losing import LossyRollout
from executor.offline import Reading, scored
from executor.past import Past
from executor.publishing import Publication
from executor.recording import Recording
from executor.recovery import Recovery
from executor.sampling import Decisions, keep_best
from executor.scaling import Engines
from executor.switching import Switching
from executor.workers import Workers
from lab.dataflow import Dataflow
from lab.dealing import Dealer
from lab.offline import UPDATES
from lab.placement import Worker
from lab.returning import joint
from lab.scenario import Scenario
from lab.targets import loses_engines

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
        self.publication = Publication(scenario, dataflow)
        self.decisions = Decisions(scenario)
        self.recording = Recording(scenario, folder)
        judged = self.trainers.get(scenario.algorithm.trains[0], [])
        self.evaluation = Evaluation(scenario, folder, self.engines, judged, self.scorers)
        self.reading = None if scenario.algorithm.rolls_out else Reading(scenario)
        """of the data set, where samples come from one"""
        self.attempt = 0  # attempts at the run before this one
        self.past = Past(scenario) if dataflow.continuous else None
        """the samples of a run without a barrier"""
        self.production: Production | None = None  # once its engines generate
        self.switching = Switching(scenario, dataflow, workers.actors, folder)
        self.handing = Handing(scenario, dataflow, workers)
        self.elastic = Engines(self) if "actor.generate" in scenario.scaling else None
        """engines whose number changes"""
        self.now: Callable[[], float] = time.monotonic
        self.may_begin: Callable[[tuple[str, int]], bool] = lambda run: True
        """whether a stage of a step may begin in a run that may be asked to end"""
        self.recovery: Recovery | None = None
        """of a run whose workers may fail"""
        self.workers = self._workers = workers
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
        if self.elastic is not None:
            self.elastic.begun(infos)
        if self.engines:
            await self.meet(self.present())
        if self.past is not None:
            await spilling.start(self.workers, self.served)
        await self.judges.begin([work.split(".")[0] for work in self.scenario.scaling if work.endswith(".score")])
        await self.handing.begin(self.judges.takers("transfer"))
        await self.evaluation.begin()
        return infos

    def present(self) -> list[Worker]:
        """The engines that are there, in order: those that take weights."""
        if self.elastic is not None:
            return self.elastic.present()
        return list(self.scenario.team("actor", "generate")) if self.recovery is None else self.recovery.present()

    def replaced(self, name: str) -> None:
        """Another process stands in the place of a worker."""
        worker, actor = self.scenario.workers[name], self._workers.actors[name]
        team = self.engines if worker.work == "generate" else self.scorers[worker.role]
        team[self.scenario.team(worker.role, worker.work).index(worker)] = actor

    async def meet(self, engines: Sequence[Worker]) -> None:
        """These engines and the sender of weights meet, perhaps anew."""
        await syncing.meet(self, engines)

    async def run(self, stage: str, step: int) -> list[Info]:
        """One stage of one step, on all of its workers; while they update, the step's record is written."""
        if stage in UPDATES and step in self._batches:
            batch = self._batches[step]
            await self.recording.begin(step, lambda: value(batch))
        if self.reading is not None and stage in ("reference", *UPDATES) and step not in self._samples:
            self._samples[step] = self.reading.reference(step)
        if self.dataflow.nodes[stage].stage == "switch":
            return await self.switching.switch(stage, step, self._samples)
        begun = self._begun.pop((stage, step), None)
        if self.recovery is not None and stage in TRIED_AGAIN:
            infos = await self.recovery.attempts(stage, step, lambda: STAGES[stage](self, step))
        else:
            infos = await (begun or STAGES[stage](self, step))
        self._ended.add((stage, step))
        self.judges.ended(stage, step)
        if self.production is not None and stage in UPDATES:
            self.production.updated(stage, step)
        if stage == "rollout":
            self.recording.obtained(step)
        return infos

    def _ahead(self, source: str, step: int, after: Sequence[Any] = ()) -> None:
        """Calls what follows a stage before it has ended: workers wait for what it returns, or for `after`, and start
        without a word from the driver between. Only where nothing else is still to be waited for.
        """
        for stage, later in HANDED_ON.get(source, ()) if self.recovery is None and self.elastic is None else ():
            run = (stage, step + later)
            if stage not in self.dataflow.nodes or not self.dataflow.nodes[stage].runs(run[1]):
                continue
            others = set(self.dataflow.requirements(*run)) - {(source, step)}
            if others <= self._ended and not self.dataflow.streams(*run) and self.may_begin(run):
                self._after[run] = list(after)
                self._begun[run] = asyncio.ensure_future(STAGES[stage](self, run[1]))
                self._begun[run].add_done_callback(retrieved)

    async def finish(self) -> None:
        """Waits for what is still written beside the run, and judges a reward model. Raises OSError where it cannot be."""
        if self.production is not None:
            await self.production.finish()
        await self.recording.finish()
        if self.scenario.algorithm.name == "reward_model":
            await judgement.write(self.scenario, self.trainers["reward"], self.folder, self.scenario.num_steps)

    @property
    def served(self) -> list[str]:
        """Stages that score samples without end, as they come."""
        return [name for name, node in self.dataflow.nodes.items() if node.continuous and name != "rollout"]

    async def begin(self, ledger: Ledger) -> None:
        """The run begins, or goes on: where there is no barrier, engines generate from now on."""
        if self.past is not None:
            ledger.past, actors = self.past, self.workers.actors
            self.production = Production(
                self.scenario, self.dataflow, self.dealer, actors, self.workers.others["buffer"], self.past, ledger,
                [scorer for stage in self.served for scorer in self.scorers[stage]],
            )  # fmt: skip
            if self.recovery is not None:
                self.production.excused, self.production.has_met = self.recovery.expects, self.recovery.has_met
            await self.production.begin()

    async def rollout(self, step: int) -> list[Info]:
        if self.production is not None:
            self._samples[step] = await self.production.collect(step)
            return [{"spans": [], "gauges": {"buffer_samples": self.production.buffer.depth}}]
        if self.recovery is not None and loses_engines(self.scenario):
            self._samples[step], infos, differ = await LossyRollout(self, self.recovery, step).play()
            self._rolled[step] = self._samples[step]
            infos[0]["learning"] = self.decisions.rolled(step, [{"diversity": differ}])
            return infos
        version, after = self.dataflow.policy_version("rollout", step), self._after.pop(("rollout", step), [])
        if joint(self.scenario):
            await values(after)
            return await together(self, step, version)
        heats, sinks = self.decisions.temperatures(step), self.judges.sinks
        calls = [
            engine.generate.options(num_returns=2).remote(
                step, version, share.prompts, share.notes, heats[share.prompts], sinks, *after
            )
            for engine, share in zip(self.engines, self.dealer.deal(step, self.publication.absent), strict=True)
            if share.prompts
        ]
        whole = len(calls) == 1 and not self.handing.used
        if whole and self.scenario.sampling.best_of == 1 and not self.decisions.wants_rewards:
            self._samples[step] = calls[0][0]
            self._ahead("rollout", step)
        infos = await values([info for _, info in calls])
        for info in infos:
            self.dealer.returned(*info.pop("responses"))
        infos[0]["learning"] = self.decisions.rolled(step, infos)
        if self.handing.used:
            self.handing.made(step, made(infos))
            return infos
        parts = [part for part, _ in calls]
        self._samples[step] = parts[0] if len(parts) == 1 else self.engines[0].merge.remote(*parts)
        self._rolled[step] = self._samples[step]
        return infos

    def came(self, step: int, samples: Any) -> None:
        """A reference to the samples of a step is there."""
        self._samples[step] = self._rolled[step] = samples

    async def transfer(self, step: int) -> list[Info]:
        """The samples of a step go to the trainer's machine, beside the rollout perhaps."""
        await self.judges.sources_ended("transfer", step)
        samples, infos = await self.handing.transfer(step)
        self.came(step, samples)
        return infos

    async def reward(self, step: int) -> list[Info]:
        infos = await self._judged("reward", step)
        if self.decisions.wants_rewards and self.production is None:
            infos[0]["learning"] = self.decisions.rewarded(step, await values(self._columns[step]))
        if (best_of := self.scenario.sampling.best_of) > 1:
            select = self.scorers["reward"][0].__ray_call__.options(num_returns=2)
            found = select.remote(keep_best, best_of, self._samples[step], *self._columns[step])
            self._samples[step], self._columns[step] = found[0], [found[1]]
        return infos

    async def reference(self, step: int) -> list[Info]:
        return await self._judged("reference", step)

    async def _judged(self, stage: str, step: int) -> list[Info]:
        if stage in self.served and self.production is not None:
            return await self.production.scored(self.scorers[stage], step)
        columns, infos = await self.judges.score(stage, step, self._samples)
        self._columns.setdefault(step, []).extend(columns)
        return infos

    async def value(self, step: int) -> list[Info]:
        await self.judges.sources_ended("value", step)
        return await self._scored(step, [rank.values for rank in self.trainers["critic"]])

    async def _scored(self, step: int, methods: list[Any]) -> list[Info]:
        calls = [method.options(num_returns=2).remote(step, self._samples[step]) for method in methods]
        infos = await values([info for _, info in calls])
        self._columns.setdefault(step, []).extend(columns for columns, _ in calls)
        return infos

    async def advantage(self, step: int) -> list[Info]:
        """Every earlier batch has been used by now, so it is let go."""
        self._batches.clear()
        self._rolled.pop(step, None)
        method = self.trainers["actor"][0].advantage.options(num_returns=2)
        about = {} if self.production is None else {"about": self.production.about(step)}
        batch, info = method.remote(step, self._samples.pop(step), *self._columns.pop(step, []), **about)
        self._batches[step] = batch
        self._ahead("advantage", step)
        return await values([info])

    async def old_logprob(self, step: int) -> list[Info]:
        await self.judges.sources_ended("old_logprob", step)
        return await self._scored(step, [rank.old_logprobs for rank in self.trainers["actor"]])

    async def update_actor(self, step: int) -> list[Info]:
        if self.reading is not None:
            return await self._update_from(self.reading, "actor", step)
        calls = [rank.update.remote(step, self._batches[step]) for rank in self.trainers["actor"]]
        if self._synchronous:
            self._ahead("update_actor", step, calls)
        return await values(calls)

    async def update_critic(self, step: int) -> list[Info]:
        """Of the critic, or of the reward model."""
        if self.reading is not None:
            return await self._update_from(self.reading, "reward", step)
        return await values([rank.update.remote(step, self._batches[step]) for rank in self.trainers["critic"]])

    async def _update_from(self, reading: Reading, role: str, step: int) -> list[Info]:
        """On samples of the data set, and what scorers said of them."""
        samples, columns = self._samples.pop(step), self._columns.pop(step, [])
        calls = [rank.update.remote(step, samples, *columns) for rank in self.trainers[role]]
        self.recording.obtained(step)
        await self.recording.begin(step, lambda: scored(reading.trained(step), columns))
        reading.ahead(step)
        return await values(calls)

    async def weight_sync(self, step: int) -> list[Info]:
        """Sends the weights; where rollouts run a version behind, then compares log-probs on a few samples.

        In a synchronous run the first forward pass of every update makes this comparison on the step's own samples.
        """
        if self.production is not None:
            return await self.production.publish(step, self.publication, self.trainers["actor"])
        if self.elastic is not None:
            async with self.elastic.syncing:
                await self.elastic.regroup()
                infos = await self._published(step)
                self.elastic.keep(self.dataflow.policy_version("weight_sync", step))
                return infos
        return await self._published(step)

    async def _published(self, step: int) -> list[Info]:
        """The weights of a step are sent, and every engine has them."""
        begins = self._synchronous and not self.judges.sinks and not self._saves(step)
        ahead = partial(self._ahead, "weight_sync", step) if begins else None
        return await syncing.sync(self, step, self._after.pop(("weight_sync", step), []), ahead)

    @property
    def _synchronous(self) -> bool:
        return self.scenario.schedule.mode == "synchronous"

    def _saves(self, step: int) -> bool:
        """Whether a checkpoint takes the state of the driver as it is after a step, before anything of a later one."""
        node = self.dataflow.nodes.get("checkpoint")
        return node is not None and node.runs(step)

    async def evaluate(self, step: int) -> list[Info]:
        version = self.dataflow.policy_version("evaluate", step)
        return await self.evaluation.run(step, version, self.publication.absent)

    async def checkpoint(self, step: int) -> list[Info]:
        """Every rank writes its part, at once or beside the next steps; `executor.store` makes one of them."""
        folder = staging(self.folder / CHECKPOINTS, step, self.attempt)
        about = {"step": step, "digest": self.scenario.digest, "attempt": self.attempt}
        return await values([rank.save.remote(folder, step, about) for rank in self.ranks])

    @property
    def ranks(self) -> list[Any]:
        """Of all trainers."""
        return [rank for team in self.trainers.values() for rank in team]

    def state(self) -> dict[str, Any]:
        """What the driver decides by, fit for JSON: a checkpoint holds it."""
        state = {"dealer": self.dealer.state(), "decisions": self.decisions.state()}
        return state if self.past is None else state | {"past": self.past.state()}

    def in_flight(self, step: int) -> dict[int, Any]:
        """By step, references to the samples that were generated for later steps than this one."""
        return {number: found for number, found in self._rolled.items() if number > step}

    async def restore(self, earlier: Earlier) -> list[Info]:
        """After setup: everybody takes the state of the checkpoint, the engines the weights of the trainers."""
        if self.past is not None:
            self.past = Past(self.scenario, earlier.first_step, earlier.stages.get("past"), earlier.samples)
        if earlier.checkpoint is None:
            return []
        for step in sorted({step for _, step in earlier.kept}):
            samples = parcel.read(earlier.checkpoint / parcel.name(step))
            self._samples[step] = self._rolled[step] = ray.put(samples)
            self.judges.ended("transfer", step)
            self.judges.ended("rollout", step)  # scorers that take samples one by one find all of them at once
            self.recording.obtained(step)
        self.dealer.restore(earlier.stages["dealer"])
        self.decisions.restore(earlier.stages["decisions"])
        return await self.switching.resumed(lambda: self._restored(earlier.checkpoint, earlier.first_step))

    async def _restored(self, checkpoint: Path | None, step: int) -> list[Info]:
        infos = await values([rank.restore.remote(checkpoint, step) for rank in self.ranks])
        return infos + (await self.weight_sync(step - 1) if self.engines else [])

    async def settle(self) -> None:
        """Waits for the writes that go on beside the run. Raises OSError where one failed."""
        await values([rank.settle.remote() for rank in self.ranks])


HANDED_ON: dict[str, Sequence[tuple[str, int]]] = {
    "rollout": [("reward", 0), ("reference", 0)],
    "advantage": [(stage, 0) for stage in UPDATES],
    "update_actor": [("weight_sync", 0)],
    "weight_sync": [("rollout", 1)],
}
"""stages that may be called before another one has ended, and how many steps later"""

TRIED_AGAIN = frozenset({"reward", "reference", "weight_sync"})
"""stages that may be played once more where a worker without trained state was lost in them"""

STAGES: dict[str, Callable[[Stages, int], Awaitable[list[Info]]]] = {
    "rollout": Stages.rollout,
    "transfer": Stages.transfer,
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
