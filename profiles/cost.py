"""CostModel: profiles and a scenario to seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lab.placement import Worker
from lab.scenario import Scenario
from profiles.formula import PARALLEL, terms
from profiles.profile import Profile
from profiles.roofline import Roofline


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
        self._asked = dict.fromkeys(profiles, 0.0)
        self._extrapolated = dict.fromkeys(profiles, 0.0)
        self._unmeasured: dict[str, set[str]] = {device: set() for device in profiles}

    def op(self, worker: Worker, op: str, quantities: Mapping[str, float]) -> Cost:
        """Seconds of one op on a worker, alone on its machine.

        Quantities are those of `lab.measurement.OPS`, whole: a worker's parallelism divides them here.
        """
        profile = self._profile_of[worker.name]
        fitted = profile.ops.get(op)
        if fitted is None:
            if profile.kind == "measured":
                self._unmeasured[profile.device].add(op)
            return self._told(profile.device, Cost(self._roofline.seconds(worker, op, quantities), True))
        values = terms(op, quantities)
        inside = self._known[worker.name] and fitted.covers(values)
        if (threads := self.threads(worker)) > 1:
            inside = inside and not PARALLEL.intersection(values)
            values = {name: value / threads if name in PARALLEL else value for name, value in values.items()}
        return self._told(profile.device, Cost(fitted.seconds(values), not inside))

    def threads(self, worker: Worker) -> int:
        """Cores that a worker claims while it computes; a GPU is claimed whole."""
        return self._roofline.threads(worker)

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
        """What a timeline's header says of the profiles: name, share of the asked time extrapolated, ops unmeasured."""
        return {
            device: {
                "name": profile.name,
                "kind": profile.kind,
                "extrapolated_share": self._extrapolated[device] / self._asked[device] if self._asked[device] else 0.0,
                "unmeasured": sorted(self._unmeasured[device]),
            }
            for device, profile in self._profiles.items()
        }

    def _told(self, device: str, cost: Cost) -> Cost:
        self._asked[device] += cost.seconds
        self._extrapolated[device] += cost.seconds if cost.extrapolated else 0.0
        return cost

    def _kind(self, worker: Worker) -> str:
        return self._scenario.hardware.node_of(worker.devices[0]).device

    def _measured_model(self, worker: Worker) -> bool:
        """Whether the worker's architecture and dtype are what its profile measured."""
        from lab.library import model as library_model

        if worker.role == "reward" and self._scenario.place.reward_score.kind == "function":
            return True
        profile = self._profile_of[worker.name]
        same = any(library_model(name) == self._scenario.spec(worker.role) for name in profile.models)
        return same and self._scenario.model(worker.role).dtype == profile.source.get("dtype", "float32")
