"""The compiled half of EngineTable: time of one iteration, and how far a decoding engine is from the next bend.

`table` everywhere is `EngineTable.packed()`; quantities are the features of `profiles.iteration.Iteration`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.compiled import compiled

Floats = NDArray[np.float64]


@compiled
def segment(grid: Floats, value: float) -> tuple[int, float]:
    """Index of the segment that holds `value`, and the position in it; beyond the ends the end segments go on."""
    last = len(grid) - 1
    if last == 0:
        return 0, 0.0
    index = min(max(int(np.searchsorted(grid, value, side="right")) - 1, 0), last - 1)
    return index, (value - grid[index]) / (grid[index + 1] - grid[index])


@compiled
def line(grid: Floats, values: Floats, value: float) -> float:
    """Piecewise-linear interpolation; below the first point the first value holds, beyond the last its slope does."""
    if len(grid) == 1 or value <= grid[0]:
        return float(values[0])
    index, position = segment(grid, value)
    return float(max(values[index] + position * (values[index + 1] - values[index]), 0.0))


@compiled
def attention(table: Any, chunk: float, prefix: float, decodes: float, context: float) -> float:
    """Multilinear interpolation of A; a value below its axis is taken to the first point."""
    axes = (table[4], table[5], table[6], table[7])
    i, x = segment(axes[0], max(chunk, axes[0][0]))
    j, y = segment(axes[1], max(prefix, axes[1][0]))
    k, z = segment(axes[2], max(decodes, axes[2][0]))
    m, w = segment(axes[3], max(context, axes[3][0]))
    values = table[8]
    total = 0.0
    for a in range(min(2, len(axes[0]))):
        wa = x if a else 1.0 - x
        for b in range(min(2, len(axes[1]))):
            wb = wa * (y if b else 1.0 - y)
            for c in range(min(2, len(axes[2]))):
                wc = wb * (z if c else 1.0 - z)
                for d in range(min(2, len(axes[3]))):
                    total += wc * (w if d else 1.0 - w) * values[i + a, j + b, k + c, m + d]
    return max(total, 0.0)


@compiled
def skew_share(table: Any, features: Floats) -> float:
    """Share of the time between mean and longest context that uneven contexts add (bins as `EngineTable.skew` says)."""
    shares, decodes = table[11], features[4]
    if decodes < 2.0:
        return 0.0
    if shares.size == 1:
        return float(shares.flat[0])
    mean, longest, shortest = features[5] / decodes, features[6], features[9]
    spread = (mean - shortest) / (longest - shortest) if longest > shortest else 0.0
    chunk = int(np.searchsorted(table[12], features[2]))
    if chunk == len(table[12]) or table[12][chunk] != features[2]:
        return float(table[10][0])
    asked = (decodes, spread, longest, features[3])
    place = [0, 0, 0, 0]
    for axis in range(4):
        place[axis] = int(np.searchsorted(table[13 + axis], asked[axis]))
        if place[axis] >= shares.shape[axis + 1]:
            return float(table[10][0])
    return float(shares[chunk, place[0], place[1], place[2], place[3]])


@compiled
def padded(sizes: Floats, tokens: float) -> float:
    """Tokens rounded up to the next captured size, if there is one."""
    if len(sizes) == 0 or tokens > sizes[-1]:
        return tokens
    return float(sizes[int(np.searchsorted(sizes, tokens))])


@compiled
def iteration_seconds(table: Any, features: Floats) -> float:
    """Time of one iteration alone on its devices."""
    tokens, sequences, chunk, prefix, decodes, context = features[:6]
    constants = table[10]
    if tokens == 0.0:
        return 0.0
    total = constants[1] + constants[2] * sequences
    total += line(table[0], table[1], padded(table[9], tokens)) + line(table[2], table[3], sequences)
    mean = context / decodes if decodes > 0.0 else 0.0
    level = attention(table, chunk, prefix, decodes, mean)
    share = skew_share(table, features)
    if share > 0.0 and features[6] > mean:
        level += share * (attention(table, chunk, prefix, decodes, features[6]) - level)
    if chunk > 0.0:
        total += constants[3]
    return total + level + constants[4] * features[7] + constants[5] * features[8]


@compiled
def steps_to_bend(table: Any, mean: float, longest: float) -> int:
    """Iterations, of one more token each, that mean and longest context stay on one straight piece of the table."""
    found = 1 << 60
    for value in (mean, longest):
        for grid in (table[7], table[15]):
            place = int(np.searchsorted(grid, value))
            if place < len(grid):
                found = min(found, int(np.floor(grid[place] - value)) + 1)
    return max(found, 1)
