"""The way of samples from the engines to the trainer's machine, where a scenario says how they go.

The driver only says when: samples go from the engines' processes into the inbox, and from there to whoever scores or
trains on them.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from executor import outgoing
from executor.calls import values
from executor.inbox import Inbox
from executor.outgoing import Address
from executor.sending import sweep
from executor.workers import Workers
from lab.dataflow import Dataflow
from lab.scenario import Scenario

Info = dict[str, Any]
INBOX = "inbox"


class Handing:
    """The stage `transfer` of a run."""

    def __init__(self, scenario: Scenario, dataflow: Dataflow, workers: Workers) -> None:
        self.scenario, self._dataflow, self._workers = scenario, dataflow, workers
        self._address: Address | None = None
        self._made: dict[int, tuple[dict[str, int], Sequence[int] | None]] = {}

    @property
    def used(self) -> bool:
        """Whether samples are sent in a stage of their own."""
        return "transfer" in self._dataflow.nodes

    async def begin(self, sinks: Sequence[Any]) -> None:
        """Opens the inbox, and tells every engine where it is. `sinks`: who is told of samples that arrive."""
        if not self.used:
            return
        threads = 2 + len(self.scenario.team("actor", "generate"))
        inbox = self._workers.beside(INBOX, Inbox, self.scenario.num_tried, near="actor", threads=threads)
        await inbox.hand_on.remote(sinks)
        port = await inbox.listen.remote(self._workers.host)
        mark = f"lab-{uuid.uuid4().hex[:12]}"
        self._address = Address(inbox=inbox, host=self._workers.host, port=port, mark=mark)
        self._workers.on_stop.append(self.end)
        await self.connect([worker.name for worker in self.scenario.team("actor", "generate")])

    async def connect(self, names: Sequence[str]) -> None:
        """Tells these engines, whose processes are new, where their samples go."""
        if self._address is None:
            return
        calls = [self._workers.actors[name].__ray_call__ for name in names]
        await values([call.remote(outgoing.connect, self.scenario.experience, self._address) for call in calls])

    def made(self, step: int, numbers: dict[str, int], kept: Sequence[int] | None = None) -> None:
        """How many samples of a step each engine has made and keeps, by worker name; `kept`: the places in the step of
        those that are wanted, None: all."""
        self._made[step] = ({name: number for name, number in numbers.items() if number}, kept)

    async def transfer(self, step: int) -> tuple[Any, list[Info]]:
        """A reference to the samples of a step, in the order of prompts, and what the engines report."""
        assert self._address is not None, "begun before"
        numbers, kept = self._made.pop(step)
        calls = [self._workers.actors[name].__ray_call__.remote(outgoing.send, step, kept) for name in numbers]
        infos = await values(calls)
        number = sum(numbers.values()) if kept is None else len(kept)
        return self._address.inbox.collect.remote(step, number), infos

    def end(self) -> None:
        """Nothing of this run is left in the machine's memory."""
        if self._address is not None:
            sweep(self._address.mark)


def made(infos: Sequence[Info]) -> dict[str, int]:
    """How many samples each engine has made, by worker name, from what the engines report of a rollout."""
    numbers: dict[str, int] = {}
    for info in infos:
        [worker] = {span.worker for span in info["spans"]}
        numbers[worker] = numbers.get(worker, 0) + info["made"]
    return numbers
