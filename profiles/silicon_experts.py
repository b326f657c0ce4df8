"""Routed experts in the op tables: the measured shape, or the nearest one scaled."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profiles.grids import Floats, line
from profiles.readers import silicon

if TYPE_CHECKING:
    from profiles.silicon_kernels import SiliconKernels

AXES = ("hidden", "intermediate", "topk", "num_experts", "tp", "ep")
STANDS_FOR = {"float16": "bfloat16", "int8": "fp8", "fp8": "fp8_block", "fp8_block": "fp8", "nvfp4": "w4a16_mxfp4"}
"""formats to try where one was not measured, in turn; bfloat16 is the last"""


@lru_cache(maxsize=1024)
def _curve(system: str, folder: Path | None, key: tuple[Any, ...]) -> tuple[Floats, Floats]:
    """Tokens and seconds of one measured shape, never falling."""
    from profiles.silicon_kernels import _groups

    rows, mine = silicon.table(system, "moe", folder), _groups(system, "moe", folder)[key]
    tokens, at = np.unique(rows["num_tokens"][mine], return_inverse=True)
    least = np.full(len(tokens), np.inf)
    np.minimum.at(least, at, rows.seconds[mine])
    return tokens.astype(float), silicon.monotone(least)


def moe_seconds(kernels: SiliconKernels, dtype: str, tokens: Floats, shape: dict[str, int]) -> Floats:
    """Seconds of one MoE layer's experts on one device. Notes of the kernels say what stands for what."""
    from profiles.silicon_kernels import _groups, peaks

    keys = _groups(kernels.system, "moe", kernels.folder)
    stands = _format(dtype, {key[7] for key in keys}, kernels.notes)
    mine = [key for key in keys if key[7] == stands and key[6] == kernels.distribution]
    wanted = tuple(shape[name] for name in AXES)
    best = min(mine, key=lambda key: _distance(key[:6], wanted))
    axis, seconds = _curve(kernels.system, kernels.folder, best)
    measured = line(axis, seconds, np.maximum(tokens, 1.0))
    if np.max(tokens) > axis[-1] * 1.01:
        kernels.notes.add(f"experts of more tokens than measured ({axis[-1]:g})")
    if best[:6] == wanted:
        return measured
    kernels.notes.add(
        f"no experts of shape {wanted} in {stands} were measured: scaled from {tuple(map(int, best[:6]))}"
    )
    roof, near = peaks(kernels.system), dict(zip(AXES, map(int, best[:6]), strict=True))
    asked = np.maximum(tokens, 1.0)
    return np.asarray(measured * roof.moe(stands, asked, shape) / roof.moe(stands, asked, near))


def _format(dtype: str, known: set[str], notes: set[str]) -> str:
    stands = dtype
    for _ in range(3):
        if stands in known:
            break
        stands = STANDS_FOR.get(stands, "bfloat16")
    if stands not in known:
        stands = "bfloat16"
    if stands != dtype:
        notes.add(f"no {dtype} experts were measured: {stands} stands for them")
    return stands


def _distance(own: tuple[int, ...], wanted: tuple[int, ...]) -> float:
    """How far apart two shapes are: the sum of |log| of their ratios."""
    return float(np.sum(np.abs(np.log(np.array(own, dtype=float) / np.array(wanted, dtype=float)))))
