"""What a run does when processes of it die: who is gone since when, who takes over, who comes back, and what it cost.

A worker counts as lost once its heartbeat has been missing for as long as the fault's `detect` says. Whether it was killed
or hangs makes no difference: what is left of it is killed then. An engine or a scorer gets a new process in its place; the
loss of a trainer takes the whole run back to a checkpoint, which `executor.run` does.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from executor import heartbeat, injecting, processes, spilling
from executor.heartbeat import Pulse
from executor.loss import GoneBack, Loss, dead, enter, enter_again, innermost, once, record_of, weights_of
from executor.stopping import Stopped
from executor.workers import HOST, Workers
from lab.placement import Worker
from lab.scenario import Scenario
from lab.targets import BUFFER, covering, loses_engines, rolls_back

if TYPE_CHECKING:
    from executor.ledger import Ledger
    from executor.stages import Stages

Info = dict[str, Any]
MOST_TRIES = 5
"""processes that are started in a row in the place of one"""


class Recovery:
    """The failures of a run; it outlasts the attempts in which the run is played. A context."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.folder = scenario, folder
        self.losses: dict[str, Loss] = {}
        """of workers that are away, by name"""
        self.back: asyncio.Future[Loss] = asyncio.get_running_loop().create_future()
        """trained state is gone"""
        self.joining: set[str] = set()
        """engines that are back, and take part when weights are published next"""
        self._ledger: Ledger
        self._stages: Stages
        self._workers: Workers
        self._pulse: Pulse | None = None
        self._pids: dict[str, int] = {}
        self._beside: dict[str, int] = {}
        """processes of a run that stand for no worker"""
        self._injector: subprocess.Popen[bytes] | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._noticed: list[Loss] = []
        """all losses so far, in order"""
        self._published: tuple[int, Any] = (0, None)
        """the version that engines have, and a reference to its weights; None: those that they are built with"""
        self._syncing = False
        self._members: dict[str, int] = {}
        """processes of the engines that have met the sender, by name"""
        self._changed = asyncio.Event()

    async def guard(self, work: Coroutine[Any, Any, None]) -> None:
        """A run is played until it ends or trained state is gone. Raises GoneBack then."""
        task = asyncio.get_running_loop().create_task(work)
        either: set[asyncio.Future[Any]] = {task, self.back}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Stopped) and self._timeouts and not self.back.done():
            await self.reason(error)
        if self.back.done():
            raise GoneBack(self.back.result()) from error
        task.result()

    async def begin(self, stages: Stages, ledger: Ledger, workers: Workers) -> None:
        """All workers are ready, and the clock runs: from now on they are watched, and struck."""
        self._stages, self._ledger, self._workers = stages, ledger, workers
        stages.recovery = self if self.scenario.faults else None
        self.losses.clear()
        self.joining.clear()
        self._published = (0, None)
        self.back = asyncio.get_running_loop().create_future()
        if self._pulse is None:
            self._pulse = Pulse(workers.host if workers.host != HOST else HOST)
        await asyncio.gather(*(self._listen(name) for name in workers.actors))
        if BUFFER in self._timeouts:
            await self._listen(BUFFER)
        others = {name: actor for name, actor in workers.others.items() if name not in self._timeouts}
        pids = await asyncio.gather(*(heartbeat.pid(actor) for actor in others.values()))
        self._beside = dict(zip(others, pids, strict=True))
        self._tell()
        workers.begun = self._begun
        self._members = self._standing()
        first_step = ledger.earlier.first_step
        if first_step and loses_engines(self.scenario):
            self._keep(first_step - 1)
        if self._timeouts:
            self._spawn(self._watch())
        if self.scenario.faults and self._injector is None:
            self._injector = injecting.start(self.scenario, self.folder, ledger.zero_s)

    def __enter__(self) -> Recovery:
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()
        if self._injector is not None:
            self._injector.kill()
            self._injector.wait()
            self.kill_all()  # what it has stopped does not end otherwise
        if self._pulse is not None:
            self._pulse.close()

    def rest(self) -> None:
        """Nobody is watched any more, and nobody comes back by itself."""
        if self._pulse is not None:
            self._workers.begun = lambda name: None
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        for name in list(self._pids):
            if self._pulse is not None:
                self._pulse.forget(name)

    def kill_all(self) -> None:
        """Ends the processes of all workers, hanging ones too."""
        for pid in self._pids.values():
            injecting.send(pid, signal.SIGKILL)
        self._pids.clear()

    def absent(self) -> frozenset[int]:
        """Engines, by their index, that take no samples: those that are away, and spares whose time has not come."""
        engines = self.scenario.team("actor", "generate")
        away = self.losses.keys() | self.joining
        spare = {fault.spare for fault in self.scenario.faults if fault.spare is not None}
        called = {fault.spare for fault in self.scenario.faults if fault.target in away}
        gone = away | spare - called
        return frozenset(place for place, engine in enumerate(engines) if engine.name in gone)

    def working(self) -> list[str]:
        """Names of the engines that take samples."""
        away = self.absent()
        return [engine.name for i, engine in enumerate(self.scenario.team("actor", "generate")) if i not in away]

    def present(self) -> list[Worker]:
        """Engines that take weights: all that are there."""
        return [worker for worker in self.scenario.team("actor", "generate") if worker.name not in self.losses]

    def circle(self) -> list[Worker]:
        """Engines that have met the sender, and get what is published: whoever comes back meanwhile is none of them yet."""
        return [worker for worker in self.scenario.team("actor", "generate") if worker.name in self._members]

    async def somebody(self) -> list[str]:
        """Names of the engines that take samples, once there are any."""
        while not (found := self.working()):
            await self._change()
        return found

    async def reason(self, error: BaseException) -> Loss | None:
        """The loss behind an error, once it has been noticed: what comes of a death may come before, and in the name of others,
        the other ends of a collective. None where every worker that is watched sends signs of life.
        """
        if isinstance(error, GoneBack):
            return error.loss
        known, number = list(self.losses.values()), len(self._noticed)
        if self._pulse is not None:
            beats = max(map(heartbeat.every, self._timeouts.values()), default=0.0)
            await heartbeat.heard(self._pulse, beats, lambda: self._unnoticed(error))
        if self.back.done():
            return self.back.result()
        return self._since(number) or max(known, key=lambda loss: loss.at, default=None)

    def _unnoticed(self, error: BaseException) -> bool:
        """Whether somebody is dead, by an error, whose heart is still expected to beat."""
        cause, name = innermost(error), dead(error, self._workers.names())
        if self._pulse is None or name is None or not isinstance(cause, ray.exceptions.ActorDiedError):
            return False
        now = self._workers.actors.get(name) or self._workers.others[name]
        return now._actor_id.hex() == cause.actor_id and self._pulse.pid(name) is not None

    async def attempts(self, stage: str, step: int, play: Callable[[], Awaitable[list[Info]]]) -> list[Info]:
        """A stage of a step, again from its start where a worker without trained state was lost in it."""
        while True:
            before = len(self._noticed)
            try:
                if stage == "weight_sync":
                    self._syncing = True
                    await self._regroup()
                infos = await play()
            except Exception as error:
                loss = self._since(before) or await self.reason(error) or self._since(before)
                if loss is None:
                    raise
                if self.back.done():
                    raise GoneBack(self.back.result()) from error
                if stage == "weight_sync":
                    self._members = {}  # the ends that are left have left each other
                elif loss.name in self._stages.dataflow.nodes[stage].workers:
                    await loss.up.wait()
                continue
            finally:
                self._syncing = self._syncing and stage != "weight_sync"
            if stage == "weight_sync" and loses_engines(self.scenario):
                self._keep(step)
            return [once(info) for info in infos]

    def _since(self, number: int) -> Loss | None:
        """The last loss after so many, whether or not somebody stands in its place by now."""
        return self._noticed[-1] if len(self._noticed) > number else None

    def note_lost(self, loss: Loss, num_samples: int, num_tokens: int) -> None:
        """So many samples went with a worker, and so many tokens that had been generated for them."""
        loss.record["lost_samples"] += num_samples
        loss.record["lost_tokens"] += num_tokens

    def finish(self) -> None:
        """The run is at its end: what only slowed it down is told too."""
        for said in injecting.struck(self.folder):
            if said["how"] == "slowed":
                self._ledger.fault(record_of(said["kind"], said["target"], said["at_s"], None))

    @cached_property
    def _timeouts(self) -> dict[str, float]:
        """By worker that may be lost, the shortest time without a sign of life that is stated for it."""
        found: dict[str, float] = {}
        for name in (*self.scenario.workers, BUFFER):
            for fault in covering(self.scenario, name):
                found[name] = min(fault.detect, found.get(name, fault.detect))
        return found

    def expects(self, name: str) -> bool:
        """Whether it is stated that a process may die, which somebody has seen: it is missed once its heart is."""
        return name in self._timeouts

    def has_met(self, name: str) -> bool:
        """Whether the process that is this engine now has met the sender of weights."""
        return name in self._members and self._members[name] == self._pids.get(name)

    async def _listen(self, name: str) -> None:
        """Learns the process of a worker, and hears its heart from now on where it may be lost."""
        actor = self._workers.actors[name] if name in self._workers.actors else self._workers.others[name]
        call, assigned = actor.__ray_call__, self._timeouts.get(name)
        if assigned is None:
            self._pids[name] = await heartbeat.pid(actor)
            return
        assert self._pulse is not None, "begun before"
        address, seconds = self._pulse.address, heartbeat.every(assigned)
        self._pids[name] = await call.remote(heartbeat.beat, address, name, seconds)
        self._pulse.watch(name, self._pids[name])

    def _begun(self, name: str) -> None:
        if name not in self.losses:
            self._spawn(self._learn(name))

    async def _learn(self, name: str) -> None:
        """The process of a worker is another one, though it was not lost."""
        with suppress(ray.exceptions.RayActorError):  # and that one has given way to yet another
            await self._listen(name)
            self._tell()

    def _tell(self) -> None:
        processes.write(self.folder, self._pids | self._beside)

    async def _watch(self) -> None:
        limits = self._timeouts
        beats = min(map(heartbeat.every, limits.values()), default=1.0)
        while self._pulse is not None:
            await asyncio.sleep(beats)
            for name, silent_s in self._pulse.silent().items():
                if silent_s > limits[name]:
                    self._notice(name, silent_s)

    def _notice(self, name: str, silent_s: float) -> None:
        """A worker is lost: what is left of it goes, and what is stated for this happens."""
        assert self._pulse is not None, "who is not listened to is not missed"
        self._pulse.forget(name)
        pid = self._pids.pop(name)
        injecting.send(pid, signal.SIGKILL)
        self._tell()  # somebody else may get its number
        loss = self._loss(name, pid, time.monotonic() - silent_s)
        self.losses[name] = loss
        self._noticed.append(loss)
        self.joining.discard(name)
        self._ledger.fault(loss.record)
        if rolls_back(self.scenario, loss.fault.kind, name):
            if not self.back.done():
                self.back.set_result(loss)
        else:
            if self._stages.production is not None and name in self._stages.production.names:
                self.note_lost(loss, self._stages.production.lose(name), 0)
            self._spawn(self._refill(loss) if name == BUFFER else self._mend(loss))
        self._changed.set()

    def _loss(self, name: str, pid: int, heard: float) -> Loss:
        """By the entry that struck this process; who died by itself comes back as is stated for its kind."""
        stated, zero = covering(self.scenario, name), self._ledger.zero_s
        struck = [said for said in injecting.struck(self.folder) if said["pid"] == pid and said["how"] != "slowed"]
        fault = self.scenario.faults[struck[-1]["entry"]] if struck else stated[0]
        at = zero + struck[-1]["at_s"] if struck else heard
        record = record_of(fault.kind, name, at - zero, fault.way_back)
        return Loss(name=name, fault=fault, at=at, record=record | {"lost_samples": 0})

    async def _mend(self, loss: Loss) -> None:
        """A new process in the place of one without trained state; an engine with the weights of now."""
        name = loss.name
        for tried in range(MOST_TRIES):
            with suppress(Exception):  # it is dead
                ray.kill(self._workers.actors[name])
            actor = self._workers.begin(name)
            self._stages.replaced(name)
            version, weights = self._published
            try:
                if self.scenario.workers[name].work == "generate":
                    await actor.__ray_call__.remote(enter, version, weights)
                    while self._is_late(version):
                        version, weights = self._published
                        await actor.__ray_call__.remote(enter_again, version, weights)
                else:
                    await actor.ready.remote()
                await self._listen(name)
                break
            except ray.exceptions.RayActorError:
                if tried + 1 == MOST_TRIES:
                    raise
        self._tell()
        del self.losses[name]
        engine = self.scenario.workers[name].work == "generate"
        if engine and (self._syncing or self._published[0] != version):
            self.joining.add(name)
        self._ledger.came_back(name, loss.at)
        loss.up.set()
        self._changed.set()
        if engine and self._stages.production is not None:
            await self._stages.production.revive(name, actor, version)

    def _is_late(self, version: int) -> bool:
        """Whether an engine that has started has weights of before, and nobody else generates what the next ones come of."""
        generates = bool(self.working()) or self._stages.production is not None
        return not generates and not self._syncing and self._published[0] != version

    async def _refill(self, loss: Loss) -> None:
        """A new process in the place of the buffer, and what waited in it is generated again."""
        self.note_lost(loss, *await spilling.refill(self._workers, self._stages))
        await self._listen(BUFFER)
        self._tell()
        del self.losses[BUFFER]
        loss.up.set()

    async def _regroup(self) -> None:
        """The engines that are there meet the sender anew where others have met it before."""
        for tried in range(MOST_TRIES):
            while not (engines := self.present()):
                await self._change()
            if (standing := self._standing()) == self._members:
                return
            self._members = {}
            ends = [*self._stages.trainers["actor"], *(self._workers.actors[engine.name] for engine in engines)]
            await asyncio.gather(*map(heartbeat.pid, ends))  # whatever they were in the middle of is over
            try:
                await self._stages.meet(engines)
                self._members = standing
                return
            except ray.exceptions.RayTaskError:  # somebody was late, or has just been lost
                if tried + 1 == MOST_TRIES:
                    raise

    def _standing(self) -> dict[str, int]:
        return {worker.name: self._pids[worker.name] for worker in self.present()}

    def _keep(self, step: int) -> None:
        """The weights that were published after a step stay at hand for engines that come back."""
        calls = [rank.__ray_call__.remote(weights_of) for rank in self._stages.trainers["actor"]]
        self._published = self._stages.dataflow.policy_version("weight_sync", step), calls[0]
        self.joining -= {name for name, pid in self._members.items() if self._pids.get(name) == pid}
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.back.done():
            self.back.set_exception(error)
