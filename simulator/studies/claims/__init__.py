"""What the two founding documents claim in numbers, each judged by simulations.

`claims.yaml` lists the claims; every one names its judge, a function of a `Bench` that plays scenarios of the library,
changed here and there, and says what came out. A claim that does not hold is a result, not an error.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from lab.errors import InputError
from lab.load import load
from lab.metrics import summarise
from lab.scenario import Scenario
from lab.timeline import Timeline
from profiles.profile import Profile, datasheet, unmeasured
from simulator.run import simulate

SCENARIOS = Path(__file__).resolve().parents[3] / "scenarios"
Verdict = Literal["holds", "does not hold", "partly", "cannot be judged"]
VERDICTS: tuple[Verdict, ...] = ("holds", "partly", "does not hold", "cannot be judged")
JUDGES = (
    "schedules", "asynchronous", "rollout", "devices", "training", "parts", "network", "sites", "scoring", "scale", "sampling",
    "faults",
)  # fmt: skip
"""modules of this folder with a function for every claim of theirs"""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What became of a claim.

    Attributes:
        value: what the simulation gives, in words and with its unit.
        numbers: the same for programs, by name.
        reason: why the verdict is that, in a sentence or two.
    """

    value: str
    verdict: Verdict
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim: what is said, where, and what judges it. `scenarios` are those that it is judged on."""

    id: str
    claim: str
    source: str
    scenarios: tuple[str, ...]
    judge: Callable[[Bench], Judgement]


@dataclass(frozen=True, kw_only=True)
class Played:
    """A scenario and what its simulation gave."""

    scenario: Scenario
    timeline: Timeline
    summary: dict[str, Any]

    @property
    def step_s(self) -> float:
        """Seconds of a steady step."""
        return float(self.summary["step_s"]["mean"])

    def busy_s(self, stage: str) -> float:
        """Seconds of a step in which a stage runs; 0 where it does not exist."""
        return float(self.summary["stages"].get(stage, {}).get("busy_s_per_step", 0.0))


class Bench:
    """Plays scenarios of the library, each state of one once.

    Costs come from the profiles that the lab comes with, so that all machines agree.
    """

    def __init__(self, folder: Path = SCENARIOS, costs: Callable[[str], Profile] = unmeasured) -> None:
        self._folder, self._costs = folder, costs
        self._played: dict[str, Played] = {}
        self._loaded = cache(self._load)

    @cached_property
    def datasheets(self) -> Bench:
        """The same with costs from datasheets alone: for devices and number formats of which nothing was measured."""
        return Bench(self._folder, datasheet)

    def scenario(self, name: str, changes: Mapping[str, Any] | None = None) -> Scenario:
        """A scenario of the library with keys changed: values by path, whose parts are separated by `/`.

        Raises InputError where the folder has no such scenario, ValidationError where the change is refused.
        """
        given = self._loaded(name)
        return given if not changes else changed(given, changes)

    def play(self, name: str, changes: Mapping[str, Any] | None = None) -> Played:
        """What such a scenario does."""
        return self.run(self.scenario(name, changes))

    def run(self, scenario: Scenario) -> Played:
        if scenario.digest not in self._played:
            hardware, pools = scenario.hardware, scenario.devices.values()
            used = {hardware.node_of(device).device for devices in pools for device in devices}
            timeline = simulate(scenario, {kind: self._costs(kind) for kind in sorted(used)})
            summary = summarise(timeline)
            self._played[scenario.digest] = Played(scenario=scenario, timeline=timeline, summary=summary)
        return self._played[scenario.digest]

    def _load(self, name: str) -> Scenario:
        path = self._folder / f"{name}.yaml"
        if not path.exists():
            problem = f"there is no {path}"
            raise InputError(file=str(path), key=None, problem=problem, remedy="run from a checkout with its scenarios")
        return load(path)


def changed(scenario: Scenario, changes: Mapping[str, Any]) -> Scenario:
    """A copy with values set at paths such as `place/actor.generate/0/engines`, checked like a file."""
    data = scenario.model_dump(mode="json", by_alias=True)
    for path, value in changes.items():
        *folders, last = path.split("/")
        place: Any = data
        for name in folders:
            place = place[int(name)] if isinstance(place, list) else place.setdefault(name, {})
        place[int(last) if isinstance(place, list) else last] = value
    return Scenario.model_validate_json(json.dumps(data))


def size(amount: float) -> str:
    """Bytes for a person, in decimal units."""
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if amount >= unit:
            return f"{amount / unit:,.1f} {name}"
    return f"{amount / 1e3:.1f} kB"


@cache
def claims() -> tuple[Claim, ...]:
    """All claims, in the order of the file."""
    listed = yaml.safe_load((resources.files("simulator.studies.claims") / "claims.yaml").read_text(encoding="utf-8"))
    judges: dict[str, Callable[[Bench], Judgement]] = {}
    for name in JUDGES:
        judges |= importlib.import_module(f"simulator.studies.claims.{name}").JUDGES
    documents = listed["documents"]
    return tuple(
        Claim(
            id=row["id"], claim=row["claim"], source=f"{documents[row['document']]}, {row['section']}",
            scenarios=tuple(row["scenarios"]), judge=judges[row["id"]],
        )
        for row in listed["claims"]
    )  # fmt: skip


def chosen(ids: Sequence[str]) -> tuple[Claim, ...]:
    """The claims of these ids; all where none is given. Raises InputError for an unknown one."""
    known = {claim.id: claim for claim in claims()}
    for name in ids:
        if name not in known:
            from lab.library import closest

            close = " or ".join(closest(name, known)) or ", ".join(known)
            raise InputError(key="--only", problem=f"there is no claim {name!r}", remedy=f"did you mean {close}?")
    return tuple(known[name] for name in ids) if ids else claims()


def judge(claim: Claim, bench: Bench) -> Judgement:
    """Plays what a claim needs and judges it."""
    return claim.judge(bench)
