"""The published versions of a run, as its driver knows them: who has which, and who is late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from executor.calls import retrieved, value, values
from lab.dataflow import Dataflow
from lab.policies.weight_sync import WeightsReady, barrier
from lab.scenario import Scenario

FOLDER = "weights"
"""in the run's folder: the store, where weights go through one"""
MANIFEST, LATEST = "manifest.json", "latest.json"
"""of a version: its parts and their hashes; of a store: the event of its latest version"""
GRACE_S = 0.5
"""that engines which give up at a barrier get to say so"""

Info = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Board:
    """Where engines look for weights that they fetch."""

    address: str = ""
    """of the trainer's `executor.holding.Holder`; empty: there is none"""
    folder: str = ""
    """of a store; empty: there is none"""


@dataclass(frozen=True, kw_only=True)
class Offered:
    """A version that a rank has left for engines."""

    ready: WeightsReady | None = None
    """the event, of the first rank"""
    references: tuple[Any, ...] = ()
    """to objects in Ray's store"""
    since: int | None = None
    """the version that its changes are added to; None: nothing earlier is needed beside it"""
    notes: Mapping[str, float] = field(default_factory=dict)
    """what packing found"""
    at_s: float = field(default_factory=time.time)
    """when, on the clock of the day"""


def version_name(version: int) -> str:
    """Of the folder of a version in a store."""
    return f"v{version:06d}"


def fetches(scenario: Scenario) -> bool:
    """Whether engines fetch the weights themselves."""
    return scenario.weight_sync.trigger != "push"


def needs_base(scenario: Scenario) -> bool:
    """Whether engines need something beside what is published: matrices that have adapters, or what changes are added
    to."""
    return scenario.model("actor").lora is not None or scenario.weight_sync.payload == "delta"


class Publication:
    """What was published, and what engines have said of it."""

    def __init__(self, scenario: Scenario, dataflow: Dataflow) -> None:
        self._scenario, self._dataflow = scenario, dataflow
        self._engines = [worker.name for worker in scenario.team("actor", "generate")]
        self.held = dict.fromkeys(self._engines, 0)
        """version by engine, of those that take part"""
        self.absent: frozenset[int] = frozenset()
        """engines that gave up at the last barrier, by their index"""

    @property
    def acknowledged(self) -> int:
        """A version that every engine has that takes part, or a later one."""
        return min(self.held.values(), default=0)

    def acknowledge(self, engine: str, version: int) -> None:
        """An engine has taken a version, or is there again with it."""
        self.held[engine] = version

    def leave(self, engine: str) -> None:
        """An engine is gone."""
        self.held.pop(engine, None)

    async def publish(self, step: int, trainers: Sequence[Any], hear: Callable[[Any], None]) -> list[Info]:
        """Without a barrier: the trainers are held until engines can have the version, or of a push until they have it.

        `hear` tells every engine of an `Offered`, or of a reference to one, as soon as there is one.
        """
        if not fetches(self._scenario):
            version = self._dataflow.policy_version("weight_sync", step)
            hear(Offered(ready=WeightsReady(version=version, place="trainer", digest="")))
            return await values([rank.send_weights.remote(step) for rank in trainers])
        calls = [
            rank.publish_weights.options(num_returns=2).remote(step, self.acknowledged) for rank in trainers
        ]  # fmt: skip
        hear(calls[0][0])
        return await values([info for _, info in calls])

    async def meet(
        self, step: int, trainers: Sequence[Any], engines: Mapping[str, Any], after: Sequence[Any] = ()
    ) -> list[Info]:
        """Engines fetch a version, and trainers are held until all have it or are given up. `after`: references that the
        trainers wait for.

        Raises TimeoutError where no engine has it in time.
        """
        rule = self._scenario.weight_sync
        self.held = {name: self.held.get(name, 0) for name in engines}
        offers = [rank.offer_weights.remote(step, self.acknowledged, *after) for rank in trainers]
        calls = {
            name: engine.take_part.remote(step, offers[0], rule.barrier_timeout) for name, engine in engines.items()
        }
        await values(offers)
        start = time.monotonic()
        infos = await self._answers(calls, rule.barrier_timeout)
        for name, info in infos.items():
            self.acknowledge(name, info["held"])
        version = self._dataflow.policy_version("weight_sync", step)
        here = {name for name in infos if self.held.get(name, -1) >= version}
        timeout = rule.barrier_timeout if rule.barrier_timeout is not None else float("inf")
        said = barrier(list(engines), here, time.monotonic() - start, timeout)
        self.absent = frozenset(i for i, name in enumerate(self._engines) if name in said.absent)
        ended = await values([rank.weights_published.remote(list(said.absent)) for rank in trainers])
        if said.absent and not here:
            late = f"no engine has them {timeout:g} s after their publication (weight_sync.barrier_timeout)"
            raise TimeoutError(f"rollout waits for weight_sync of step {step}: {late}")
        return [*ended, *infos.values()]

    async def _answers(self, calls: Mapping[str, Any], timeout_s: float | None) -> dict[str, Info]:
        """Of the engines that answered in time; who is late is heard no more. Raises what a call raised."""
        tasks = {name: asyncio.ensure_future(value(call)) for name, call in calls.items()}
        limit = None if timeout_s is None else timeout_s + GRACE_S
        done, late = await asyncio.wait(tasks.values(), timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
        for task in late:
            task.add_done_callback(retrieved)
        failed = [task for task in done if task.exception() is not None]
        if failed:
            failed[0].result()
        return {name: task.result() for name, task in tasks.items() if task in done}
