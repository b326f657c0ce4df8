"""The state of a simulation: the clock, the machines' cores, what is finished, and the spans so far."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import simpy

from lab.dataflow import Dataflow
from lab.dealing import Dealer
from lab.library import device as library_device
from lab.placement import Worker
from lab.scenario import Scenario
from lab.timeline import Span
from profiles.cost import Cost, CostModel
from simulator.ledger import Ledger

if TYPE_CHECKING:
    from simulator.network import Network
    from simulator.streams import Stream

Process = Generator[simpy.Event, Any, Any]
_DONE = 1e-12


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

    def __init__(self, env: simpy.Environment, num_cores: int, costs: CostModel) -> None:
        self._env, self._num_cores, self._costs = env, num_cores, costs
        self._jobs: list[_Job] = []
        self._rates: list[float] = []
        self._since = 0.0
        self._turn = 0

    def work(self, worker: Worker, op: str, seconds: float) -> Process:
        """Does `seconds` of work, alone measured; ends when it is done."""
        if seconds <= 0:
            return
        threads = self._costs.threads(worker)
        job = _Job(remaining_s=seconds, threads=threads, worker=worker, op=op, done=self._env.event())
        self._advance()
        self._jobs.append(job)
        self._retime()
        yield job.done

    def _advance(self) -> None:
        """Books what every job has done since the last change."""
        elapsed, self._since = self._env.now - self._since, self._env.now
        for job, rate in zip(self._jobs, self._rates, strict=True):
            job.remaining_s -= elapsed * rate

    def _retime(self) -> None:
        threads = sum(job.threads for job in self._jobs)
        share = min(1.0, self._num_cores / threads) if threads else 1.0
        self._rates = [share / self._slowdown(job, threads) for job in self._jobs]
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
        runs = [(stage, step) for stage in dataflow.nodes for step in dataflow.steps(stage)]
        self._started: dict[tuple[str, int], simpy.Event] = {run: self.env.event() for run in runs}
        self._finished: dict[tuple[str, int], simpy.Event] = {run: self.env.event() for run in runs}
        self._streams: dict[tuple[str, str, int], Stream] = {}
        self._cores: dict[str, Cores] = {}

    @cached_property
    def network(self) -> Network:
        """The links of the cluster and the flows on them."""
        from simulator.network import Network
        from simulator.topology import Topology

        return Network(self.env, Topology(self.scenario.hardware))

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
        targets = [edge.target for edge in self.dataflow.edges if edge.source == source and edge.streams]
        return [self.stream(source, target, step) for target in targets]

    def finished(self, stage: str, step: int) -> simpy.Event:
        """The event that a stage of a step has ended on all its workers."""
        return self._finished[stage, step]

    def cores(self, worker: Worker) -> Cores:
        """What a worker computes on: its machine's cores, or its own GPU, which a resident pool shares."""
        hardware, device = self.scenario.hardware, worker.devices[0]
        cpu = library_device(hardware.node_of(device).device).kind == "cpu"
        key = hardware.machine_of(device) if cpu else device
        if key not in self._cores:
            number = hardware.node_of(device).devices if cpu else 1
            self._cores[key] = Cores(self.env, number, self.costs)
        return self._cores[key]

    def cost(self, worker: Worker, op: str, quantities: Mapping[str, float]) -> Cost:
        return self.costs.op(worker, op, quantities)

    def spend(self, worker: Worker, op: str, quantities: Mapping[str, float]) -> Process:
        """Does an op that is not shown as a span of its own."""
        yield from self.cores(worker).work(worker, op, self.cost(worker, op, quantities).seconds)


class Lane:
    """One stage of one step on one worker, as it is being played: keeps its spans in the form that a run records."""

    def __init__(self, world: World, stage: str, step: int, worker: Worker) -> None:
        self.world, self.stage, self.step, self.worker = world, stage, step, worker
        self._id = f"{stage}/{step}/{worker.name}"
        self._start, self._num_ops = world.now, 0

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

    def end(self, tokens: int = 0, **notes: Any) -> None:
        """The stage ends now on this worker."""
        dataflow = self.world.dataflow
        causes = tuple(
            f"{stage}/{step}/{name}"
            for stage, step in dataflow.requirements(self.stage, self.step)
            for name in dataflow.nodes[stage].workers
        )
        self._add(self._id, causes, "", self._start, tokens, 0.0, notes)

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
                span_id=span_id, cause_ids=causes, resource=self.worker.name, step=self.step, stage=self.stage, op=op,
                pool=self.worker.pool, worker=self.worker.name, start_s=start, end_s=self.world.now,
                policy_version=version, tokens=tokens, bytes=bytes, attrs=attrs,
            )
        )  # fmt: skip
