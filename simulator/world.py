"""The state of a simulation: the clock, the machines' cores, what is finished, and the spans so far."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import msgspec
import simpy

from lab.dataflow import Dataflow
from lab.dealing import Dealer
from lab.library import device as library_device
from lab.placement import Worker
from lab.scenario import Scenario
from lab.targets import hit, taken
from lab.timeline import Span
from profiles.cost import Cost, CostModel
from simulator.ledger import Ledger

if TYPE_CHECKING:
    from lab.faults import Fault
    from lab.scaling import Scaled
    from profiles.iteration import EngineTable
    from simulator.ahead import AheadRun
    from simulator.checkpoints import Store
    from simulator.elastic import Crew, Engines
    from simulator.fleet import EngineRun
    from simulator.network import Network
    from simulator.publication import Publication
    from simulator.streams import Stream
    from simulator.topology import Kind
    from simulator.whole import Tables

Process = Generator[simpy.Event, Any, Any]
_DONE = 1e-12
HOST_CORES = 1 << 20
"""cores of a machine with GPUs, which the library does not count: enough for everybody"""


@dataclass(eq=False)
class _Job:
    """Work under way on a machine's cores."""

    remaining_s: float
    """alone on the machine"""
    threads: int
    worker: Worker
    op: str
    done: simpy.Event


class Cores:
    """Processor sharing of one machine's cores, or of one GPU.

    n active threads on c cores run at c/n of their speed where n > c, and each job is slowed down by the other busy
    cores as its op's profile says. Work is re-timed whenever a job starts or ends.
    """

    def __init__(
        self, env: simpy.Environment, num_cores: int, costs: CostModel, speed: Mapping[str, float] | None = None
    ) -> None:
        """`speed`: by worker, the share of its speed that a straggler keeps; read whenever work is re-timed."""
        self._env, self._num_cores, self._costs = env, num_cores, costs
        self._speed: Mapping[str, float] = {} if speed is None else speed
        self._jobs: list[_Job] = []
        self._rates: list[float] = []
        self._since = 0.0
        self._turn = 0

    def work(self, worker: Worker, op: str, seconds: float) -> Process:
        """Does `seconds` of work, alone measured; ends when it is done. A process that is interrupted leaves the cores."""
        if seconds <= 0:
            return
        job = self._begin(worker, op, seconds)
        try:
            yield job.done
        except simpy.Interrupt:
            self._leave(job)
            raise

    def attempt(self, worker: Worker, op: str, seconds: float) -> Process:
        """The same for a process that may be interrupted; returns the seconds of work that are left then, else 0."""
        job = self._begin(worker, op, seconds)
        try:
            yield job.done
        except simpy.Interrupt:
            self._leave(job)
            return max(job.remaining_s, 0.0)
        return 0.0

    def _begin(self, worker: Worker, op: str, seconds: float) -> _Job:
        threads = self._costs.threads(worker)
        job = _Job(remaining_s=seconds, threads=threads, worker=worker, op=op, done=self._env.event())
        self._advance()
        self._jobs.append(job)
        self._retime()
        return job

    def _leave(self, job: _Job) -> None:
        self._advance()
        if job in self._jobs:  # else it is done, and whoever waits for it has not heard of it yet
            self._jobs.remove(job)
            self._retime()

    def speeds_changed(self) -> None:
        """Work under way goes on at another speed."""
        self._advance()
        self._retime()

    def _advance(self) -> None:
        """Books what every job has done since the last change."""
        elapsed, self._since = self._env.now - self._since, self._env.now
        for job, rate in zip(self._jobs, self._rates, strict=True):
            job.remaining_s -= elapsed * rate

    def _retime(self) -> None:
        threads = sum(job.threads for job in self._jobs)
        share = min(1.0, self._num_cores / threads) if threads else 1.0
        self._rates = [
            share / self._slowdown(job, threads) * self._speed.get(job.worker.name, 1.0) for job in self._jobs
        ]
        self._turn += 1
        if self._jobs:
            wait = min(max(job.remaining_s, 0.0) / rate for job, rate in zip(self._jobs, self._rates, strict=True))
            self._env.process(self._wake(wait, self._turn))

    def _slowdown(self, job: _Job, threads: int) -> float:
        busy = min(threads, self._num_cores) - min(job.threads, self._num_cores)
        return self._costs.slowdown(job.worker, job.op, busy)

    def _wake(self, wait: float, turn: int) -> Process:
        yield self._env.timeout(wait)
        if turn != self._turn:
            return
        self._advance()
        slack = _DONE + 1e-9 * wait + math.ulp(self._env.now)  # late in a run the clock itself is coarser than _DONE
        ended = [job for job in self._jobs if job.remaining_s <= slack]
        self._jobs = [job for job in self._jobs if job not in ended]
        self._retime()
        for job in ended:
            job.done.succeed()


class World:
    """One scenario under way."""

    def __init__(self, scenario: Scenario, dataflow: Dataflow, costs: CostModel) -> None:
        self.scenario, self.dataflow, self.costs = scenario, dataflow, costs
        self.env = simpy.Environment()
        self.spans: list[Span] = []
        self.dealer = Dealer(scenario)
        self.ledger = Ledger(scenario)
        workers = [worker for worker in scenario.workers.values() if not scenario.on_host(worker)]
        self._claims = Counter(device for worker in workers for device in set(worker.devices))
        self._tables: dict[tuple[int, int], Tables] = {}
        self._fresh()
        self.open: dict[str, Lane] = {}
        """stages under way, by the id of their span"""
        self.redone: Counter[str] = Counter()
        """by id of a span, how often what it did was lost"""
        self.speed: dict[str, float] = {}
        """by worker, the share of its speed that it has; 1 where not named"""
        self.writes: dict[str, simpy.Process] = {}
        """by worker, the last write that goes on beside its work"""
        self.first_step = 0
        """the first step of this attempt: a fault may take a run back"""
        self.handed_on: dict[tuple[str, int], str] = {}
        """by iteration of a stage without a barrier: the span during which its last sample came"""
        self.why: dict[str, Callable[[], str]] = {}
        """by stage that takes what comes: what it waits for, in words"""
        self.faults: list[dict[str, Any]] = []
        """what happened, as the header says it"""
        self.on_loss: dict[str, Callable[[Fault], None]] = {}
        """by worker, or `buffer`: who takes care that what a fault took is done again"""
        self.up_at: dict[str, float] = {}
        """by worker that failed, from when on it works again"""
        self.stoppable: list[EngineRun | AheadRun] = []
        """those that a fault may stop in the middle of a sample"""
        self.absent: dict[str, float] = {}
        """by worker that comes back from a fault: since when it does no work"""
        self._degraded: dict[str, float] = {}
        self._since: float | None = 0.0
        self._stopped, self._progress = 0.0, 0.0

    def _fresh(self) -> None:
        """Nothing has started and nothing is under way."""
        runs = [(stage, step) for stage in self.dataflow.nodes for step in self.dataflow.steps(stage)]
        self._started: dict[tuple[str, int], simpy.Event] = {run: self.env.event() for run in runs}
        self._finished: dict[tuple[str, int], simpy.Event] = {run: self.env.event() for run in runs}
        self._streams: dict[tuple[str, str, int], Stream] = {}
        self._cores: dict[str, Cores] = {}

    @cached_property
    def store(self) -> Store:
        """The checkpoints."""
        from simulator.checkpoints import Store

        return Store(self.scenario)

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

    def under_way(self, *stages: str) -> list[tuple[str, int]]:
        """Runs of these stages that have started and not ended."""
        begun = [run for run, event in self._started.items() if event.triggered and run[0] in stages]
        return [run for run in begun if not self._finished[run].triggered]

    def last(self) -> list[simpy.Event]:
        """The ends of all stages' last runs."""
        return list({stage: event for (stage, _), event in self._finished.items()}.values())

    def go_back(self, first_step: int, progress_s: float) -> None:
        """All that is under way ends here and what was done of `first_step` and later steps is lost.

        A new environment starts at the same time, in which only stages of earlier steps have ended.
        """
        done = {run for run, event in self._finished.items() if event.triggered and run[1] < first_step}
        for lane in list(self.open.values()):
            lane.lose()
        for worker, start in self.absent.items():
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
        for links, share in self._degraded.items():
            self.degrade(links, share)
        self._fresh()
        for run in done:
            self._started[run].succeed()
            self._finished[run].succeed()

    def go_on(self) -> float:
        """From now on time is progress again. Returns the seconds for which it was not."""
        stood = self.now - self._stopped if self._since is None else 0.0
        self._since = self.now
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
        self.up_at[worker] = max(self.now + away + fault.start, self.up_at.get(worker, 0.0))
        self.env.process(self._mend(self.scenario.workers[worker]))
        if handler := self.on_loss.get(worker):
            handler(fault)

    def _mend(self, worker: Worker) -> Process:
        """A worker that failed comes back, an engine with the weights of then."""
        engine = worker.work == "generate"
        if engine:
            self.publication.leave(worker)
        yield from self.wait_for(worker.name)
        if engine:
            self.publication.enter(worker, self.publication.version)

    def until_up(self, worker: str) -> Process:
        """Ends when a worker works."""
        while not self.is_up(worker):
            yield self.env.timeout(self.up_at[worker] - self.now)

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
        return self.up_at.get(worker, 0.0) <= self.now

    def away(self) -> frozenset[int]:
        """Engines, by their index, that take no samples: those that failed, and spares whose time has not come."""
        spare = {fault.spare: fault.target for fault in self.scenario.faults if fault.spare is not None}
        engines = self.scenario.team("actor", "generate")
        idle = {name for name, target in spare.items() if target is None or self.is_up(target)}
        down = frozenset() if self.engines is None else self.engines.away()
        return down | frozenset(i for i, engine in enumerate(engines) if not self.is_up(engine.name) or engine.name in idle)

    def working(self) -> list[str]:
        """Names of the engines that take samples."""
        away = self.away()
        return [engine.name for i, engine in enumerate(self.scenario.team("actor", "generate")) if i not in away]

    def next_up(self) -> float:
        """When the next engine that failed works again."""
        engines = [engine.name for engine in self.scenario.team("actor", "generate") if not self.is_up(engine.name)]
        return min(self.up_at[name] for name in engines)

    def wait_for(self, worker: str) -> Process:
        """Ends when a worker that failed works again; shown as its restoring."""
        start = self.now
        while self.up_at.get(worker, 0.0) > self.now:
            yield self.env.timeout(self.up_at[worker] - self.now)
        if self.now > start:
            self.restored(worker, start)

    def restored(self, worker: str, start: float, read_s: float = 0.0, bytes: float = 0.0) -> None:
        """Shows that a worker has been coming back from a fault since `start`, at last by reading its state."""
        chosen, step = self.scenario.workers[worker], self.first_step
        name = self.span_id("restore", step, worker)
        self.redone[f"restore/{step}/{worker}"] += 1
        spans = [(name, "", start, 0.0), (f"{name}#0", "read", self.now - read_s, bytes)]
        for span_id, op, since, moved in spans if read_s else spans[:1]:
            self.spans.append(
                Span(
                    span_id=span_id, cause_ids=(name,) if op else (), resource=worker, step=step, stage="restore", op=op,
                    pool=chosen.pool, worker=worker, start_s=since, end_s=self.now, policy_version=step, bytes=moved,
                )
            )  # fmt: skip

    def span_id(self, stage: str, step: int, worker: str) -> str:
        """`stage/step/worker`, and `~2` for what is done again."""
        name = f"{stage}/{step}/{worker}"
        again = self.redone[name] if self.redone else 0
        return f"{name}~{again + 1}" if again else name

    @cached_property
    def network(self) -> Network:
        """The links of the cluster and the flows on them."""
        from simulator.network import Network
        from simulator.topology import Topology

        return Network(self.env, Topology(self.scenario.hardware))

    @cached_property
    def _crews(self) -> dict[Scaled, Crew]:
        return {}

    def crew(self, work: Scaled) -> Crew:
        """The workers of a work that is scaled."""
        from simulator.elastic import Crew

        return self._crews.setdefault(work, Crew(self, work))

    @cached_property
    def engines(self) -> Engines | None:
        """The engines whose number changes with the load; None where all that are placed run."""
        from simulator.elastic import Engines

        return Engines(self) if "actor.generate" in self.scenario.scaling else None

    @cached_property
    def publication(self) -> Publication:
        """The versions of the weights, and who has them."""
        from simulator.publication import Publication
        from simulator.receiving import receivers

        return Publication(self, receivers(self))

    @property
    def now(self) -> float:
        return float(self.env.now)

    def started(self, stage: str, step: int) -> simpy.Event:
        """The event that a stage of a step has what it needs and begins."""
        return self._started[stage, step]

    def stream(self, source: str, target: str, step: int) -> Stream:
        """Samples on their way between two stages that overlap."""
        from simulator.streams import Stream

        return self._streams.setdefault((source, target, step), Stream(self.env))

    def streams(self, source: str, step: int) -> list[Stream]:
        """The streams that a stage fills in a step; none where all that it makes is handed on together."""
        return [self.stream(source, target, step) for target in self.dataflow.hands_on(source)]

    def tables(self, table: EngineTable, num_seqs: int) -> Tables:
        """An engine table in the forms that whole engines are played with; engines alike share one."""
        from simulator.whole import Tables

        key = (id(table), num_seqs)
        if key not in self._tables:
            self._tables[key] = Tables.of(table, num_seqs)
        return self._tables[key]

    def finished(self, stage: str, step: int) -> simpy.Event:
        """The event that a stage of a step has ended on all its workers."""
        return self._finished[stage, step]

    def cores(self, worker: Worker) -> Cores:
        """What a worker computes on: its machine's cores (of a CPU, or beside GPUs), or its GPU, which others may share."""
        hardware, device = self.scenario.hardware, worker.devices[0]
        cpu = library_device(hardware.node_of(device).device).kind == "cpu"
        host = self.scenario.on_host(worker)
        key = f"{hardware.machine_of(device)} host" if host else hardware.machine_of(device) if cpu else device
        if key not in self._cores:
            number = HOST_CORES if host else hardware.node_of(device).devices if cpu else 1
            self._cores[key] = Cores(self.env, number, self.costs, self.speed)
        return self._cores[key]

    def exclusive(self, worker: Worker) -> bool:
        """Whether a worker has GPUs that nobody else ever works on: then its times are those of its costs."""
        gpu = library_device(self.scenario.hardware.node_of(worker.devices[0]).device).kind == "gpu"
        return gpu and all(self._claims[device] == 1 for device in worker.devices)

    def cost(self, worker: Worker, op: str, quantities: Mapping[str, float]) -> Cost:
        return self.costs.op(worker, op, quantities)

    def spend(self, worker: Worker, op: str, quantities: Mapping[str, float]) -> Process:
        """Does an op that is not shown as a span of its own."""
        yield from self.cores(worker).work(worker, op, self.cost(worker, op, quantities).seconds)


class Lane:
    """One stage of one step on one worker, as it is being played: keeps its spans in the form that a run records."""

    def __init__(self, world: World, stage: str, step: int, worker: Worker) -> None:
        self.world, self.stage, self.step, self.worker = world, stage, step, worker
        self._id, self._stage = world.span_id(stage, step, worker.name), world.dataflow.nodes[stage].stage
        self._start, self._num_ops = world.now, 0
        self.when_lost: Callable[[], dict[str, Any]] = dict
        """what to note on the span if a fault ends it"""
        world.open[self._id] = self

    def op(self, op: str, cost_op: str, quantities: Mapping[str, float], **notes: Any) -> Process:
        """Does an op and records its span."""
        start, cost = self.world.now, self.world.cost(self.worker, cost_op, quantities)
        yield from self.world.cores(self.worker).work(self.worker, cost_op, cost.seconds)
        self.record(op, start, cost.extrapolated, **notes)

    def record(
        self, op: str, start: float, extrapolated: bool, tokens: int = 0, bytes: float = 0.0, **notes: Any
    ) -> None:
        """Records the span of an op that ends now."""
        attrs = notes | ({"extrapolated": True} if extrapolated else {})
        self._add(f"{self._id}#{self._num_ops}", (self._id,), op, start, tokens, bytes, attrs)
        self._num_ops += 1

    def beside(self, op: str, start: float, extrapolated: bool, bytes: float) -> None:
        """Records an op that ends now and went on beside the worker's next stages, on a resource of its own."""
        self.record(op, start, extrapolated, bytes=bytes)
        self.world.spans[-1] = msgspec.structs.replace(self.world.spans[-1], resource=f"{self.worker.name}.{op}")

    def cut(self, **notes: Any) -> None:
        """A fault ends the stage now on this worker; what it handed on before stays, and it goes on in another span."""
        self.end(**notes)
        self.world.redone[self._id.split("~")[0]] += 1

    def lose(self) -> None:
        """A fault ends the stage now on this worker; what it did is lost."""
        self.end(**self.when_lost(), lost=True)
        self.world.redone[self._id.split("~")[0]] += 1

    def end(self, tokens: int = 0, **notes: Any) -> None:
        """The stage ends now on this worker."""
        dataflow = self.world.dataflow
        requirements = dataflow.requirements(self.stage, self.step)
        causes = tuple(
            self.world.span_id(stage, step, name)
            for stage, step in requirements
            if not dataflow.nodes[stage].continuous
            for name in self._involved(stage)
        )
        causes += tuple(self.world.handed_on[run] for run in requirements if run in self.world.handed_on)
        self._add(self._id, causes, "", self._start, tokens, 0.0, notes)
        self.world.open.pop(self._id, None)

    def _involved(self, stage: str) -> tuple[str, ...]:
        """Whose part of a stage that it waited for matters; of its own before, without a barrier, only this worker's."""
        dataflow = self.world.dataflow
        own = stage == self.stage and dataflow.continuous
        return (self.worker.name,) if own else dataflow.nodes[stage].workers

    def _add(
        self,
        span_id: str,
        causes: tuple[str, ...],
        op: str,
        start: float,
        tokens: int,
        bytes: float,
        attrs: dict[str, Any],
    ) -> None:
        version = self.world.dataflow.policy_version(self.stage, self.step)
        self.world.spans.append(
            Span(
                span_id=span_id, cause_ids=causes, resource=self.worker.name, step=self.step, stage=self._stage, op=op,
                pool=self.worker.pool, worker=self.worker.name, start_s=start, end_s=self.world.now,
                policy_version=version, tokens=tokens, bytes=bytes, attrs=attrs,
            )
        )  # fmt: skip
