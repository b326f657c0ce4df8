"""The state of a simulation: the clock, the machines' cores, what is finished, and the spans so far."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
import simpy

from lab.collecting import Pushed
from lab.dataflow import Dataflow
from lab.dealing import Dealer
from lab.fates import Fates
from lab.library import device as library_device
from lab.placement import Worker
from lab.policies.decision import Decision
from lab.scenario import Scenario
from lab.timeline import Span
from profiles.cost import Cost, CostModel
from simulator.cores import HOST_CORES, Cores, Process
from simulator.outages import Outages

if TYPE_CHECKING:
    from lab.scaling import Scaled
    from profiles.iteration import EngineTable
    from simulator.checkpoints import Store
    from simulator.elastic import Crew, Engines
    from simulator.network import Network
    from simulator.publication import Publication
    from simulator.streams import Stream
    from simulator.whole import Tables

__all__ = ["Cores", "Lane", "Process", "World"]


class World(Outages):
    """One scenario under way."""

    def __init__(self, scenario: Scenario, dataflow: Dataflow, costs: CostModel) -> None:
        self.scenario, self.dataflow, self.costs = scenario, dataflow, costs
        self.env = simpy.Environment()
        self.spans: list[Span] = []
        self.dealer = Dealer(scenario)
        self.ledger = Fates(scenario)
        workers = [worker for worker in scenario.workers.values() if not scenario.on_host(worker)]
        self._claims = Counter(device for worker in workers for device in set(worker.devices))
        self._tables: dict[tuple[int, int], Tables] = {}
        self._fresh()
        self._begin()
        self.open: dict[str, Lane] = {}
        """stages under way, by the id of their span"""
        self._span_ids: dict[tuple[str, int, int], tuple[str, ...]] = {}
        self._begun: set[str] = set()
        self.at_end: dict[str, Callable[[], None]] = {}
        """by stage without a barrier: what there is to note when the run is over"""
        self.decided: dict[tuple[str, int], Decision[Any, Any]] = {}
        self.turned: dict[int, list[Pushed]] = {}
        """by batch, decisions of the buffer to push back, or no longer to"""
        """by iteration of a stage without a barrier: the last decision on what it hands on"""
        self.handed_on: dict[tuple[str, int], str] = {}
        """by iteration of a stage without a barrier: the span during which its last sample came"""
        self.why: dict[str, Callable[[], str]] = {}
        """by stage that takes what comes: what it waits for, in words"""

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

    def under_way(self, *stages: str) -> list[tuple[str, int]]:
        """Runs of these stages that have started and not ended."""
        begun = [run for run, event in self._started.items() if event.triggered and run[0] in stages]
        return [run for run in begun if not self._finished[run].triggered]

    def last(self) -> list[simpy.Event]:
        """The ends of all stages' last runs."""
        return list({stage: event for (stage, _), event in self._finished.items()}.values())

    def span_id(self, stage: str, step: int, worker: str) -> str:
        """`stage/step/worker`, and `~2` for what is done again."""
        name = f"{stage}/{step}/{worker}"
        again = self.redone[name] if self.redone else 0
        return f"{name}~{again + 1}" if again else name

    def new_id(self, stage: str, step: int, worker: str) -> str:
        """The id of a span that begins now: what a worker does again for a step has one of its own."""
        while (name := self.span_id(stage, step, worker)) in self._begun:
            self.redone[f"{stage}/{step}/{worker}"] += 1
        self._begun.add(name)
        return name

    def span_ids(self, stage: str, step: int) -> tuple[str, ...]:
        """Of all workers of a node."""
        key = (stage, step, self.redone.total())
        if key not in self._span_ids:
            names = self.dataflow.nodes[stage].workers
            self._span_ids[key] = tuple(self.span_id(stage, step, name) for name in names)
        return self._span_ids[key]

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

    def on_cpu(self, worker: Worker) -> bool:
        """Whether a worker computes on cores of a CPU."""
        return library_device(self.scenario.hardware.node_of(worker.devices[0]).device).kind == "cpu"

    def cores(self, worker: Worker) -> Cores:
        """What a worker computes on: its machine's cores (of a CPU, or beside GPUs), or its GPU, which others may share."""
        hardware, device, cpu = self.scenario.hardware, worker.devices[0], self.on_cpu(worker)
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
        self._id, self._stage = world.new_id(stage, step, worker.name), world.dataflow.nodes[stage].stage
        self._start, self._num_ops = world.now, 0
        self._until = math.inf
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
        if start >= self._until:
            return
        attrs = notes | ({"extrapolated": True} if extrapolated else {})
        self._add(f"{self._id}#{self._num_ops}", (self._id,), op, start, tokens, bytes, attrs)
        self._num_ops += 1

    def beside(self, op: str, start: float, extrapolated: bool, bytes: float) -> None:
        """Records an op that ends now and went on beside the worker's next stages, on a resource of its own."""
        self.record(op, start, extrapolated, bytes=bytes)
        self.world.spans[-1] = msgspec.structs.replace(self.world.spans[-1], resource=f"{self.worker.name}.{op}")

    def fail(self) -> None:
        """The worker fails now: whatever is recorded later ended with it."""
        self._until = min(self.world.now, self._until)

    def cut(self, **notes: Any) -> None:
        """A fault ends the stage now on this worker; what it handed on before stays, and it goes on in another span."""
        self.end(**notes)
        self.world.redone[self._id.split("~")[0]] += 1

    def lose(self) -> None:
        """A fault ends the stage now on this worker; what it did is lost."""
        self.end(lost=True)
        self.world.redone[self._id.split("~")[0]] += 1

    def end(self, tokens: int = 0, **notes: Any) -> None:
        """The stage ends now on this worker."""
        dataflow = self.world.dataflow
        requirements = dataflow.requirements(self.stage, self.step)
        ended = [run for run in requirements if not dataflow.nodes[run[0]].continuous]
        causes = tuple(chain.from_iterable(self._involved(*run) for run in ended))
        causes += tuple(self.world.handed_on[run] for run in requirements if run in self.world.handed_on)
        self._add(self._id, causes, "", self._start, tokens, 0.0, notes)
        self.world.open.pop(self._id, None)

    def _involved(self, stage: str, step: int) -> tuple[str, ...]:
        """The spans of a run that it waited for; of its own before, without a barrier, only this worker's."""
        if stage == self.stage and self.world.dataflow.continuous:
            return (self.world.span_id(stage, step, self.worker.name),)
        return self.world.span_ids(stage, step)

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
                pool=self.worker.pool, worker=self.worker.name, start_s=start,
                end_s=min(self.world.now, self._until), policy_version=version, tokens=tokens, bytes=bytes, attrs=attrs,
            )
        )  # fmt: skip
