"""Pools whose works take turns: which workers are loaded when a run begins, and the switches between their turns."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from executor import turns
from executor.calls import values
from executor.turns import Turn
from lab.dataflow import Dataflow
from lab.placement import Worker
from lab.scaling import away
from lab.scenario import Scenario
from lab.slices import slice_of
from lab.slices import spills as leaves_samples
from lab.slices import turns as turns_of

Info = dict[str, Any]
FOLDER = "turns"
"""in the run's folder: what works leave behind while others have their turn"""


class Switching:
    """Loads and releases the workers of a run. Where nobody takes turns, it only makes all of them ready."""

    def __init__(self, scenario: Scenario, dataflow: Dataflow, actors: Mapping[str, Any], folder: Path) -> None:
        self.scenario, self.dataflow, self.actors, self.folder = scenario, dataflow, actors, folder / FOLDER
        nodes = [node for node in dataflow.nodes.values() if node.stage != "switch"]
        self._first = {
            pool: turns_of(scenario, pool, nodes)[0].slice
            for pool, sharing in scenario.sharing.items()
            if sharing.how == "time_sliced"
        }

    def takes_turns(self, worker: Worker) -> bool:
        return bool(slice_of(self.scenario, worker))

    def waits(self, worker: Worker) -> bool:
        """Whether a worker is not loaded when the run begins."""
        return self.takes_turns(worker) and slice_of(self.scenario, worker) != self._first[worker.pool]

    async def ready(self) -> list[Info]:
        """Builds every worker. Those that wait for their turn are built before the others, one slice after the other, and
        give way at once: what cannot be built is known before the first step."""
        workers = list(self.scenario.workers.values())
        shutil.rmtree(self.folder, ignore_errors=True)  # of a run that ended there and begins anew, or is resumed
        await self._all(turns.heavy, [worker for worker in workers if self.takes_turns(worker)])
        infos = []
        waiting = [worker for worker in workers if self.waits(worker)]
        for slice in dict.fromkeys((worker.pool, slice_of(self.scenario, worker)) for worker in waiting):
            mine = [worker for worker in waiting if (worker.pool, slice_of(self.scenario, worker)) == slice]
            infos += await values([self.actors[worker.name].ready.remote() for worker in mine])
            await self._all(turns.let_go, mine)
        down = away(self.scenario)
        others = [self.actors[one.name] for one in workers if not self.waits(one) and one.name not in down]
        return infos + await values([actor.ready.remote() for actor in others])

    def joining(self, engine: Worker, host: str, port: int, world_size: int, rank: int) -> Any:
        """The call with which an engine meets the sender of weights; `rank` of the first of its processes."""
        actor = self.actors[engine.name]
        if self.takes_turns(engine):
            return actor.__ray_call__.remote(turns.join, host, port, world_size)
        return actor.connect.remote(host, port, world_size, rank)

    def receiving(self, engine: Worker, step: int, after: Sequence[Any]) -> Any:
        """The call with which an engine takes new weights, once what it is `after` is there; one whose turn it is not
        keeps them for that."""
        actor = self.actors[engine.name]
        if self.takes_turns(engine):
            return actor.__ray_call__.remote(turns.receive, step, *after)
        return actor.receive_weights.remote(step, *after)

    async def switch(self, name: str, step: int, samples: dict[int, Any]) -> list[Info]:
        """Some workers give way, then others take their turn.

        The step's samples are on disk meanwhile; in `samples`, references by step, they are replaced by what is read.
        """
        node, workers = self.dataflow.nodes[name], self.scenario.workers
        version = self.dataflow.policy_version(name, step)
        turn = Turn(node=name, step=step, policy_version=version, folder=self.folder)
        leaving = [workers[each] for each in node.workers if each in node.leaves]
        coming = [workers[each] for each in node.workers if each not in node.leaves]
        spills = step in samples and leaves_samples(self.scenario, leaving)
        infos = await values(
            [
                self._call(worker).remote(turns.leave, turn, *([samples[step]] if spills and i == 0 else []))
                for i, worker in enumerate(leaving)
            ]
        )
        calls = [
            self._call(worker).options(num_returns=2).remote(turns.come, turn, spills and i == 0)
            for i, worker in enumerate(coming)
        ]
        infos += await values([info for _, info in calls])
        if spills and calls:
            samples[step] = calls[0][0]
        return infos

    async def resumed(self, restore: Callable[[], Awaitable[list[Info]]]) -> list[Info]:
        """Restores with all trainers loaded; afterwards everybody is as when a step begins."""
        workers = self.scenario.workers.values()
        trainers = [worker for worker in workers if worker.work == "train" and self.waits(worker)]
        engines = [worker for worker in workers if worker.work == "generate" and self.takes_turns(worker)]
        await self._all(turns.let_go, engines)
        await self._all(turns.come_in, trainers)
        infos = await restore()
        await self._all(turns.step_out, trainers, self._between())
        await self._all(turns.take_up, engines, self._between())
        return infos

    def _between(self) -> Turn:
        """What workers are told when they move outside of any step."""
        return Turn(node="", step=-1, policy_version=0, folder=self.folder)

    def _call(self, worker: Worker) -> Any:
        return self.actors[worker.name].__ray_call__

    async def _all(self, function: Any, workers: Sequence[Worker], *arguments: Any) -> list[Any]:
        return await values([self._call(worker).remote(function, *arguments) for worker in workers])
