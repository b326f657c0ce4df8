"""What fails in a world and comes back: how far the run has got, who is away, and what is lost when it goes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import msgspec
import simpy

from lab.dataflow import Dataflow
from lab.fates import Fates
from lab.placement import Worker
from lab.scenario import Scenario
from lab.targets import hit, taken
from lab.timeline import Span
from simulator.cores import Cores, Process

if TYPE_CHECKING:
    from lab.faults import Fault
    from simulator.ahead import AheadRun
    from simulator.elastic import Engines
    from simulator.fleet import EngineRun
    from simulator.network import Network
    from simulator.publication import Publication
    from simulator.topology import Kind
    from simulator.world import Lane, World


@dataclass(eq=False)
class Launch:
    """A fresh process in the place of one that failed."""

    due_s: float
    """when it begins"""
    stated_s: float | None
    """how long it takes; None: what the profile says"""
    up: simpy.Event


class Outages(ABC):
    """The part of a world that faults change."""

    scenario: Scenario
    dataflow: Dataflow
    env: simpy.Environment
    spans: list[Span]
    ledger: Fates
    open: dict[str, Lane]
    why: dict[str, Callable[[], str]]
    _started: dict[tuple[str, int], simpy.Event]
    _finished: dict[tuple[str, int], simpy.Event]
    _cores: dict[str, Cores]

    @property
    @abstractmethod
    def network(self) -> Network:
        """The links of the cluster and the flows on them."""

    @property
    @abstractmethod
    def publication(self) -> Publication:
        """The versions of the weights, and who has them."""

    @property
    @abstractmethod
    def engines(self) -> Engines | None:
        """The engines whose number changes with the load."""

    @abstractmethod
    def span_id(self, stage: str, step: int, worker: str) -> str:
        """The id of a span."""

    @abstractmethod
    def _fresh(self) -> None:
        """Nothing has started and nothing is under way."""

    def _begin(self) -> None:
        """Nothing has failed."""
        self.redone: Counter[str] = Counter()
        """by id of a span, how often what it did was lost"""
        self.speed: dict[str, float] = {}
        """by worker, the share of its speed that it has; 1 where not named"""
        self.writes: dict[str, simpy.Process] = {}
        """by worker, the last write that goes on beside its work"""
        self.first_step = 0
        """the first step of this attempt: a fault may take a run back"""
        self.faults: list[dict[str, Any]] = []
        """what happened, as the header says it"""
        self.struck: dict[str, Any] = {}
        """of these, the one that is at work now"""
        self.on_loss: dict[str, Callable[[Fault], None]] = {}
        """by worker, or `buffer`: who takes care that what a fault took is done again"""
        self._launches: dict[str, list[Launch]] = {}
        """by worker that failed, the processes that start in its place"""
        self.stoppable: list[EngineRun | AheadRun] = []
        """those that a fault may stop in the middle of a sample"""
        self.absent: dict[str, float] = {}
        """by worker that comes back with the whole run: since when it does no work"""
        self.mending: dict[str, float] = {}
        """by worker that comes back by itself: since when, as far as it is not shown yet"""
        self._degraded: dict[str, float] = {}
        self._since: float | None = 0.0
        self._stopped, self._progress = 0.0, 0.0
        self._stretches = [(0.0, 0.0)]
        """when progress went on, and how much there was then"""

    @property
    def now(self) -> float:
        return float(self.env.now)

    def progress(self) -> float:
        """Seconds of this run that led to its present state: what was lost and the coming back from it left out."""
        return self._progress + (0.0 if self._since is None else self.now - self._since)

    def updated(self) -> int:
        """The last step whose update is complete; -1 before the first."""
        stages = [stage for stage in ("update_actor", "update_critic") if stage in self.dataflow.nodes]
        step = self.first_step
        while step < self.dataflow.num_steps and all(self._finished[stage, step].triggered for stage in stages):
            step += 1
        return step - 1

    def progress_at(self, step: int) -> float:
        """`progress` when the update of a step was complete; of steps before this attempt, at its start."""
        if step < self.first_step or self._since is None:
            return self._progress
        ends = [span.end_s for span in self.spans if span.step == step and span.stage.startswith("update_")]
        return self._progress + max(ends) - self._since

    def reached_at(self, progress_s: float) -> float:
        """When the run had made so much progress, in that past which led to its present state."""
        start, before = max((pair for pair in self._stretches if pair[1] <= progress_s), key=lambda pair: pair[1])
        return min(start + progress_s - before, self.now)

    def go_back(self, first_step: int, progress_s: float) -> None:
        """All that is under way ends here and what was done of `first_step` and later steps is lost.

        A new environment starts at the same time, in which only stages of earlier steps have ended.
        """
        done = {run for run, event in self._finished.items() if event.triggered and run[1] < first_step}
        for lane in list(self.open.values()):
            lane.lose()
        for worker, start in (self.mending | self.absent).items():
            self.restored(worker, start)
        self._forget(first_step)
        for engine in self.stoppable:
            running = [(sample, made) for sample, _, made in engine.running()]
            if running:
                self.ledger.generated(*zip(*running, strict=True))
        self.stoppable.clear()
        self.ledger.lose(first_step)
        self.env = simpy.Environment(initial_time=self.now)
        for name in ("_crews", "engines", "network", "publication"):
            self.__dict__.pop(name, None)
        for gone in (self.writes, self.on_loss, self.why, self.absent):
            gone.clear()
        if self._since is not None:
            self._since, self._stopped = None, self.now
        self.first_step, self._progress = first_step, progress_s
        self._stretches = [pair for pair in self._stretches if pair[1] <= progress_s]
        for links, share in self._degraded.items():
            self.degrade(links, share)
        self._fresh()
        for worker, launches in self._launches.items():
            for launch in launches:
                launch.up = self.env.event()
                self.env.process(self._launch(self.scenario.workers[worker], launch))
        for worker in self.mending:
            self.env.process(self._mend(self.scenario.workers[worker]))
        for run in done:
            self._started[run].succeed()
            self._finished[run].succeed()

    def go_on(self) -> float:
        """From now on time is progress again. Returns the seconds for which it was not."""
        stood = self.now - self._stopped if self._since is None else 0.0
        self._since = self.now
        self._stretches.append((self.now, self._progress))
        return stood

    def _forget(self, first_step: int) -> None:
        """Marks the spans of these steps as lost."""
        for i, span in enumerate(self.spans):
            if span.step >= first_step and span.stage != "restore" and "lost" not in span.attrs:
                self.spans[i] = msgspec.structs.replace(span, attrs=span.attrs | {"lost": True})
                self.redone[span.span_id.split("~")[0]] += not span.op

    @cached_property
    def disturbed(self) -> dict[str, frozenset[str]]:
        """By kind of fault, the workers that one may hit in this run."""
        found: dict[str, frozenset[str]] = {}
        for fault in self.scenario.faults:
            if fault.kind not in ("link_degraded", "buffer_lost"):
                names = [name for target in hit(self.scenario, fault) for name in taken(self.scenario, target)]
                found[fault.kind] = found.get(fault.kind, frozenset()).union(names)
        return found

    def slowed(self, worker: Worker) -> bool:
        """Whether a worker may become a straggler."""
        return worker.name in self.disturbed.get("straggler", frozenset())

    def losable(self, worker: Worker) -> bool:
        """Whether a fault may take a worker."""
        return any(worker.name in names for kind, names in self.disturbed.items() if kind != "straggler")

    @cached_property
    def lossy(self) -> bool:
        """Whether a fault may end samples before their end."""
        return any(fault.kind not in ("straggler", "link_degraded", "scorer_lost") for fault in self.scenario.faults)

    def slow_down(self, worker: str, share: float) -> None:
        """From now on a worker has this share of its speed."""
        self.speed[worker] = share
        for cores in self._cores.values():
            cores.speeds_changed()

    def degrade(self, links: str, share: float) -> None:
        """From now on links (`port train/0`) have this share of their bandwidth."""
        self._degraded[links] = share
        kind, place = links.split(" ", 1)
        self.network.degrade(self.network.topology.select(cast("Kind", kind), place), share)

    def lose(self, worker: str, fault: Fault) -> None:
        """A worker that is not trained fails; it works again once the fault has been noticed and it has started."""
        away = (fault.duration or 0.0) if fault.kind == "preempted" else fault.detect
        chosen, launch = self.scenario.workers[worker], Launch(self.now + away, fault.start, self.env.event())
        self._launches.setdefault(worker, []).append(launch)
        self.env.process(self._launch(chosen, launch))
        if chosen.work == "generate":  # a scorer's part of a step goes on in another span
            for lane in [lane for lane in self.open.values() if lane.worker is chosen]:
                lane.fail()
        if worker not in self.mending:
            self.mending[worker] = self.now
            self.env.process(self._mend(chosen))
        if handler := self.on_loss.get(worker):
            handler(fault)

    def _mend(self, worker: Worker) -> Process:
        """A worker that failed comes back, an engine with the weights of then."""
        engine = worker.work == "generate"
        if engine:
            self.publication.leave(worker)
        yield from self.until_up(worker.name)
        start = self.mending.pop(worker.name)
        if worker.name not in self.absent:  # else it is shown with the others
            self.restored(worker.name, start)
        if engine:
            self.publication.enter(worker, self.publication.version)

    def _launch(self, worker: Worker, launch: Launch) -> Process:
        """A process starts in the place of a worker, which works once all that do have started."""
        from simulator import launching

        if launch.stated_s is not None:
            yield self.env.timeout(max(launch.due_s + launch.stated_s - self.now, 0.0))
        else:
            yield self.env.timeout(max(launch.due_s - self.now, 0.0))
            world = cast("World", self)
            yield from launching.launch(world, worker, launching.op_of(world, worker), None)
        self._launches[worker.name].remove(launch)
        launch.up.succeed()

    def until_up(self, worker: str) -> Process:
        """Ends when a worker works."""
        while not self.is_up(worker):
            yield self._launches[worker][-1].up

    def attempts(self, worker: str, play: Callable[[], Process]) -> Process:
        """Plays what a worker does until it is through without failing; what a failure cuts short is lost."""
        while True:
            yield from self.until_up(worker)
            process = self.env.process(play())
            self.on_loss[worker] = lambda fault, under_way=process: under_way.interrupt()  # type: ignore[misc]
            try:
                yield process
                return
            except simpy.Interrupt:
                for lane in [lane for lane in self.open.values() if lane.worker.name == worker]:
                    lane.lose()
            finally:
                self.on_loss.pop(worker, None)

    def is_up(self, worker: str) -> bool:
        """Whether a worker works."""
        return not self._launches.get(worker)

    def away(self) -> frozenset[int]:
        """Engines, by their index, that take no samples: those that failed, and spares whose time has not come."""
        spare = {fault.spare: fault.target for fault in self.scenario.faults if fault.spare is not None}
        engines = self.scenario.team("actor", "generate")
        idle = {name for name, target in spare.items() if target is None or self.is_up(target)}
        down = frozenset() if self.engines is None else self.engines.away()
        return down | frozenset(
            i for i, engine in enumerate(engines) if not self.is_up(engine.name) or engine.name in idle
        )

    def working(self) -> list[str]:
        """Names of the engines that take samples."""
        away = self.away()
        return [engine.name for i, engine in enumerate(self.scenario.team("actor", "generate")) if i not in away]

    def next_up(self) -> simpy.Event:
        """Comes when the next engine that failed works again, or may do."""
        engines = [engine.name for engine in self.scenario.team("actor", "generate") if not self.is_up(engine.name)]
        return self.env.any_of([launch.up for name in engines for launch in self._launches[name]])

    def restored(self, worker: str, start: float, read_s: float = 0.0, bytes: float = 0.0) -> None:
        """Shows that a worker has been coming back from a fault since `start`, at last by reading its state."""
        chosen, step = self.scenario.workers[worker], self.first_step
        name = self.span_id("restore", step, worker)
        if worker in self.mending:  # it still does by itself
            self.mending[worker] = self.now
        if self.now <= start:
            return
        self.redone[f"restore/{step}/{worker}"] += 1
        spans = [(name, "", start, 0.0), (f"{name}#0", "read", self.now - read_s, bytes)]
        for span_id, op, since, moved in spans if read_s else spans[:1]:
            self.spans.append(
                Span(
                    span_id=span_id, cause_ids=(name,) if op else (), resource=worker, step=step, stage="restore", op=op,
                    pool=chosen.pool, worker=worker, start_s=since, end_s=self.now, policy_version=step, bytes=moved,
                )
            )  # fmt: skip
