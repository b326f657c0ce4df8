"""Whole steps that others published, from rollout to weight sync: one prediction for each case with a full configuration."""

from __future__ import annotations

import re
from pathlib import Path

from lab.library import devices as library_devices
from simulator.studies.accuracy import LARGE_MISS, Row, Rule, ValidationSet
from simulator.studies.published import FILE, Case, cases, entry, quantity, within
from simulator.studies.published_cases import family, reading, run_of, shape
from simulator.studies.published_parts import Parts, parts

STEPS = ("step time", "mean step wall time over 105 steps")
RATES = ("throughput", "samples/sec")
"""figures that follow from the step"""
NOTES = (
    "a case is judged once, by its step; cases are split by the last hex digit of sha256(case_id)",
    (
        "rollouts and updates are simulated; log-probs, scores, rewards by rule, generation without an engine and the change "
        "of hands are closed forms of the same costs (simulator/studies/published_parts.py)"
    ),
    (
        "not blind on the even half: six constants of the roofline and of the framework's rollout were fitted to it on 30 "
        "November 2026, and are the same for every case; the odd half was looked at once, after that"
    ),
    "public reruns of one configuration differ by about 5 % (8B) to 20 % (70B)",
)


def published_steps(data: Path, half: str = "even") -> ValidationSet:
    """One row per published step time or rate of the half; those that a rule takes out are not predicted."""
    rules = tuple(
        Rule(id=name, sentence=sentence, comparison=name == "same-measurement")
        for name, sentence in reading()["rules"].items()
    )
    chosen = [case for case in cases(data / FILE) if quantity(case) in STEPS + RATES and within(case, half)]
    known: dict[str, Parts] = {}
    rows = tuple(_row(case, known) for case in chosen)
    return ValidationSet(
        name="published-steps", title="whole steps that others published", rows=rows, rules=rules, notes=NOTES
    )


def exclusion(case: Case) -> str:
    """Id of the first rule that takes the figure out; empty: it is judged."""
    checks = {
        "inconsistent": "INTERNALLY INCONSISTENT" in (case["notes"] or ""),
        "not-full": case["usable"] != "full",
        "with-validation": "save+validation" in case["quantity"],
        "unknown-device": entry(case, "devices", "gpu_type") not in library_devices(),
        "layout-not-stated": not family(case),
        "unknown-model": bool(family(case)) and not shape(case),
        "same-measurement": quantity(case) in RATES,
    }
    return next((rule for rule, applies in checks.items() if applies), "")


def _row(case: Case, known: dict[str, Parts]) -> Row:
    excluded = exclusion(case)
    predicted: float | None = None
    assumed: tuple[str, ...] = ()
    if excluded in ("", "same-measurement"):
        run = run_of(case)
        if case["case_id"] not in known:
            known[case["case_id"]] = parts(run)
        predicted, assumed = in_unit(case, known[case["case_id"]].step), run.assumed
    measured = float(case["value"])
    large = predicted is not None and abs(predicted / measured - 1) > LARGE_MISS
    return Row(
        case=case["case_id"],
        quantity="step time" if quantity(case) in STEPS else quantity(case),
        predicted=predicted,
        measured=measured,
        unit=case["unit"],
        assumed=assumed,
        reason=reason(case) if large else "",
        excluded=excluded,
    )


def in_unit(case: Case, step: float) -> float:
    """A figure of the case from the seconds of its step."""
    samples = float(re.findall(r"\d+", str(case["seqs_per_step"]))[0])
    if quantity(case) == "samples/sec":
        return samples / step
    if quantity(case) == "throughput":
        gpus = float(re.findall(r"\d+", str(case["gpus_total"]))[0])
        prompt = float(re.findall(r"[\d.]+", str(case["prompt_len_mean"]))[0])
        return samples * (prompt + float(case["resp_len_mean"])) / step / gpus
    return step


def reason(case: Case) -> str:
    """Why a large miss of this case happens, where the sources let one see it."""
    found = (known for known in reading()["reasons"] if re.search(known["cases"], case["case_id"]))
    return str(next(found, {"reason": ""})["reason"])
