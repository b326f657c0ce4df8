"""Engines and scorers that are started and stopped with the depth of their queue."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lab.model import DTYPE_BYTES
from lab.placement import Worker
from lab.policies.scaling import Depth, Target, target
from lab.timeline import Span
from simulator.world import Process, World

if TYPE_CHECKING:
    from lab.scaling import Scaled
    from simulator.asynchronous import Production
    from simulator.fleet import Counts
    from simulator.joint import Joint
    from simulator.scorers import ScoringService

SCORER_START_S = 30.0
"""a scorer's start where the scenario states none: as long as an engine of vLLM takes without its weights (see
`profiles.moves.ENGINE_START_S`)"""


class Crew:
    """The workers of one work of which some are up; the first ones are from the start."""

    def __init__(self, world: World, work: Scaled) -> None:
        self._world, self._scale = world, world.scenario.scaling[work]
        role, kind = work.split(".")
        self.workers = world.scenario.team(role, kind)
        self.start_s = _start_s(world, self.workers[0]) if self._scale.start is None else self._scale.start
        self.rule = self._scale.rule(len(self.workers), self.start_s)
        self.up = [worker.name for worker in self.workers[: self._scale.min]]
        self.starting: list[str] = []
        self.on_up: Callable[[Worker], object] | None = None
        """who is told of a worker that has started"""
        self._changed = -math.inf

    @property
    def look_s(self) -> float:
        return self._scale.look

    def down(self) -> list[Worker]:
        """Those that neither work nor start, in their order."""
        return [worker for worker in self.workers if worker.name not in {*self.up, *self.starting}]

    def look(self, num_queued: int, num_running: int, rate: float) -> tuple[Depth, Target]:
        """What is seen and how many there should be; `rate`: units that one worker finishes per second."""
        depth = Depth(
            num_queued=num_queued, num_running=num_running, rate=rate, num_ready=len(self.up),
            num_starting=len(self.starting), since_change_s=self._world.now - self._changed,
        )  # fmt: skip
        return depth, target(self.rule, depth)

    def changed(self) -> None:
        """Workers are started or stopped now."""
        self._changed = self._world.now

    def start(self, worker: Worker, step: int) -> Process:
        """A worker starts; it is up when this ends, and not in the middle of a change of weights."""
        world, begun = self._world, self._world.now
        self.starting.append(worker.name)
        yield world.env.timeout(self.start_s)
        while busy := world.under_way("weight_sync"):
            yield world.env.all_of([world.finished(*run) for run in busy])
        self.starting.remove(worker.name)
        self.up = [other.name for other in self.workers if other.name in {*self.up, worker.name}]
        name = f"setup/{step}/{worker.name}"
        world.redone[name] += 1
        span_id = name if world.redone[name] == 1 else f"{name}~{world.redone[name]}"
        world.spans.append(
            Span(
                span_id=span_id, resource=worker.name, step=step, stage="setup",
                pool=worker.pool, worker=worker.name, start_s=begun, end_s=world.now,
            )
        )  # fmt: skip
        if self.on_up is not None:
            self.on_up(worker)

    def stop(self, names: Sequence[str]) -> None:
        """These work no more."""
        self.up = [name for name in self.up if name not in names]


class Engines:
    """The engines of a run whose number changes within its rollouts."""

    def __init__(self, world: World) -> None:
        self._world, self.crew = world, world.crew("actor.generate")
        self.crew.on_up = self._join
        self._joint: Joint | None = None
        self._step, self._samples, self._busy_s = 0, 0, 0.0
        for worker in self.crew.down():
            world.publication.leave(worker)

    def away(self) -> frozenset[int]:
        """Engines, by their index, that are not up."""
        return frozenset(i for i, worker in enumerate(self.crew.workers) if worker.name not in self.crew.up)

    def watch(self, joint: Joint, step: int) -> Process:
        """Looks at the engines' queues during the rollout of a step."""
        self._joint, self._step = joint, step
        while not joint.over.triggered:
            self._look(joint)
            yield self._world.env.timeout(self.crew.look_s) | joint.over
        self._joint = None
        self._samples += sum(seat.run.counts.samples for seat in joint.seats)
        self._busy_s += sum(seat.run.counts.busy_s for seat in joint.seats)

    def _look(self, joint: Joint) -> None:
        seats = joint.active()
        counts = [seat.run.counts for seat in joint.seats]
        queued = sum(seat.run.num_queued + seat.coming for seat in seats)
        depth, said = self._decide(queued, sum(seat.run.num_running for seat in seats), counts)
        idle = self._idle(joint)[: max(-said.change, 0)]
        for worker in idle:
            self._world.publication.leave(worker)
            if (seat := joint.seat_of(worker.name)) is not None:
                joint.retire(seat)
        self.crew.stop([worker.name for worker in idle])
        if said.change > 0 or idle:
            self.crew.changed()
            joint.note("scaling", _record(self._world.now, depth, said))

    def _decide(self, num_queued: int, num_running: int, counts: Sequence[Counts]) -> tuple[Depth, Target]:
        """What is seen and decided; engines that are to start do so."""
        samples = self._samples + sum(count.samples for count in counts)
        busy_s = self._busy_s + sum(count.busy_s for count in counts)
        depth, said = self.crew.look(num_queued, num_running, samples / busy_s if busy_s else 0.0)
        for worker in self.crew.down()[: max(said.change, 0)]:
            self._world.env.process(self.crew.start(worker, self._step))
        return depth, said

    def oversee(self, production: Production) -> Process:
        """Looks at what could be issued and runs, where engines generate without a barrier, to the end of the run."""
        producers = {producer.worker.name: producer for producer in production.producers}
        self.crew.on_up = lambda worker: producers[worker.name].call()
        while True:
            self._step = self._world.publication.version * self._world.dataflow.nodes["weight_sync"].every
            counts = [producer.counts for producer in production.producers]
            under_way = sum(len(producer.samples) for producer in production.producers)
            depth, said = self._decide(production.backlog(), under_way, counts)
            working = [producers[name] for name in reversed(self.crew.up)]
            stopped = sorted(working, key=lambda producer: len(producer.samples))[: max(-said.change, 0)]
            for producer in stopped:
                producer.dismiss()
            self.crew.stop([producer.worker.name for producer in stopped])
            if said.change:
                self.crew.changed()
                working[-1].decisions.append(_record(self._world.now, depth, said))
            yield self._world.env.timeout(self.crew.look_s)

    def _idle(self, joint: Joint) -> list[Worker]:
        """Engines that are up and have nothing, the last first."""
        seats = [(worker, joint.seat_of(worker.name)) for worker in reversed(self.crew.workers)]
        return [worker for worker, seat in seats if worker.name in self.crew.up and (seat is None or seat.idle)]

    def _join(self, worker: Worker) -> None:
        self._world.publication.enter(worker, self._world.publication.version)
        if self._joint is not None:
            self._joint.join(worker)


def serve(world: World, crew: Crew, service: ScoringService, step: int) -> Process:
    """Looks at the queue of a scoring service, to the end of it or of the run."""
    scored = looked = busy = 0

    def count(samples: list[int]) -> None:
        nonlocal scored
        scored += len(samples)

    service.on_scored(count)
    crew.on_up = lambda _: service.scale(len(crew.up))
    service.scale(len(crew.up))
    while not service.drained.triggered:
        looked, busy = looked + 1, busy + service.num_busy
        rate = scored / (busy * crew.look_s) if busy else 0.0
        running = service.num_inside - service.num_queued
        _, said = crew.look(service.num_queued, running, rate)
        if said.change > 0:
            for worker in crew.down()[: said.change]:
                world.env.process(crew.start(worker, step))
        elif said.change < 0:
            crew.stop(crew.up[said.num_workers :])
            service.scale(len(crew.up))
        if said.change:
            crew.changed()
        yield world.env.timeout(crew.look_s) | service.drained


def _start_s(world: World, worker: Worker) -> float:
    if worker.work == "score":
        return SCORER_START_S
    size = world.scenario.spec(worker.role).parameters * DTYPE_BYTES[worker.dtype]
    return world.cost(worker, "engine_start", {"calls": 1.0, "bytes": size}).seconds


def _record(now: float, depth: Depth, said: Target) -> dict[str, Any]:
    """The decision as a span notes it."""
    return {
        "at_s": now, "queued": depth.num_queued, "running": depth.num_running, "rate": depth.rate,
        "ready": depth.num_ready, "starting": depth.num_starting, "target": said.num_workers, "why": said.why,
    }  # fmt: skip
