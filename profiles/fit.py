"""Fitting: measurements of one device kind to a Profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.errors import InputError
from lab.measurement import OPS, Measurement
from profiles.formula import FORMULAS, terms
from profiles.profile import OpProfile, Profile, Range

HUBER = 0.25
"""relative residual beyond which a point's pull no longer grows (Huber 1964): one noisy point moves little"""


def fit(measurements: Iterable[Measurement], *, name: str, source: dict[str, Any]) -> Profile:
    """The profile that the measurements determine. Raises InputError where there are none, or of several devices."""
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
    models = sorted({point.model for points in by_op.values() for point in points if point.model})
    fitted = {op: fit_op(op, by_op[op]) for op in FORMULAS if any(not p.neighbours for p in by_op[op])}
    return Profile(
        name=name, device=devices[0], kind="measured", models=tuple(models), source=source, ops=fitted
    )  # fmt: skip


def fit_op(op: str, points: Sequence[Measurement]) -> OpProfile:
    """Non-negative least squares on relative errors over the points taken alone; slowdowns from the others."""
    alone = [point for point in points if point.neighbours == 0]
    names = FORMULAS[op]
    rows = np.array([[terms(op, point.quantities)[name] for name in names] for point in alone], dtype=float)
    seconds = np.maximum(np.array([point.seconds for point in alone]), 1e-9)
    coefficients = solve(rows, seconds, np.array([point.repeats for point in alone], dtype=float))
    residuals = np.abs(rows @ coefficients / seconds - 1)
    return OpProfile(
        coefficients={name: float(value) for name, value in zip(names, coefficients, strict=True)},
        ranges={name: Range(low=float(rows[:, i].min()), high=float(rows[:, i].max())) for i, name in enumerate(names)},
        interference=_interference(op, points, coefficients),
        points=len(alone),
        residual_median=float(np.median(residuals)),
        residual_p90=float(np.quantile(residuals, 0.9)),
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


def _interference(op: str, points: Sequence[Measurement], coefficients: NDArray[np.float64]) -> tuple[float, ...]:
    """Median slowdown against the fitted time beside 1, 2, … busy cores; at least 1 and never falling."""
    slower: dict[int, list[float]] = defaultdict(list)
    for point in points:
        if point.neighbours:
            values = terms(op, point.quantities)
            alone = float(sum(c * values[name] for c, name in zip(coefficients, FORMULAS[op], strict=True)))
            if alone > 0:
                slower[point.neighbours].append(point.seconds / alone)
    found, last = [], 1.0
    for number in range(1, max(slower, default=0) + 1):
        last = max(last, float(np.median(slower[number])) if number in slower else last)
        found.append(last)
    return tuple(found)
