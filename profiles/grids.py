"""Measured times on grids of two sizes, interpolated linearly on linear axes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """Seconds over two rising axes; no cell is empty."""

    rows: Floats
    columns: Floats
    seconds: Floats
    """(rows, columns)"""

    def at(self, row: ArrayLike, column: ArrayLike) -> Floats:
        """Bilinear on linear axes; beyond the last row or column the last slope goes on, below the first it is flat."""
        row, column = np.broadcast_arrays(np.asarray(row, dtype=float), np.asarray(column, dtype=float))
        i, u = _place(self.rows, row)
        j, v = _place(self.columns, column)
        table = self.seconds
        here = (1 - u) * ((1 - v) * table[i, j] + v * table[i, np.minimum(j + 1, table.shape[1] - 1)])
        below = np.minimum(i + 1, table.shape[0] - 1)
        return np.asarray(
            here + u * ((1 - v) * table[below, j] + v * table[below, np.minimum(j + 1, table.shape[1] - 1)])
        )

    def powers(self, row: ArrayLike, column: ArrayLike) -> Floats:
        """Linear in rows, a power law between columns: for times that grow faster than their column."""
        row, column = np.broadcast_arrays(np.asarray(row, dtype=float), np.asarray(column, dtype=float))
        i, u = _place(self.rows, row)
        j, v = _place(np.log(self.columns), np.log(np.maximum(column, self.columns[0])))
        table, right = np.log(self.seconds), np.minimum(j + 1, self.seconds.shape[1] - 1)
        below = np.minimum(i + 1, table.shape[0] - 1)
        upper = np.exp((1 - v) * table[i, j] + v * table[i, right])
        return np.asarray((1 - u) * upper + u * np.exp((1 - v) * table[below, j] + v * table[below, right]))

    def covers(self, row: ArrayLike, column: ArrayLike) -> bool:
        """Whether all lies within the axes (1 % beyond is not called extrapolation)."""
        return bool(np.max(row) <= self.rows[-1] * 1.01 and np.max(column) <= self.columns[-1] * 1.01)


def _place(axis: Floats, x: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Index of the interval and place in it, 0 to 1; above 1 beyond the last point, 0 before the first."""
    if len(axis) == 1:
        return np.zeros(x.shape, dtype=np.int64), np.zeros(x.shape)
    i = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, len(axis) - 2)
    return i, np.maximum((x - axis[i]) / (axis[i + 1] - axis[i]), 0.0)


def line(axis: Floats, values: Floats, x: ArrayLike) -> Floats:
    """Linear interpolation; the last slope goes on, the first value holds."""
    i, u = _place(axis, np.asarray(x, dtype=float))
    return np.asarray((1 - u) * values[i] + u * values[np.minimum(i + 1, len(values) - 1)])


def filled(rows: Floats, columns: Floats, seconds: Floats) -> Grid:
    """A grid from a table with empty cells (NaN), never falling along either axis.

    An empty cell takes the one above it times the ratio of their rows (twice the batch, twice the work), or where that
    is empty the one to its left times the ratio of their columns. Of noisy points the lower ones count:
    T(x) := min over x' >= x of T(x').
    """
    from profiles.readers.silicon import monotone

    table = seconds.copy()
    for i in range(1, len(rows)):
        table[i] = np.where(np.isnan(table[i]), table[i - 1] * rows[i] / rows[i - 1], table[i])
    for j in range(1, len(columns)):
        table[:, j] = np.where(np.isnan(table[:, j]), table[:, j - 1] * columns[j] / columns[j - 1], table[:, j])
    kept = ~np.isnan(table).any(axis=0)
    table = monotone(monotone(table[:, kept], axis=1), axis=0)
    return Grid(rows=rows, columns=columns[kept], seconds=table)


def pivot(rows: NDArray[np.int64], columns: NDArray[np.int64], seconds: Floats) -> tuple[Floats, Floats, Floats]:
    """Axes and table of scattered points; of repeated points the least time (the rest is noise), NaN where none is."""
    first, i = np.unique(rows, return_inverse=True)
    second, j = np.unique(columns, return_inverse=True)
    table = np.full((len(first), len(second)), np.inf)
    np.minimum.at(table, (i, j), seconds)
    table[np.isinf(table)] = np.nan
    return first.astype(float), second.astype(float), table
