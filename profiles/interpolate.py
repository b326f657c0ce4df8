"""The compiled half of EngineTable: time of one iteration, and how far a decoding engine is from the next bend.

Quantities are the features of `profiles.iteration.Iteration`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.compiled import compiled

Floats = NDArray[np.float64]


class Packed(NamedTuple):
    """An `EngineTable` in a form that compiled functions take; the same axes and values."""

    token_grid: Floats
    token_seconds: Floats
    sequence_grid: Floats
    sequence_seconds: Floats
    chunk_grid: Floats
    prefix_grid: Floats
    decode_grid: Floats
    context_grid: Floats
    attention_seconds: Floats
    capture_sizes: Floats
    constants: Floats
    """(6,) skew, step_s, sequence_s, prefill_step_s, token_context_s, context_read_s"""
    shares: Floats
    """(1, 1, 1, 1, 1) where there is one skew for all"""
    skew_chunks: Floats
    skew_decodes: Floats
    skew_spread: Floats
    skew_longest: Floats
    skew_prefix: Floats


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
def attention(table: Packed, chunk: float, prefix: float, decodes: float, context: float) -> float:
    """Multilinear interpolation of A; a value below its axis is taken to the first point."""
    values = table.attention_seconds
    i, x = segment(table.chunk_grid, max(chunk, table.chunk_grid[0]))
    j, y = segment(table.prefix_grid, max(prefix, table.prefix_grid[0]))
    k, z = segment(table.decode_grid, max(decodes, table.decode_grid[0]))
    m, w = segment(table.context_grid, max(context, table.context_grid[0]))
    total = 0.0
    for a in range(min(2, values.shape[0])):
        wa = x if a else 1.0 - x
        for b in range(min(2, values.shape[1])):
            wb = wa * (y if b else 1.0 - y)
            for c in range(min(2, values.shape[2])):
                wc = wb * (z if c else 1.0 - z)
                for d in range(min(2, values.shape[3])):
                    total += wc * (w if d else 1.0 - w) * values[i + a, j + b, k + c, m + d]
    return max(total, 0.0)


@compiled
def skew_share(table: Packed, features: Floats) -> float:
    """Share of the time between mean and longest context that uneven contexts add (bins as `EngineTable.skew` says)."""
    shares, decodes = table.shares, features[4]
    if decodes < 2.0:
        return 0.0
    if shares.size == 1:
        return float(shares.flat[0])
    mean, longest, shortest = features[5] / decodes, features[6], features[9]
    spread = (mean - shortest) / (longest - shortest) if longest > shortest else 0.0
    chunk = int(np.searchsorted(table.skew_chunks, features[2]))
    if chunk == len(table.skew_chunks) or table.skew_chunks[chunk] != features[2]:
        return float(table.constants[0])
    i = int(np.searchsorted(table.skew_decodes, decodes))
    j = int(np.searchsorted(table.skew_spread, spread))
    k = int(np.searchsorted(table.skew_longest, longest))
    m = int(np.searchsorted(table.skew_prefix, features[3]))
    if i == shares.shape[1] or j == shares.shape[2] or k == shares.shape[3] or m == shares.shape[4]:
        return float(table.constants[0])
    return float(shares[chunk, i, j, k, m])


@compiled
def padded(sizes: Floats, tokens: float) -> float:
    """Tokens rounded up to the next captured size, if there is one."""
    if len(sizes) == 0 or tokens > sizes[-1]:
        return tokens
    return float(sizes[int(np.searchsorted(sizes, tokens))])


@compiled
def iteration_seconds(table: Packed, features: Floats) -> float:
    """Time of one iteration alone on its devices."""
    tokens, sequences, chunk, prefix, decodes, context = features[:6]
    constants = table.constants
    if tokens == 0.0:
        return 0.0
    total = constants[1] + constants[2] * sequences
    total += line(table.token_grid, table.token_seconds, padded(table.capture_sizes, tokens))
    total += line(table.sequence_grid, table.sequence_seconds, sequences)
    mean = context / decodes if decodes > 0.0 else 0.0
    level = attention(table, chunk, prefix, decodes, mean)
    share = skew_share(table, features)
    if share > 0.0 and features[6] > mean:
        level += share * (attention(table, chunk, prefix, decodes, features[6]) - level)
    if chunk > 0.0:
        total += constants[3]
    linear = constants[4] * features[7] + constants[5] * features[8]
    return float(total + level + linear)


@compiled
def steps_to_bend(table: Packed, mean: float, longest: float) -> int:
    """Iterations, of one more token each, that mean and longest context stay on one straight piece of the table."""
    found = 1 << 60
    for value in (mean, longest):
        for grid in (table.context_grid, table.skew_longest):
            place = int(np.searchsorted(grid, value))
            if place < len(grid):
                found = min(found, int(np.floor(grid[place] - value)) + 1)
    return max(found, 1)
