"""`lab validate`: which sets there are, what each needs, and their results with what they were computed on."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from lab.errors import InputError
from simulator.studies.accuracy import Unavailable, ValidationSet

Half = Literal["even", "odd", "all"]
"""Of sets whose cases are split by the last hex digit of sha256(id): what development may look at, and the rest."""
DATA_VARIABLE = "LAB_VALIDATION_DATA"


@dataclass(frozen=True, kw_only=True)
class Study:
    """One set: the function that predicts its cases, imported when asked for, and what that needs.

    Attributes:
        place: `module:function`; the function takes the data folder where `files` are needed, and `half` where the
            cases are split; it raises Unavailable.
        files: what must be in the data folder; none: the set needs no folder.
    """

    place: str
    files: tuple[str, ...] = ()
    split: bool = False

    def __call__(self, data: Path | None, half: Half) -> ValidationSet:
        missing = [name for name in self.files if data is None or not (data / name).exists()]
        if missing:
            raise Unavailable(f"{missing[0]} is not in {data}")
        module, name = self.place.split(":")
        predict: Callable[..., ValidationSet] = getattr(importlib.import_module(module), name)
        return predict(*((data,) if self.files else ()), **({"half": half} if self.split else {}))


SETS: Mapping[str, Study] = {
    "vllm-runs": Study(place="simulator.studies.engine_runs:engine_runs", files=("vllm_runs",)),
    "silicon-dense": Study(place="simulator.studies.silicon:dense", split=True),
    "silicon-moe": Study(place="simulator.studies.silicon:moe", split=True),
    "memory": Study(place="simulator.studies.memory:published_memory", files=("published_cases.csv",)),
    "this-machine": Study(place="simulator.studies.this_machine:this_machine"),
    "published-training": Study(
        place="simulator.studies.published:published_training", files=("published_cases.csv",), split=True
    ),
    "published-steps": Study(
        place="simulator.studies.published_steps:published_steps", files=("published_cases.csv",), split=True
    ),
    "verl-logs": Study(place="simulator.studies.verl:verl_logs", files=("verl_log_steps.csv",)),
}


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Results by set; why others were skipped; and when, from which commit and on what they were computed."""

    sets: tuple[ValidationSet, ...]
    skipped: Mapping[str, str]
    provenance: Mapping[str, Any]


def validate(names: Iterable[str], data: Path | None, half: Half = "even") -> Validation:
    """Predicts every case of the named sets (none named: all). Raises InputError for a wrong name, half or folder."""
    chosen = _chosen(tuple(names))
    if half not in get_args(Half):
        raise InputError(key="--half", problem=f"there is no half {half!r}", remedy="name even, odd or all")
    if any(SETS[name].files for name in chosen):
        data = data_folder(data)
    sets, skipped = [], {}
    for name in chosen:
        try:
            sets.append(SETS[name](data, half))
        except Unavailable as absent:
            skipped[name] = str(absent)
    return Validation(sets=tuple(sets), skipped=skipped, provenance=provenance() | {"half": half})


def _chosen(names: tuple[str, ...]) -> tuple[str, ...]:
    wrong = [name for name in names if name not in SETS]
    if wrong:
        raise InputError(
            key="--set", problem=f"there is no validation set {wrong[0]!r}", remedy=f"name one of {', '.join(SETS)}"
        )
    return tuple(dict.fromkeys(names)) or tuple(SETS)


def data_folder(given: Path | None) -> Path:
    """The folder with the measurements: the given one, else that of LAB_VALIDATION_DATA. Raises InputError."""
    named = given or (Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None)
    key = "--data" if given or named is None else DATA_VARIABLE
    expected = sorted({name for study in SETS.values() for name in study.files})
    remedy = f"name the folder that holds {', '.join(expected)}, with --data or {DATA_VARIABLE}"
    if named is None:
        raise InputError(key=key, problem="no folder with validation data is named", remedy=remedy)
    if not named.is_dir():
        raise InputError(key=key, problem=f"{named} is no folder", remedy=remedy)
    if not any((named / name).exists() for name in expected):
        raise InputError(key=key, problem=f"{named} holds no validation data", remedy=remedy)
    return named


def provenance() -> dict[str, Any]:
    """When, from which commit, on which machine and with which packages."""
    from profiles.profile import machine

    packages = ("rlhf-lab", "numpy", "pandas", "scipy", "aiconfigurator-core")
    versions = {name: version for name in packages if (version := _version(name))}
    return {
        "date": datetime.now().astimezone().isoformat(timespec="minutes"),
        "commit": commit(),
        "machine": machine(),
        "python": platform.python_version(),
        "packages": versions,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """The commit of this source tree, with `+` where files differ from it; empty where it is no checkout."""
    folder = Path(__file__).resolve().parent
    try:
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if head and _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _git(folder: Path, *arguments: str) -> str:
    answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10)
    return answer.stdout.strip() if answer.returncode == 0 else ""
