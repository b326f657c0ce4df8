"""CostModel: profiles and a scenario to seconds."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lab.placement import Worker
from lab.scenario import Scenario
from profiles.formula import MERGED, PARALLEL, terms
from profiles.profile import OpProfile, Profile
from profiles.roofline import Roofline, backward_factor, offloaded_seconds, whole_pass

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from profiles.iteration import EngineTable, Iteration
    from profiles.layout import Layout
    from profiles.passes import PassTable

PASSES = frozenset({"forward", "backward", "logprob"})


class Cost(NamedTuple):
    """Time of an op alone on its machine, and whether that lies outside what was measured."""

    seconds: float
    extrapolated: bool


class CostModel:
    """Costs of a scenario's ops: from the device's profile where it has the op, else from the datasheet.

    It counts what it was asked for, so that a run can say how much of its time is extrapolated.
    """

    def __init__(self, scenario: Scenario, profiles: Mapping[str, Profile]) -> None:
        self._scenario, self._profiles = scenario, profiles
        self._roofline = Roofline(scenario=scenario)
        self._profile_of = {name: profiles[self._kind(worker)] for name, worker in scenario.workers.items()}
        self._known = {name: self._measured_model(worker) for name, worker in scenario.workers.items()}
        self._tables: dict[Hashable, EngineTable] = {}
        self._passes: dict[str, PassTable | None] = {}
        self._asked = dict.fromkeys(profiles, 0.0)
        self._extrapolated = dict.fromkeys(profiles, 0.0)
        self._notes: dict[str, set[str]] = {device: set() for device in profiles}
        self._unmeasured: dict[str, set[str]] = {device: set() for device in profiles}

    def op(self, worker: Worker, op: str, quantities: Mapping[str, float]) -> Cost:
        """Seconds of one op on a worker, alone on its machine.

        Quantities are those of `lab.measurement.OPS`, whole: a worker's parallelism divides them here. Raises
        ValueError for an op there is not.
        """
        fitted, adapted = self._profile_of[worker.name].ops.get(op), self._adapted(worker, op, quantities)
        if fitted is None:
            return self.told(worker, op, Cost(self._unfitted(worker, op, adapted), True))
        return self.told(worker, op, self._fitted(worker, op, fitted, adapted))

    def several(self, worker: Worker, op: str, columns: Mapping[str, NDArray[np.float64]]) -> Cost:
        """Seconds of many ops of one kind in all, and whether any lies outside what was measured; columns are (ops,)."""
        if self._profile_of[worker.name].ops.get(op) is None and (table := self._kernel_table(worker, op)) is not None:
            seconds = self._pass(worker, op, self._adapted(worker, op, columns), table)
            return self.told(worker, op, Cost(float(seconds.sum()), True))
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        costs = [self.op(worker, op, dict(zip(columns, row, strict=True))) for row in rows]
        return Cost(sum(cost.seconds for cost in costs), any(cost.extrapolated for cost in costs))

    def _unfitted(self, worker: Worker, op: str, quantities: Mapping[str, float]) -> float:
        """A pass from the kernels of a GPU's profile, where it has some; all else from the datasheet."""
        if (table := self._kernel_table(worker, op)) is None:
            return self._roofline.seconds(worker, op, quantities)
        return float(self._pass(worker, op, quantities, table))

    def _kernel_table(self, worker: Worker, op: str) -> PassTable | None:
        """What a pass of a GPU goes by where it was not measured as a whole."""
        return self._pass_table(worker) if op in PASSES and self._roofline.layout(worker).device.kind == "gpu" else None

    def _pass(self, worker: Worker, op: str, quantities: Mapping[str, Any], table: PassTable) -> Any:
        """Seconds of one pass, or of many, (passes,)."""
        layout, back = self._roofline.layout(worker), op == "backward"
        times = backward_factor(layout) - 1.0 if back else 1.0
        whole = whole_pass(layout, quantities, table.work(op, quantities), times=times)
        return whole + (offloaded_seconds(layout) if back else 0.0)

    def _pass_table(self, worker: Worker) -> PassTable | None:
        """Of the worker's team, whose members are alike; None where the device's profile has no kernels."""
        from profiles import tables

        team = f"{worker.role}.{worker.work}"
        if team not in self._passes:
            kernels = tables.kernels_of(self._profile_of[worker.name])
            if kernels is not None:
                from profiles.passes import table

                self._passes[team] = table(self._roofline.layout(worker), kernels)
            else:
                self._passes[team] = None
        return self._passes[team]

    def engine_table(self, worker: Worker) -> EngineTable:
        """Times of a rollout engine's iterations, for one of its data-parallel copies.

        From what was fitted on this device kind, else from its profile's kernels (which may be a relative's), else from
        the datasheet.
        """
        kind = self._alike(worker)
        if kind not in self._tables:
            self._tables[kind] = self._engine_table(worker)
        return self._tables[kind]

    def _alike(self, worker: Worker) -> Hashable:
        """Equal for workers whose iterations take equally long: the same work, spread alike over the same hardware."""
        hardware = self._scenario.hardware
        nodes = tuple(hardware.node_of(device).name for device in worker.devices)
        machines = [hardware.machine_of(device) for device in worker.devices]
        spread = tuple(machines.index(machine) for machine in machines)
        return (
            worker.role,
            worker.work,
            worker.parallelism,
            worker.dtype,
            worker.kv_dtype,
            worker.threads,
            nodes,
            spread,
        )

    def _engine_table(self, worker: Worker) -> EngineTable:
        from profiles import tables

        profile, layout = self._profile_of[worker.name], self._roofline.layout(worker)
        if (fitted := profile.ops.get("engine_step")) is not None:
            return tables.of_fit(layout, fitted, measured=self._known[worker.name])
        if kernels := tables.kernels_of(profile):
            table = tables.of_kernels(layout, kernels)
            self._notes[profile.device] |= {*kernels.notes, *(profile.notes if profile.kind == "datasheet" else ())}
            return table if profile.kind == "measured" else replace(table, measured=False)
        return self._roofline.engine_table(worker)

    def iterations(self, worker: Worker, seconds: float, ends: tuple[Iteration, Iteration]) -> Cost:
        """The cost of engine iterations that take so long by the worker's table, the first and the last of them given."""
        table = self.engine_table(worker)
        return self.told(worker, "engine_step", Cost(seconds, not all(table.covers(end) for end in ends)))

    def threads(self, worker: Worker) -> int:
        """Cores that a worker claims while it computes; a GPU is claimed whole."""
        return self._roofline.threads(worker)

    def measured(self, worker: Worker, op: str) -> bool:
        """Whether an op's time comes from the profile of the worker's device, not from the datasheet."""
        return op in self._profile_of[worker.name].ops

    def layout(self, worker: Worker) -> Layout:
        """Where a worker stands."""
        return self._roofline.layout(worker)

    def slowdown(self, worker: Worker, op: str, neighbours: float) -> float:
        """How much slower an op runs beside so many other busy cores of its machine; linear between whole numbers."""
        fitted = self._profile_of[worker.name].ops.get(op)
        if fitted is None or not fitted.interference or neighbours <= 0:
            return 1.0
        steps = (1.0, *fitted.interference)
        below = min(int(neighbours), len(steps) - 1)
        above = min(below + 1, len(steps) - 1)
        return steps[below] + (steps[above] - steps[below]) * (min(neighbours, len(steps) - 1) - below)

    def header_profiles(self) -> dict[str, Any]:
        """What a timeline's header says of the profiles: name, share of the asked time extrapolated, ops unmeasured.

        `notes`, where there are any: which kernels stand for others that were not measured.
        """
        return {
            device: {
                "name": profile.name,
                "kind": profile.kind,
                "extrapolated_share": self._extrapolated[device] / self._asked[device] if self._asked[device] else 0.0,
                "unmeasured": sorted(self._unmeasured[device]),
            }
            | ({"notes": sorted(self._notes[device])} if self._notes[device] else {})
            for device, profile in self._profiles.items()
        }

    def told(self, worker: Worker, op: str, cost: Cost) -> Cost:
        """The cost, counted in what `header_profiles` says; for costs that come from an `EngineTable`."""
        profile = self._profile_of[worker.name]
        self._asked[profile.device] += cost.seconds
        self._extrapolated[profile.device] += cost.seconds if cost.extrapolated else 0.0
        known = op in profile.ops or (op == "engine_step" and profile.kernels)
        if not known and profile.kind == "measured":
            self._unmeasured[profile.device].add(op)
        return cost

    def _fitted(self, worker: Worker, op: str, fitted: OpProfile, quantities: Mapping[str, float]) -> Cost:
        """One device was measured: more devices divide its work, and their talk comes from the datasheet; threads divide it
        by the speed-up that was measured, else by their number."""
        values = {name: v for name, v in terms(op, quantities).items() if name in fitted.ranges or name not in MERGED}
        inside = self._known[worker.name] and fitted.covers(values)
        spread = worker.parallelism
        devices = spread.devices if op in PASSES or op == "engine_step" else 1
        shared = devices * fitted.speedup(self.threads(worker))
        if shared > 1:
            known = devices == 1 and self.threads(worker) - 1 <= len(fitted.threads)
            inside = inside and (known or not PARALLEL.intersection(values))
            values = {name: value / shared if name in PARALLEL else value for name, value in values.items()}
        if op == "optimizer" and spread.devices > 1:
            values["parameters"] *= self._roofline.layout(worker).share
            inside = False
        talk = self._roofline.talk(worker, op, quantities) if devices > 1 or spread.expert > 1 else 0.0
        return Cost(fitted.seconds(values) + talk, not inside)

    def _adapted(self, worker: Worker, op: str, quantities: Mapping[str, Any]) -> Mapping[str, Any]:
        """With adapters a pass does more products, and its backward pass leaves out the gradients of frozen weights."""
        lora = self._scenario.model(worker.role).lora if op in (*PASSES, "engine_step") else None
        if lora is None:
            return quantities
        products = self._scenario.update.products if op == "backward" else 0.0
        return lora.adapted(self._scenario.spec(worker.role), quantities, products)

    def _kind(self, worker: Worker) -> str:
        return self._scenario.hardware.node_of(worker.devices[0]).device

    def _measured_model(self, worker: Worker) -> bool:
        """Whether the worker's architecture and dtype are what its profile measured."""
        from lab.library import model as library_model

        if worker.role == "reward" and worker.work == "score" and self._scenario.place.reward_function:
            return True
        profile = self._profile_of[worker.name]
        if self._scenario.model(worker.role).lora is not None:
            passes = profile.ops.get("forward")
            adapters = passes.ranges.get("adapter_values") if worker.work == "train" and passes is not None else None
            if adapters is None or not adapters.high:
                return False
        same = any(library_model(name) == self._scenario.spec(worker.role) for name in profile.models)
        return same and worker.dtype == profile.source.get("dtype", "float32")
