"""Fitting: measurements of one device kind to a Profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.errors import InputError
from lab.measurement import HELD_OUT, OPS, Measurement
from profiles.formula import FORMULAS, PARALLEL, terms
from profiles.identify import apart, missing
from profiles.profile import HeldOut, OpProfile, Profile, Range

HUBER = 0.25
"""relative residual beyond which a point's pull no longer grows (Huber 1964): one noisy point moves little"""


def fit(measurements: Iterable[Measurement], *, name: str, source: dict[str, Any]) -> Profile:
    """The profile that the measurements determine; ops that they cannot determine are left out, with a note.

    Raises InputError where nothing can be fitted: no measurements, those of several devices, of unknown ops, or none
    that tell the terms of any formula apart.
    """
    by_op: dict[str, list[Measurement]] = defaultdict(list)
    for point in measurements:
        if point.op not in OPS:
            remedy = f"the ops are {', '.join(OPS)}"
            raise InputError(key=point.op, problem="a measurement of an unknown op", remedy=remedy)
        by_op[point.op].append(point)
    devices = sorted({point.device for points in by_op.values() for point in points})
    if len(devices) != 1:
        found = ", ".join(devices) or "none"
        raise InputError(problem=f"a profile is of one device kind, found {found}", remedy="fit each kind on its own")
    refused = {op: reason for op in by_op if (reason := refusal(op, by_op[op]))}
    notes = tuple(f"{op}: {reason}" for op, reason in refused.items())
    if not by_op.keys() - refused.keys():
        raise InputError(
            problem="nothing can be fitted: " + "; ".join(notes), remedy="measure that, or name more sources"
        )
    models = sorted({point.model for points in by_op.values() for point in points if point.model})
    fitted = {op: fit_op(op, by_op[op]) for op in FORMULAS if op in by_op and op not in refused}
    return Profile(
        name=name, device=devices[0], kind="measured", models=tuple(models), source=source, ops=fitted, notes=notes
    )


def refusal(op: str, points: Sequence[Measurement]) -> str | None:
    """Why the points of an op cannot be fitted, as the measurement that is missing; None where they can."""
    if op not in FORMULAS:
        return "it is a kernel, which curves describe and no formula"
    fitted = _alone(points)
    if not fitted:
        return "all points were taken beside busy cores or are held out; measure some alone"
    return missing(FORMULAS[op], _rows(op, fitted), _seconds(fitted))


def fit_op(op: str, points: Sequence[Measurement]) -> OpProfile:
    """Non-negative least squares on relative errors over the points taken alone; slowdowns from the others."""
    alone, names = _alone(points), FORMULAS[op]
    rows, seconds = _rows(op, alone), _seconds(alone)
    coefficients = solve(
        apart(names, rows, seconds), seconds, np.array([point.repeats for point in alone], dtype=float)
    )
    residuals = np.abs(rows @ coefficients / seconds - 1)
    return OpProfile(
        coefficients={name: float(value) for name, value in zip(names, coefficients, strict=True)},
        ranges={name: Range(low=float(rows[:, i].min()), high=float(rows[:, i].max())) for i, name in enumerate(names)},
        interference=_interference(op, points, coefficients),
        threads=_speedups(op, points, coefficients),
        points=len(alone),
        residual_median=float(np.median(residuals)),
        residual_p90=float(np.quantile(residuals, 0.9)),
        spread=float(np.median([point.spread for point in alone])),
        held_out=_held_out(op, points, coefficients),
    )


def _alone(points: Sequence[Measurement]) -> list[Measurement]:
    return [point for point in points if point.neighbours == 0 and point.threads == 1 and point.source != HELD_OUT]


def _rows(op: str, points: Sequence[Measurement]) -> NDArray[np.float64]:
    """(points, terms of the op's formula)"""
    return np.array([[terms(op, point.quantities)[name] for name in FORMULAS[op]] for point in points], dtype=float)


def _seconds(points: Sequence[Measurement]) -> NDArray[np.float64]:
    seconds: NDArray[np.float64] = np.maximum(np.array([point.seconds for point in points]), 1e-9)
    return seconds


def _held_out(op: str, points: Sequence[Measurement], coefficients: NDArray[np.float64]) -> HeldOut | None:
    """Errors on the points that were measured alone and not fitted."""
    kept = [point for point in points if point.neighbours == 0 and point.threads == 1 and point.source == HELD_OUT]
    if not kept:
        return None
    errors = _rows(op, kept) @ coefficients / _seconds(kept) - 1
    return HeldOut(
        points=len(kept),
        bias=float(np.median(errors)),
        error_p50=float(np.median(np.abs(errors))),
        error_p90=float(np.quantile(np.abs(errors), 0.9)),
        noise_p50=float(np.median([point.spread / 2 for point in kept])),
    )


def solve(rows: NDArray[np.float64], seconds: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coefficients ≥ 0 that minimise the Huber loss of rows·c / seconds − 1, by reweighted least squares."""
    from scipy.optimize import nnls

    scale = np.where(rows.max(axis=0) > 0, rows.max(axis=0), 1.0)
    relative = rows / scale / seconds[:, None]
    pull = np.sqrt(weights)
    solution = np.zeros(rows.shape[1])
    for _ in range(8):
        solution, _ = nnls(relative * pull[:, None], pull)
        distance = np.abs(relative @ solution - 1)
        pull = np.sqrt(weights * np.minimum(1.0, HUBER / np.maximum(distance, 1e-12)))
    return np.asarray(solution / scale)


def _speedups(op: str, points: Sequence[Measurement], coefficients: NDArray[np.float64]) -> tuple[float, ...]:
    """Median over the points with 2, 3, … threads of what divides their parallel terms; between 1 and the threads.

    Points count whose parallel terms are most of their time. What was not measured between two numbers ends the list.
    """
    faster: dict[int, list[float]] = defaultdict(list)
    for point in points:
        if point.threads > 1 and point.neighbours == 0:
            values = terms(op, point.quantities)
            parts = {name: c * values[name] for c, name in zip(coefficients, FORMULAS[op], strict=True)}
            shared = sum(seconds for name, seconds in parts.items() if name in PARALLEL)
            serial = sum(parts.values()) - shared
            if shared > serial:
                left = max(point.seconds - serial, shared / point.threads)
                faster[point.threads].append(max(shared / left, 1.0))
    found = list[float]()
    while faster.get(len(found) + 2):
        found.append(float(np.median(faster[len(found) + 2])))
    return tuple(found)


def _interference(op: str, points: Sequence[Measurement], coefficients: NDArray[np.float64]) -> tuple[float, ...]:
    """Median slowdown against the fitted time beside 1, 2, … busy cores; at least 1 and never falling."""
    slower: dict[int, list[float]] = defaultdict(list)
    for point in points:
        if point.neighbours and point.threads == 1:
            values = terms(op, point.quantities)
            alone = float(sum(c * values[name] for c, name in zip(coefficients, FORMULAS[op], strict=True)))
            if alone > 0:
                slower[point.neighbours].append(point.seconds / alone)
    found, last = [], 1.0
    for number in range(1, max(slower, default=0) + 1):
        last = max(last, float(np.median(slower[number])) if number in slower else last)
        found.append(last)
    return tuple(found)
