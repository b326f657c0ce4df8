"""Which coefficients a set of measurements can determine, and which measurement is missing where it cannot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from profiles.formula import MERGED, RATIOS

Floats = NDArray[np.float64]

SAME = 1e-3
"""relative: terms that vary less are called equal, below the noise of any timing"""
ALIKE = 0.05
"""share of a term of MERGED that the others have to leave unexplained: networks of one shape, with and without a head,
leave 1 %; networks of different widths or depths leave a third"""
MAX_CONDITION = 1e3
"""of the matrix of relative terms with columns of length one: beyond it, noise of 1 % can move a coefficient tenfold"""


def apart(names: Sequence[str], rows: Floats, seconds: Floats) -> Floats:
    """The rows (points, terms) with zeros for terms of MERGED that the other terms make up at all points."""
    found = rows.copy()
    for name in MERGED:
        if name in names and found[:, (i := list(names).index(name))].any():
            relative = found / seconds[:, None]
            others = np.delete(relative, i, axis=1)
            others = others[:, others.any(axis=0)] / np.linalg.norm(others[:, others.any(axis=0)], axis=0)
            column = relative[:, i] / np.linalg.norm(relative[:, i])
            left = column - others @ np.linalg.lstsq(others, column, rcond=None)[0]
            if np.linalg.norm(left) < ALIKE:
                found[:, i] = 0.0
    return found


def missing(names: Sequence[str], rows: Floats, seconds: Floats) -> str | None:
    """The measurement that is missing to tell these terms' coefficients apart, in words; None where none is.

    `rows` (points, terms) and `seconds` (points,). Terms that are zero at all points are not asked for: nothing is
    said of them, and their measured range says so.
    """
    rows = apart(names, rows, seconds)
    active = [i for i in range(len(names)) if rows[:, i].any()]
    if not active:
        return "no point has any of the quantities of its formula; measure some"
    relative = rows[:, active] / seconds[:, None]
    for i in active:
        if names[i] != "each" and "each" in names and _same(rows[:, i], rows[:, list(names).index("each")]):
            return f"all points have the same {names[i]} ({rows[0, i]:.6g}); measure a second one"
    columns = relative / np.linalg.norm(relative, axis=0)
    pair = _proportional([names[i] for i in active], columns)
    if pair:
        return pair
    distinct = len(np.unique(np.round(rows[:, active] / rows[:, active].max(axis=0), 4), axis=0))
    if distinct < len(active):
        return f"{distinct} different shapes for the {len(active)} terms of the formula; measure more shapes"
    if np.linalg.cond(columns) > MAX_CONDITION:
        return _dependent([names[i] for i in active], columns)
    return None


def _same(column: Floats, each: Floats) -> bool:
    ratio = column / np.maximum(each, 1e-300)
    return bool(ratio.max() - ratio.min() <= SAME * ratio.max())


def _proportional(names: Sequence[str], columns: Floats) -> str | None:
    """What is the same at all points, because two terms rise in proportion."""
    likeness = columns.T @ columns
    pairs = zip(*np.triu_indices(len(names), 1), strict=True)
    alike = [(names[i], names[j]) for i, j in pairs if likeness[i, j] > 1 - SAME**2]
    shared = dict.fromkeys(RATIOS.get(frozenset(pair), f"ratio of {pair[0]} to {pair[1]}") for pair in alike)
    return f"all points have the same {' and the same '.join(shared)}; measure a second one" if shared else None


def _dependent(names: Sequence[str], columns: Floats) -> str:
    """The terms that make up the direction which the points say least of."""
    weakest = np.abs(np.linalg.svd(columns, full_matrices=False)[2][-1])
    found = [name for name, share in zip(names, weakest, strict=True) if share > 0.3 * weakest.max()]
    return f"{', '.join(found)} depend on each other at these points; measure shapes that vary one of them alone"
