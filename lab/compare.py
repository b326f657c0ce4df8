"""Comparison: a predicted and a measured timeline side by side, and what explains the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from lab.errors import InputError
from lab.metrics import busy, exposed, num_steady, standard_error, step_times, summarise
from lab.timeline import Timeline

SPREAD = "spread of repeats"
STANDARD_ERROR = "standard error over steps"
NOTHING_S = 1e-9
"""differences below are rounding"""
MAX_SPREAD = 0.15
"""repeats that differ by more settle nothing"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity in both worlds, seconds per steady step."""

    predicted: float | None
    measured: float | None
    error: float | None
    """(predicted - measured) / measured"""
    noise: float | None
    """of the measured value, relative to it"""
    noise_kind: str
    share: float | None = None
    """of the measured step"""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One contribution to the difference of the step times."""

    stage: str
    """`gap`: time in which no stage runs"""
    seconds: float
    """predicted - measured exposed time per step; all reasons add up to the step's difference"""
    text: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a prediction said and what was measured."""

    scenario: str
    digest: str
    repeats: int
    step: Row
    stages: dict[str, Row]
    remainder: float
    """difference of the step times that no stage explains: predicted - measured time in which no stage runs"""
    explains: tuple[Reason, ...]
    """largest first"""
    pools: dict[str, dict[str, dict[str, float]]]
    """by pool and account: predicted and measured share of the device-seconds"""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(predicted: Timeline, measured: Sequence[Timeline]) -> Comparison:
    """Compares over the steady steps; three or more measured repeats give the noise as their spread.

    Raises InputError where the timelines are of different scenarios, or have no complete step, or nothing is measured.
    """
    _check(predicted, measured)
    step = _row(_mean(step_times(predicted)), [_mean(step_times(run)) for run in measured], _steady(measured[0]))
    return Comparison(
        scenario=predicted.header.scenario,
        digest=predicted.header.digest,
        repeats=len(measured),
        step=step,
        stages=_stages(predicted, measured, step.measured or 0.0),
        **_explain(predicted, measured),
        pools=_pools(predicted, measured),
    )


def caveats(comparison: Comparison, predicted: Timeline, measured: Sequence[Timeline]) -> list[str]:
    """What a reader must know before believing the comparison, one sentence each."""
    found, step = [], comparison.step
    if predicted.header.origin != "simulated":
        found.append("The run in the place of the prediction was not simulated.")
    if any(run.header.origin != "measured" for run in measured):
        found.append("A run in the place of a measurement was itself simulated: nothing of it was measured.")
    if any(run.header.status != "done" for run in (predicted, *measured)):
        found.append("A run did not finish: only its complete steps are compared.")
    if step.noise_kind == SPREAD and step.noise is not None and step.noise > MAX_SPREAD:
        found.append(f"The repeats differ by {step.noise:.1%}. More than {MAX_SPREAD:.0%} settles nothing: repeat.")
    return found


def _check(predicted: Timeline, measured: Sequence[Timeline]) -> None:
    if not measured:
        raise InputError(problem="there is no measured run", remedy="name at least one run to compare with")
    for run in measured:
        if run.header.digest != predicted.header.digest:
            ours, theirs = predicted.header, run.header
            problem = f"different scenarios: {ours.scenario} ({ours.digest}) and {theirs.scenario} ({theirs.digest})"
            raise InputError(problem=problem, remedy="compare runs of one scenario file")
    for run in (predicted, *measured):
        if not step_times(run):
            problem = f"the {run.header.origin} run of {run.header.scenario} has no complete step"
            raise InputError(problem=problem, remedy="compare runs that finished at least one step")


def _mean(times: Sequence[float]) -> float:
    """Over the steady steps."""
    return fmean(times[1:] or times)


def _steady(run: Timeline) -> list[float]:
    return step_times(run)[1:]


def _row(predicted: float | None, repeats: Sequence[float], within: Sequence[float], step: float = 0.0) -> Row:
    """`within`: the values inside one run, for the noise where there are fewer than three repeats."""
    measured = fmean(repeats) if repeats else None
    several = len(repeats) >= 3 and median(repeats) > 0
    noise = (max(repeats) - min(repeats)) / median(repeats) if several else standard_error(within)
    known = predicted is not None and measured
    return Row(
        predicted=predicted,
        measured=measured,
        error=(predicted - measured) / measured if known and predicted is not None and measured else None,
        noise=noise,
        noise_kind=SPREAD if several else STANDARD_ERROR,
        share=measured / step if measured is not None and step else None,
    )


def _stages(predicted: Timeline, measured: Sequence[Timeline], step: float) -> dict[str, Row]:
    """Busy seconds per steady step of every stage of either world, in the prediction's order."""
    ours, theirs = busy(predicted), [busy(run) for run in measured]
    names = list(dict.fromkeys([*ours, *(stage for run in theirs for stage in run)]))
    found = {}
    for stage in names:
        repeats = [
            sum(run[stage]) / num_steady(timeline)
            for run, timeline in zip(theirs, measured, strict=True)
            if stage in run
        ]
        own = sum(ours[stage]) / num_steady(predicted) if stage in ours else None
        found[stage] = _row(own, repeats, theirs[0].get(stage, []), step)
    return found


def _explain(predicted: Timeline, measured: Sequence[Timeline]) -> dict[str, Any]:
    """The difference of the step times as exposed differences of the stages, and the remainder: the gaps."""
    ours, our_gap = exposed(predicted)
    theirs = [exposed(run) for run in measured]
    names = dict.fromkeys([*ours, *(stage for run, _ in theirs for stage in run)])
    differences = {stage: ours.get(stage, 0.0) - fmean([run.get(stage, 0.0) for run, _ in theirs]) for stage in names}
    remainder = our_gap - fmean([gap for _, gap in theirs])
    differences["gap"] = remainder
    total = sum(differences.values())
    ordered = sorted(differences.items(), key=lambda item: -abs(item[1]))
    reasons = tuple(
        Reason(stage=stage, seconds=seconds, text=_tell(stage, seconds, total)) for stage, seconds in ordered
    )
    return {"remainder": remainder, "explains": reasons}


def _tell(stage: str, seconds: float, total: float) -> str:
    subject = "between the stages the step waits" if stage == "gap" else f"{stage} holds up the step"
    if abs(seconds) < NOTHING_S:
        return f"{subject} as long as predicted"
    size = abs(seconds)
    amount = f"{size * 1e3:.3g} ms" if size < 1 else f"{size:.3g} s"
    text = f"{subject} {amount} {'longer' if seconds < 0 else 'shorter'} than predicted"
    if abs(total) < NOTHING_S:
        return text
    share = seconds / total
    if share > 1.005:
        return f"{text}: more than the whole difference, which others make up for"
    return f"{text}: {share:.0%} of the difference" if share > 0 else f"{text}, against the difference"


def _pools(predicted: Timeline, measured: Sequence[Timeline]) -> dict[str, dict[str, dict[str, float]]]:
    ours, theirs = summarise(predicted)["pools"], [summarise(run)["pools"] for run in measured]
    return {
        pool: {
            account: {
                "predicted": own.get(account, 0.0),
                "measured": fmean([run.get(pool, {}).get(account, 0.0) for run in theirs]),
            }
            for account in sorted({*own, *(name for run in theirs for name in run.get(pool, {}))})
        }
        for pool, own in ours.items()
    }
