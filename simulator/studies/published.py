"""Training and scoring stages that others published: micro-benchmarks of trainers, and stage times of whole runs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.errors import InputError
from lab.library import devices as library_devices
from lab.library import models as library_models
from simulator.studies.accuracy import LARGE_MISS, Row, Rule, ValidationSet
from simulator.studies.training import Trainer

if TYPE_CHECKING:
    import pandas as pd

FILE = "published_cases.csv"
COLUMNS = (
    "case_id", "algorithm", "actor_model", "gpu_type", "train_gpus", "gpus_total", "train_parallel", "resp_len_max",
    "prompt_len_mean", "resp_len_mean", "seqs_per_step", "optimizer_steps_per_step", "quantity", "value", "unit",
    "usable", "notes",
)  # fmt: skip
MICROBATCH = "train micro-batch time"
STAGES = {
    "update_actor time": ("actor", "update"),
    "update_critic time": ("critic", "update"),
    "old_log_prob time": ("actor", "scoring"),
    "ref log_prob time": ("actor", "scoring"),
    "critic values time": ("critic", "scoring"),
}
HOST_STAGES = ("reward time", "advantage time")
DERIVED = ("training MFU", "actor training MFU", "train throughput total")
ASSUMED_OF_MICROBATCHES = (
    "one optimizer step per micro-batch",
    "one sequence fills the packed length",
    "ZeRO-3 as FSDP2",
    "moving activations off the device costs no time",
)
Case = Mapping[str, Any]


@cache
def reading() -> dict[str, Any]:
    """How sources are read: `published.yaml`."""
    import yaml

    text = resources.files("simulator.studies").joinpath("published.yaml").read_text(encoding="utf-8")
    record: dict[str, Any] = yaml.safe_load(text)
    return record


def published_training(data: Path, half: str = "all") -> ValidationSet:
    """One row per published figure of the half; those that are no training or scoring stage are excluded by a rule."""
    rules = tuple(Rule(id=name, sentence=sentence) for name, sentence in reading()["rules"].items())
    rows = tuple(_row(case) for case in cases(data / FILE) if within(case, half))
    notes = (
        (
            "no training was measured on these devices: passes are put together from the kernels of engines, with stated "
            "constants for what training adds to them"
        ),
        (
            "cases are split by the last hex digit of sha256(case_id); not blind on the even half, to which constants of "
            "`profiles/passes.py` and `profiles/roofline.py` were fitted on 30 November 2026"
        ),
        "public reruns of one configuration differ by about 5 % (8B) to 20 % (70B)",
    )
    return ValidationSet(
        name="published-training", title="published training and scoring stages", rows=rows, rules=rules, notes=notes
    )


def within(case: Case, half: str) -> bool:
    """Whether a case is of a half: all its figures are, or none."""
    even = hashlib.sha256(str(case["case_id"]).encode()).hexdigest()[-1] in "02468ace"
    return half == "all" or even == (half == "even")


def cases(path: Path) -> Iterator[Case]:
    """The figures of a file. Raises InputError naming the first column that is absent."""
    import pandas as pd

    table: pd.DataFrame = pd.read_csv(path)
    for column in COLUMNS:
        if column not in table:
            raise InputError(file=str(path), key=column, problem="there is no such column", remedy="restore it")
    for record in table.to_dict("records"):
        yield {
            str(key): None if isinstance(value, float) and value != value else value for key, value in record.items()
        }


def _row(case: Case) -> Row:
    excluded = exclusion(case)
    predicted, assumed = (None, ()) if excluded else prediction(case)
    measured = float(case["value"])
    large = predicted is not None and abs(predicted / measured - 1) > LARGE_MISS
    return Row(
        case=case["case_id"],
        quantity=quantity(case),
        predicted=predicted,
        measured=measured,
        unit=case["unit"],
        assumed=assumed,
        reason=reason(case) if large else "",
        excluded=excluded,
    )


def reason(case: Case) -> str:
    """Why a large miss of this figure happens, where the sources let one see it."""
    for known in reading()["reasons"]:
        if re.search(known["cases"], case["case_id"]) and re.search(known["quantity"], quantity(case)):
            return str(known["reason"])
    return ""


def quantity(case: Case) -> str:
    """The published figure's name without what stands in brackets."""
    return re.sub(r" *\(.*", "", case["quantity"])


def exclusion(case: Case) -> str:
    """Id of the first rule that takes the figure out; empty: it is judged."""
    name, microbatch = quantity(case), case["quantity"].startswith(MICROBATCH)
    checks = {
        "inconsistent": "INTERNALLY INCONSISTENT" in (case["notes"] or ""),
        "not-full": case["usable"] != "full",
        "memory": name == "peak memory allocated",
        "same-measurement": name in DERIVED,
        "host-stage": name in HOST_STAGES,
        "not-a-training-stage": not microbatch and name not in STAGES and not name.startswith("training time"),
        "layout-not-stated": not microbatch and case["case_id"] not in reading()["runs"],
        "unknown-model": entry(case, "models", "actor_model") not in library_models(),
        "unknown-device": entry(case, "devices", "gpu_type") not in library_devices(),
    }
    return next((rule for rule, applies in checks.items() if applies), "")


def entry(case: Case, kind: str, column: str) -> str:
    """The library's name for what a source calls a model or a GPU; empty where the reading does not know it."""
    known: dict[str, str] = reading()[kind]
    found = [words for words in known if str(case[column] or "").startswith(words)]
    return known[max(found, key=len)] if found else ""


def prediction(case: Case) -> tuple[float, tuple[str, ...]]:
    """Seconds of a published figure, and what was assumed for them."""
    if case["quantity"].startswith(MICROBATCH):
        length = int(re.match(r"\d+", str(case["resp_len_max"]))[0])  # type: ignore[index]
        return trainer(case, _microbatch(case)).update([[length]]), ASSUMED_OF_MICROBATCHES
    role, work = STAGES[quantity(case)]
    settings = reading()["runs"][case["case_id"]]
    chosen = trainer(case, settings[role] | {"role": role})
    length = round(float(case["prompt_len_mean"]) + float(case["resp_len_mean"]))
    samples = round(float(case["seqs_per_step"])) // chosen.ranks
    steps = int(re.match(r"\d+", str(case["optimizer_steps_per_step"]))[0])  # type: ignore[index]
    if work == "scoring":
        return chosen.scoring([length] * samples), tuple(settings["assumed"])
    return chosen.update([[length] * (samples // steps)] * steps), tuple(settings["assumed"])


def _microbatch(case: Case) -> dict[str, Any]:
    lora = re.search(r"LoRA\(r=(\d+)\)", case["algorithm"])
    return {"lora_rank": int(lora[1]) if lora else 0}


def trainer(case: Case, settings: Mapping[str, Any]) -> Trainer:
    """The trainer of a case, one rank a device."""
    return Trainer(
        arch=entry(case, "models", "actor_model"),
        device=entry(case, "devices", "gpu_type"),
        ranks=int(case["train_gpus"] or case["gpus_total"]),
        **settings,
    )
