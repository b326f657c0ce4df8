"""Times of iterations that only decode, from tables by number of sequences: what `profiles.interpolate` says, quicker."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.compiled import compiled
from profiles.interpolate import Packed, attention, line, padded, segment

Floats = NDArray[np.float64]


class Decode(NamedTuple):
    """An engine's decoding iterations."""

    flat: Floats
    """(sequences + 1,) seconds beside attention"""
    level: Floats
    """(sequences + 1, contexts) seconds of attention where all contexts are equal, at the points of the context axis"""


@compiled
def fill(table: Packed, flat: Floats, level: Floats) -> None:
    """Writes both tables."""
    for number in range(len(flat)):
        flat[number] = table.constants[1] + table.constants[2] * number
        flat[number] += line(table.token_grid, table.token_seconds, padded(table.capture_sizes, float(number)))
        flat[number] += line(table.sequence_grid, table.sequence_seconds, float(number))
        for place in range(len(table.context_grid)):
            level[number, place] = attention(table, 0.0, 0.0, float(number), table.context_grid[place])


def decode(table: Packed, most: int) -> Decode:
    """The tables for up to `most` sequences."""
    found = Decode(np.zeros(most + 1), np.zeros((most + 1, len(table.context_grid))))
    fill(table, found.flat, found.level)
    return found


@compiled
def between(grid: Floats, values: Floats, value: float) -> float:
    """Linear between the points, and on beyond the last; before the first its value holds."""
    if len(grid) == 1:
        return float(values[0])
    index, position = segment(grid, max(value, grid[0]))
    return float(max(values[index] + position * (values[index + 1] - values[index]), 0.0))


@compiled
def seconds(table: Packed, decode: Decode, number: int, total: float, longest: float) -> float:
    """One iteration of so many sequences whose contexts add to `total`."""
    values, mean = decode.level[number], total / number
    level = between(table.context_grid, values, mean)
    share = table.shares[0, 0, 0, 0, 0]
    if number >= 2 and share > 0.0 and longest > mean:
        level += share * (between(table.context_grid, values, longest) - level)
    return float(decode.flat[number] + level + (table.constants[4] + table.constants[5]) * (total + number))


@compiled
def to_bend(grid: Floats, value: float) -> int:
    """Iterations, of one more token each, until a context leaves its piece of the axis."""
    place = int(np.searchsorted(grid, value))
    return int(np.floor(grid[place] - value)) + 1 if place < len(grid) else 1 << 60


@compiled
def decode_seconds(table: Packed, decode: Decode, features: Floats, steps: int) -> float:
    """Time of so many decoding iterations, the first of which is described; needs one skew for all."""
    number, total, longest = int(features[4]), features[5], features[6]
    left, spent = steps, 0.0
    while left > 0:
        piece = max(min(left, to_bend(table.context_grid, total / number), to_bend(table.context_grid, longest)), 1)
        first = seconds(table, decode, number, total, longest)
        if piece == 1:
            spent += first
        else:
            moved = float(piece - 1)
            spent += piece * (first + seconds(table, decode, number, total + moved * number, longest + moved)) / 2
        total, longest, left = total + piece * number, longest + piece, left - piece
    return spent
