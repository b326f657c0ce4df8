"""Fitting: op tables to the curves of a profile.

A curve's values are the solution of a linear problem: the logarithm of (measured / reference) is a multilinear function
of the grid's values. Robust least squares on four fifths of the rows; the residuals are of the fifth that is held out.
Where no row determines a value, its neighbours on the grid do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiles.curve import DIGITS, Curve, Floats, Range

HELD_OUT = 5
"""every fifth row, drawn with a fixed seed"""
SMOOTH = 0.02
"""weight of the difference of two neighbouring values, against one measured row"""
ROBUST = 0.1
"""residual beyond which a row's pull no longer grows (Huber 1964)"""


def fit_curve(
    sizes: Mapping[str, Floats], ratios: Floats, knots: Mapping[str, Floats], *, source: dict[str, Any], unit: str
) -> Curve:  # fmt: skip
    """A curve through points. sizes: by axis, of each point. ratios: measured / reference, or seconds.

    Knots outside what was measured are dropped. Raises ValueError where there is no point.
    """
    if not len(ratios):
        raise ValueError("there is nothing to fit")
    axes = {name: within(np.asarray(knots[name], dtype=float), sizes[name]) for name in knots}
    kept = np.random.default_rng(0).permutation(len(ratios)) % HELD_OUT > 0
    if len(ratios) < 4 * HELD_OUT:
        kept[:] = True
    values = solve(axes, {name: x[kept] for name, x in sizes.items()}, ratios[kept])
    draft = Curve.model_validate(
        {
            "axes": {name: tuple(map(float, axis)) for name, axis in axes.items()},
            "values": tuple(float(f"{x:.{DIGITS}g}") for x in values),
            "unit": unit, "points": int(kept.sum()), "held_out": int((~kept).sum()), "residual_median": 0.0,
            "residual_p90": 0.0, "source": source,
            "ranges": {name: Range(low=float(x.min()), high=float(x.max())) for name, x in sizes.items()},
        }
    )  # fmt: skip
    judged = ~kept if (~kept).any() else kept
    errors = np.abs(draft.at(**{name: x[judged] for name, x in sizes.items()}) / ratios[judged] - 1)
    found = {"residual_median": float(np.median(errors)), "residual_p90": float(np.quantile(errors, 0.9))}
    return draft.model_copy(update={name: round(x, 4) for name, x in found.items()})


def within(knots: Floats, sizes: Floats) -> Floats:
    """The knots that measured sizes lie between or at."""
    low = knots[knots <= sizes.min() * 1.001]
    high = knots[knots >= sizes.max() * 0.999]
    first = low.max(initial=0.0) if len(low) else knots[0]
    last = high[0] if len(high) else knots[-1]
    inside = knots[(knots >= first) & (knots <= last)]
    return inside if len(inside) else np.array([float(np.median(sizes))])


def solve(axes: Mapping[str, Floats], sizes: Mapping[str, Floats], ratios: Floats) -> Floats:
    """Grid values (flat, not logarithms) by reweighted least squares."""
    from scipy.sparse import diags_array, vstack
    from scipy.sparse.linalg import spsolve

    basis = weights_of(axes, sizes)
    smooth = SMOOTH * neighbours([len(axis) for axis in axes.values()])
    target, pull = np.log(ratios), np.ones(len(ratios))
    solution = np.zeros(basis.shape[1])
    for _ in range(6):
        rows = vstack([diags_array(np.sqrt(pull)) @ basis, smooth]).tocsc()
        wanted = np.concatenate([np.sqrt(pull) * target, np.zeros(smooth.shape[0])])
        normal = rows.T @ rows + 1e-9 * diags_array(np.ones(rows.shape[1]))
        solution = np.atleast_1d(spsolve(normal.tocsc(), rows.T @ wanted))
        pull = np.minimum(1.0, ROBUST / np.maximum(np.abs(basis @ solution - target), 1e-9))
    return np.asarray(np.exp(solution))


def weights_of(axes: Mapping[str, Floats], sizes: Mapping[str, Floats]) -> Any:
    """(points, values) sparse: how much each grid value counts at each point."""
    from scipy.sparse import csr_array

    from profiles.curve import cell

    shape = [len(axis) for axis in axes.values()]
    number = len(next(iter(sizes.values())))
    cells = [cell(np.log(axis), np.log(sizes[name])) for name, axis in axes.items()]
    rows, columns, weights = [], [], []
    for corner in np.ndindex(*(2,) * len(shape)):
        weight = np.ones(number)
        index = []
        for (low, share), side, length in zip(cells, corner, shape, strict=True):
            weight = weight * (share if side else 1 - share)
            index.append(np.minimum(low + side, length - 1))
        rows.append(np.arange(number))
        columns.append(np.ravel_multi_index(tuple(index), shape))
        weights.append(weight)
    entries = np.concatenate(weights), (np.concatenate(rows), np.concatenate(columns))
    return csr_array(entries, shape=(number, int(np.prod(shape))))


def neighbours(shape: list[int]) -> Any:
    """(pairs, values) sparse: differences of neighbouring grid values."""
    from scipy.sparse import csr_array

    flat: NDArray[np.int64] = np.arange(int(np.prod(shape))).reshape(shape)
    pairs = [np.empty((0, 2), dtype=np.int64)]
    for axis in range(len(shape)):
        first = np.take(flat, range(shape[axis] - 1), axis).ravel()
        second = np.take(flat, range(1, shape[axis]), axis).ravel()
        pairs.append(np.stack([first, second], axis=1))
    found = np.concatenate(pairs)
    number = np.arange(len(found))
    entries = np.concatenate([np.ones(len(found)), -np.ones(len(found))])
    places = np.concatenate([number, number]), found.T.ravel()
    return csr_array((entries, places), shape=(len(found), flat.size))
