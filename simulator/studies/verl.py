"""Step logs of verl runs: calibrate on the first 20 steps, predict every later one from its logged lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lab.errors import InputError
from profiles.fit import solve
from simulator.studies.accuracy import Row, ValidationSet

if TYPE_CHECKING:
    import pandas as pd

FILE = "verl_log_steps.csv"
NUM_CALIBRATION_STEPS = 20
NUM_NEIGHBOURS = 5
ONE_OFF = 1.3
"""A step that took this many times its neighbours' median (or that much less) is a one-off."""
STAGES = {
    "gen": "generation", "reward": "reward", "old_log_prob": "old log-prob", "ref": "reference log-prob",
    "values": "critic values", "adv": "advantage", "update_critic": "critic update", "update_actor": "actor update",
}  # fmt: skip
"""verl's timers that follow each other in a step, and what they time."""
JUDGED = ("gen", "old_log_prob", "ref", "update_critic", "update_actor")
"""timers of generation, log-probs and updates, which have to keep a rule of their own"""
LEAST_ALLOWED = 0.10
_TWO_KINDS = (
    "steps of two kinds that lengths do not tell apart: a fifth spend 1.3 s more in old log-probs, "
    "and 1.4 s less in the update"
)
WHY = {
    ("playverl_verl_qwen2_7b_min", "old log-prob"): _TWO_KINDS,
    ("playverl_verl_qwen2_7b_min", "actor update"): _TWO_KINDS,
}
"""why a stage of a run misses its rule, as far as its log shows"""
SOMETIMES = {"testing": "validation", "save_checkpoint": "checkpoint"}
"""Timers of what is done in some steps only, whatever the lengths."""
Values = NDArray[np.float64]


def verl_logs(data: Path) -> ValidationSet:
    """One row per stage and step after the calibration, and per whole step where the log has its time."""
    logs = {str(name): log.reset_index(drop=True) for name, log in _table(data / FILE).groupby("log", sort=True)}
    rows = [row for name, log in logs.items() for row in _rows(name.removesuffix(".log"), log)]
    verdicts = [verdict for name, log in logs.items() for verdict in judged_stages(name.removesuffix(".log"), log)]
    noise = np.concatenate([_noise(log) for log in logs.values()])
    notes = (
        (
            f"calibrated on steps 2 to {NUM_CALIBRATION_STEPS} of each of {len(logs)} logs, the first being a warm-up; every "
            "later step is predicted from its logged lengths alone"
        ),
        (
            "a stage costs non-negative amounts per step, per token, per token × length, and for generation per response "
            "token and per token of the longest response; what is done in some steps only costs its median"
        ),
        f"noise: two steps that follow each other differ by {np.median(noise):.1%} in the median stage",
        _drift(rows),
        summary(verdicts),
        *map(str, verdicts),
    )
    return ValidationSet(
        name="verl-logs", title="later steps of verl runs, H100 and others", rows=tuple(rows), notes=notes
    )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One stage of one run against the rule: the mean absolute error of its later steps is at most 10 %, or one and a half
    times the median change between successive steps; and smaller than that of the mean of the first 20 steps, wherever
    that mean errs by more than 10 %."""

    run: str
    stage: str
    error: float
    """mean of |predicted / measured - 1| over the steps after the calibration"""
    change: float
    """median of |next / this - 1| over the same steps"""
    mean_error: float
    """of the mean of the calibration steps in place of the prediction"""

    @property
    def allowed(self) -> float:
        return max(LEAST_ALLOWED, 1.5 * self.change)

    @property
    def holds(self) -> bool:
        beaten = self.mean_error <= LEAST_ALLOWED or self.error < self.mean_error
        return self.error <= self.allowed and beaten

    def __str__(self) -> str:
        figures = (
            f"{self.error:.1%} of {self.allowed:.1%} allowed, the mean of the first {NUM_CALIBRATION_STEPS} errs by"
        )
        why = "" if self.holds else WHY.get((self.run, self.stage), "")
        word = "holds" if self.holds else "FAILS"
        return f"{word}: {self.run}, {self.stage}: {figures} {self.mean_error:.1%}{'; ' if why else ''}{why}"


def judged_stages(name: str, log: pd.DataFrame) -> list[Verdict]:
    """The verdicts of a log: generation, log-probs (of the policy and the reference) and updates, as far as it has them."""
    later, known = slice(NUM_CALIBRATION_STEPS, None), slice(1, NUM_CALIBRATION_STEPS)
    found = []
    for stage in JUDGED:
        if (seconds := timer(log, stage)) is None or len(seconds[later]) < 2:
            continue
        measured = seconds[later]
        result, mean = predicted(lengths(log, stage), seconds)[later], float(np.mean(seconds[known]))
        verdict = Verdict(
            run=name,
            stage=STAGES[stage],
            error=float(np.mean(np.abs(result / measured - 1))),
            change=float(np.median(np.abs(np.diff(measured) / measured[:-1]))),
            mean_error=float(np.mean(np.abs(mean / measured - 1))),
        )
        found.append(verdict)
    return found


def summary(verdicts: Sequence[Verdict]) -> str:
    """How many verdicts hold."""
    held = sum(verdict.holds for verdict in verdicts)
    return (
        f"per run and stage, at most max(10 %, 1.5 × the median change between steps), and better than the mean of the first "
        f"{NUM_CALIBRATION_STEPS} steps where that errs by more than 10 %: {held} of {len(verdicts)} hold"
    )


def _drift(rows: Sequence[Row]) -> str:
    """The stage of one log whose errors are the most one-sided: what changes there is not in the lengths."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(f"{row.quantity} in {row.case.split(' step ')[0]}", []).append(row.error or 0.0)
    biases = {name: float(np.mean(errors)) for name, errors in found.items()}
    name = max(biases, key=lambda part: abs(biases[part]), default="")
    return f"largest bias of one stage of one log: {biases[name]:+.1%}, {name}" if name else "no log has later steps"


def _table(path: Path) -> pd.DataFrame:
    """The steps of all logs. Raises InputError naming the first column that is absent."""
    import pandas as pd

    steps = pd.read_csv(path)
    for column in ("log", "step", "prompt_length/mean", "response_length/mean", "response_length/max"):
        if column not in steps:
            raise InputError(file=str(path), key=column, problem="there is no such column", remedy="restore it")
    return steps


def timer(log: pd.DataFrame, name: str) -> Values | None:
    """Seconds of one of verl's timers by step (nan: not run), under its old or its new name; None where absent."""
    for column in (f"timing_s/{name}", f"timing/{name}"):
        if column in log and log[column].notna().any():
            return np.asarray(log[column], dtype=float)
    return None


def lengths(log: pd.DataFrame, stage: str) -> Values:
    """(steps, terms): 1, tokens, and tokens × length per sample; for generation 1, response tokens and the longest."""
    prompt, response, longest = (
        np.asarray(log[name], dtype=float)
        for name in ("prompt_length/mean", "response_length/mean", "response_length/max")
    )
    sample = prompt + response
    terms = (response, longest) if stage == "gen" else (sample, sample**2)
    return np.stack([np.ones_like(sample), *terms], axis=1)


def predicted(terms: Values, seconds: Values) -> Values:
    """Seconds of every step, from coefficients >= 0 that fit the steps 2 to 20.

    A length that was the same in all of those (a longest response always cut at the limit) cannot be told from the fixed
    part: all of it is then taken for the length's, which is what makes a rollout longer.
    """
    known = slice(1, NUM_CALIBRATION_STEPS)
    seen = terms[known].copy()
    if np.any(np.ptp(seen[:, 1:], axis=0) == 0.0):
        seen[:, 0] = 0.0
    coefficients = solve(seen, seconds[known], np.ones(NUM_CALIBRATION_STEPS - 1))
    return np.asarray(terms @ coefficients)


def _rows(name: str, log: pd.DataFrame) -> list[Row]:
    stages = {stage: seconds for stage in STAGES if (seconds := timer(log, stage)) is not None}
    results = {stage: predicted(lengths(log, stage), seconds) for stage, seconds in stages.items()}
    rows = [
        row for stage, seconds in stages.items() for row in _judged(name, log, STAGES[stage], results[stage], seconds)
    ]
    whole = timer(log, "step")
    if whole is None:
        return rows
    parts = sum(results.values(), np.zeros(len(log)))
    rest = whole - sum(stages.values(), np.zeros(len(log)))
    for sometimes in SOMETIMES:
        done = timer(log, sometimes)
        if done is not None:
            parts = parts + np.where(np.isnan(done), 0.0, np.nanmedian(done[:NUM_CALIBRATION_STEPS]))
            rest = rest - np.nan_to_num(done)
    overhead = float(np.median(rest[1:NUM_CALIBRATION_STEPS]))
    return rows + _judged(name, log, "step", parts + overhead, whole)


def _judged(name: str, log: pd.DataFrame, quantity: str, result: Values, seconds: Values) -> list[Row]:
    """The rows of the steps that were not used for calibration."""
    return [
        Row(
            case=f"{name} step {int(log['step'][i])}",
            quantity=quantity,
            predicted=float(result[i]),
            measured=float(seconds[i]),
            unit="s",
            reason=one_off(seconds, i) or beyond(log, i),
        )
        for i in range(NUM_CALIBRATION_STEPS, len(log))
    ]


def one_off(seconds: Values, step: int) -> str:
    """Says so where one step differs from the steps around it by far more than their lengths do."""
    around = np.delete(seconds[max(0, step - NUM_NEIGHBOURS) : step + NUM_NEIGHBOURS + 1], min(step, NUM_NEIGHBOURS))
    times = seconds[step] / float(np.median(around))
    return f"a one-off: {times:.1f} times its neighbours' median" if not 1 / ONE_OFF < times < ONE_OFF else ""


def beyond(log: pd.DataFrame, step: int) -> str:
    """Says so where a step's mean response is far from all those of the calibration."""
    lengths = np.asarray(log["response_length/mean"], dtype=float)
    known = lengths[1:NUM_CALIBRATION_STEPS]
    if known.min() / ONE_OFF < lengths[step] < known.max() * ONE_OFF:
        return ""
    return f"responses of {lengths[step]:.0f} tokens on average; the calibration saw {known.min():.0f} to {known.max():.0f}"


def _noise(log: pd.DataFrame) -> Values:
    """Relative differences between each stage of a step and of the one before, calibration steps left out."""
    found: Mapping[str, Values | None] = {stage: timer(log, stage) for stage in STAGES}
    later = [seconds[NUM_CALIBRATION_STEPS:] for seconds in found.values() if seconds is not None]
    return np.concatenate([np.abs(np.diff(seconds) / seconds[:-1]) for seconds in later])
