"""Which runs of stages have ended, and waiting for one: a long run takes no more memory than a short one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

from lab.dataflow import Dataflow

Run = tuple[str, int]
"""a stage and its step"""


class Ended:
    """A stage runs its steps in order, so that of each the first step that has not ended says it all."""

    def __init__(self, dataflow: Dataflow, first_step: int = 0, kept: Collection[Run] = ()) -> None:
        """Runs before `first_step` have ended, and so have those that are `kept`."""
        self._dataflow = dataflow
        self._first = dict.fromkeys(dataflow.nodes, first_step)
        self._kept = {run for run in kept if run[1] >= first_step}
        self._awaited: dict[Run, asyncio.Event] = {}

    def __contains__(self, run: Run) -> bool:
        return run[1] < self._first[run[0]] or run in self._kept

    def add(self, stage: str, step: int) -> None:
        """This run has ended, after all earlier ones of its stage."""
        self._first[stage] = step + 1
        if (event := self._awaited.pop((stage, step), None)) is not None:
            event.set()

    async def wait(self, stage: str, step: int) -> None:
        """Until this run has ended."""
        if (stage, step) not in self:
            await self._awaited.setdefault((stage, step), asyncio.Event()).wait()

    async def due(self, stage: str) -> AsyncIterator[int]:
        """The steps of a stage that have not ended, each once all has that it needs."""
        for step in self._dataflow.steps(stage):
            if (stage, step) in self:
                continue
            for needed in self._dataflow.requirements(stage, step):
                await self.wait(*needed)
            yield step

    async def whole(self, step: int) -> None:
        """Until every stage that runs in a step has ended."""
        for stage, node in self._dataflow.nodes.items():
            if node.runs(step):
                await self.wait(stage, step)

    def is_whole(self, step: int) -> bool:
        """Whether every stage that runs in a step has ended."""
        return all((stage, step) in self for stage, node in self._dataflow.nodes.items() if node.runs(step))

    def everything(self) -> bool:
        """Whether every stage has ended its last step."""
        nodes = self._dataflow.nodes
        return all((stage, step) in self for stage in nodes for step in self._dataflow.steps(stage))
