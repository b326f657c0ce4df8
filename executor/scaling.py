"""Engines that are started and stopped with the depth of their queue, by the rule that a simulation asks too.

Those that are down hold their devices: an empty process stands in their place. The counterpart in virtual time is
`simulator.elastic`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import ray

from executor.joint import Joint, Seat
from executor.loss import weights_of
from lab.placement import Worker
from lab.policies.scaling import Depth, Target, target

if TYPE_CHECKING:
    from executor.stages import Stages

Info = dict[str, Any]
WORK: Literal["actor.generate"] = "actor.generate"


class Engines:
    """The engines of a run whose number changes within its rollouts."""

    def __init__(self, stages: Stages) -> None:
        self._stages, self.scenario = stages, stages.scenario
        self._scale = self.scenario.scaling[WORK]
        self.workers = self.scenario.team("actor", "generate")
        self.up = [worker.name for worker in self.workers[: self._scale.min]]
        self.starting: dict[str, asyncio.Task[Info]] = {}
        self._start_s = self._scale.start or 0.0
        self._changed_s = -math.inf
        self._samples, self._busy_s = 0, 0.0
        """of rollouts that are over"""
        self._published: tuple[int, Any] = (0, None)
        """the version that engines have, and a reference to its weights; None: those that they are built with"""
        self._members = list(self.up)
        self.syncing = asyncio.Lock()
        """held while weights are published"""
        self._joint: Joint | None = None
        self._step = 0
        self._started: list[Info] = []
        """what engines report of their start, until the next stage of the ledger"""

    def begun(self, infos: Sequence[Info]) -> None:
        """The engines that are up have started; how long that took is what a start is taken to cost where none is said."""
        spans = [span for info in infos for span in info["spans"] if span.worker in self.up and not span.op]
        if self._scale.start is None:
            self._start_s = max((span.seconds for span in spans), default=0.0)

    def present(self) -> list[Worker]:
        """Those that take weights."""
        return [worker for worker in self.workers if worker.name in self.up]

    def absent(self) -> frozenset[int]:
        """Those, by their index, that take no samples."""
        return frozenset(i for i, worker in enumerate(self.workers) if worker.name not in self.up)

    async def regroup(self) -> None:
        """Before weights are published: those that are up meet the sender, where others met it before."""
        if self._members != self.up:
            await self._stages.meet(self.present())
            self._members = list(self.up)

    def keep(self, version: int) -> None:
        """Weights were published: they stay at hand for engines that start."""
        calls = [rank.__ray_call__.remote(weights_of) for rank in self._stages.trainers["actor"]]
        self._published = version, calls[0]

    async def watch(self, joint: Joint, step: int) -> None:
        """Looks at the engines' queues during the rollout of a step, to its end."""
        self._joint, self._step = joint, step
        try:
            while not joint.over.is_set():
                for start_ in [task for task in self.starting.values() if task.done()]:
                    start_.result()  # raises what went wrong with it
                await self._look(joint)
                await _either(joint.over.wait(), self._scale.look)
        finally:
            self._joint = None
        self._samples += sum(seat.num_samples for seat in joint.seats)
        self._busy_s += sum(seat.busy_s for seat in joint.seats)

    def reported(self) -> list[Info]:
        """What engines have reported of their starts since the last call."""
        found, self._started = self._started, []
        return found

    async def _look(self, joint: Joint) -> None:
        seats = joint.active()
        rooms = await joint.rooms(seats)
        queued, running = sum(room.num_queued for room in rooms), sum(room.num_running for room in rooms)
        samples = self._samples + sum(seat.num_samples for seat in joint.seats)
        busy_s = self._busy_s + sum(seat.busy_s for seat in joint.seats)
        now = self._stages.now()
        rule = self._scale.rule(len(self.workers), self._start_s)
        depth = Depth(
            num_queued=queued, num_running=running, rate=samples / busy_s if busy_s else 0.0, num_ready=len(self.up),
            num_starting=len(self.starting), since_change_s=now - self._changed_s,
        )  # fmt: skip
        said = target(rule, depth)
        coming = self._down()[: max(said.change, 0)]
        for worker in coming:
            self.starting[worker.name] = asyncio.create_task(self._start(worker))
        async with joint.lock:
            going = await self._stop(joint, max(-said.change, 0))
        if coming or going:
            self._changed_s = now
            joint.note("scaling", record(now, depth, said))

    def _down(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.name not in {*self.up, *self.starting}]

    async def _start(self, worker: Worker) -> Info:
        """An engine starts in the process that stands in its place, and takes part once it has the weights of now."""
        actor = self._stages.workers.actors[worker.name]
        version, weights = self._published
        info: Info = await actor.__ray_call__.remote(start, self._step, version, weights)
        while not await self._promoted(worker, actor, version):
            version, weights = self._published
            info["spans"] += (await actor.__ray_call__.remote(again, self._step, version, weights))["spans"]
        self._started.append(info)
        return info

    async def _promoted(self, worker: Worker, actor: Any, version: int) -> bool:
        """Whether an engine that has started is one of those that are up: not with weights that are old by now. In a
        rollout it takes part at once, before anybody decides again."""
        joint = self._joint
        async with self.syncing if joint is None else joint.lock:
            if version != self._published[0]:
                return False
            del self.starting[worker.name]
            self.up = [other.name for other in self.workers if other.name in {*self.up, worker.name}]
            if joint is not None:
                await joint.join(worker, actor)
            return True

    async def _stop(self, joint: Joint, number: int) -> list[str]:
        """At most so many engines that have nothing are stopped, the last first; an empty process takes the place."""
        found: list[str] = []
        for worker in reversed(self.workers):
            seat = joint.seat_of(worker.name)
            if len(found) < number and worker.name in self.up and (seat is None or seat.idle):
                found.append(worker.name)
                await self._end(joint, worker.name, seat)
        return found

    async def _end(self, joint: Joint, name: str, seat: Seat | None) -> None:
        self.up.remove(name)
        if seat is not None:
            await joint.retire(seat)
        workers = self._stages.workers
        ray.kill(workers.actors[name])
        workers.begin(name)
        self._stages.replaced(name)


def start(worker: Any, step: int, version: int, published: Any) -> Info:
    """Runs in the process of an engine that starts while a run goes on."""
    with worker.recorder.stage("setup", step, version):
        worker.load(published)
        worker.policy_version = version
    return {"spans": worker.recorder.take()}


def again(worker: Any, step: int, version: int, published: Any) -> Info:
    """The same, where the weights have changed since it began."""
    worker.release()
    return start(worker, step, version, published)


def record(now: float, depth: Depth, said: Target) -> dict[str, Any]:
    """The decision as a span notes it."""
    return {
        "at_s": now, "queued": depth.num_queued, "running": depth.num_running, "rate": depth.rate,
        "ready": depth.num_ready, "starting": depth.num_starting, "target": said.num_workers, "why": said.why,
    }  # fmt: skip


async def _either(event: Any, seconds: float) -> None:
    """Until something has happened, or so many seconds have passed."""
    try:
        await asyncio.wait_for(event, seconds)
    except TimeoutError:
        return
