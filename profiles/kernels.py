"""Kernels: what one call of a GPU kernel costs, whoever measured it. Times are seconds, sizes tokens and bytes.

Two implementations: `profiles.silicon_kernels.SiliconKernels` reads full op tables (extra `silicon`), and
`profiles.compact.CompactKernels` the curves of a profile. `engine_table` composes either to the iterations of a model.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

WIDTH = {
    "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "int8": 1.0, "nvfp4": 0.5,
    "int4_wo": 0.5, "w4a16_mxfp4": 0.5, "w4a8_mxfp4_mxfp8": 0.5,
}  # fmt: skip
"""bytes of a stored element; the scales of block formats (about 3 %) are left out"""
COMPUTES = {
    "float16": "bfloat16", "fp8_block": "fp8", "int8": "fp8", "int4_wo": "bfloat16", "w4a16_mxfp4": "bfloat16",
    "w4a8_mxfp4_mxfp8": "fp8",
}  # fmt: skip
"""the number format whose units do the arithmetic, where it is not the stored one"""
MEMORY_EFFICIENCY = 0.8
"""share of peak bandwidth of streaming kernels (BabelStream on A100 and H100 reaches 0.8-0.9)"""
LAUNCH_S = 2.0e-6
"""what the smallest kernel takes inside a CUDA graph; the smallest measured GEMMs take 1.7-2.5 us"""


def wide(dtype: str) -> float:
    """Bytes of an activation beside weights of a format: those of float32, else of 16 bits."""
    return max(2.0, WIDTH[dtype])


class Kernels(Protocol):
    """Times of single calls on one device. Arrays broadcast; `notes` collects what was asked beyond measurements."""

    @property
    def notes(self) -> Set[str]: ...

    def token_limit(self, dtype: str) -> float:
        """The largest number of rows of a matrix product that was measured."""
        ...

    def gemm(self, dtype: str, m: ArrayLike, n: int, k: int) -> Floats:
        """A product of m×k activations with k×n weights."""
        ...

    def context_attention(
        self, batch: ArrayLike, isl: ArrayLike, prefix: ArrayLike, heads: int, kv_heads: int, head_dim: int,
        kv_dtype: str, window: int = 0,
    ) -> Floats:  # fmt: skip
        """`batch` sequences of `isl` new tokens after `prefix` cached ones; window 0: none."""
        ...

    def generation_attention(
        self, batch: ArrayLike, context: ArrayLike, heads: int, kv_heads: int, head_dim: int, kv_dtype: str,
        window: int = 0,
    ) -> Floats:  # fmt: skip
        """One new token for each of `batch` sequences with `context` cached ones."""
        ...

    def moe(
        self, dtype: str, tokens: ArrayLike, hidden: int, intermediate: int, topk: int, num_experts: int, tp: int,
        ep: int,
    ) -> Floats:  # fmt: skip
        """The routed experts of one layer on one of tp·ep devices, for `tokens` tokens of all of them."""
        ...

    def collective(self, op: str, size: ArrayLike, ranks: int, graph: bool = True) -> Floats:
        """all_reduce, fused_all_reduce (with the norm after it), all_gather, reduce_scatter or all_to_all in a machine."""
        ...

    def memory_bound(self, size: ArrayLike) -> Floats:
        """A kernel that reads and writes `size` bytes in all: norms, activations, rotary embedding."""
        ...


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """A device's datasheet, for rooflines: FLOP/s by number format, bytes/s."""

    flops: dict[str, float]
    bandwidth: float

    def of(self, dtype: str) -> float:
        """FLOP/s of the units that compute a stored format; a format without units runs at the bfloat16 rate.

        float32 is that of the vector units: torch does not round its matrix products to TF32 unless asked.
        """
        return self.flops.get(COMPUTES.get(dtype, dtype), self.flops["bfloat16"])

    def gemm(self, dtype: str, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Floats:
        """Roofline: the larger of arithmetic and of moving both inputs and the result once, of 16 bits or of float32."""
        m, n, k = (np.asarray(x, dtype=float) for x in (m, n, k))
        inputs = WIDTH[COMPUTES.get(dtype, dtype)]
        moved = inputs * m * k + WIDTH[dtype] * n * k + wide(dtype) * m * n
        return np.asarray(np.maximum(2 * m * n * k / self.of(dtype), moved / self.bandwidth))

    def moe(self, dtype: str, tokens: ArrayLike, shape: dict[str, int]) -> Floats:
        """Roofline of gated experts: weights of the experts that are hit, arithmetic of the tokens sent here.

        With uniform routing a token misses one expert with probability 1 − topk/E, so E·(1 − (1 − topk/E)^tokens)
        experts are read. shape: hidden, intermediate, topk, num_experts, tp, ep.
        """
        tokens = np.asarray(tokens, dtype=float)
        share = shape["topk"] / shape["num_experts"]
        hit = shape["num_experts"] / shape["ep"] * (1 - (1 - share) ** tokens)
        matrices = 3.0 * shape["hidden"] * shape["intermediate"] / shape["tp"]
        here = tokens * shape["topk"] / shape["ep"]
        moved = hit * matrices * WIDTH[dtype] + 2 * wide(dtype) * tokens * shape["hidden"]
        return np.asarray(np.maximum(2 * here * matrices / self.of(dtype), moved / self.bandwidth))


def prefix_share(tokens: ArrayLike, prefix: ArrayLike) -> Floats:
    """Share of the pairs of a whole prompt of prefix + tokens that its last `tokens` attend to."""
    tokens, prefix = np.asarray(tokens, dtype=float), np.asarray(prefix, dtype=float)
    whole = np.maximum(tokens + prefix, 1.0)
    return np.asarray((tokens * (tokens + 1) / 2 + tokens * prefix) / (whole * (whole + 1) / 2))


def __getattr__(name: str) -> Any:
    """`engine_table` and the implementations, loaded when first asked for."""
    import importlib

    places = {
        "engine_table": "profiles.engine_table",
        "SiliconKernels": "profiles.silicon_kernels",
        "CompactKernels": "profiles.compact",
    }
    if name in places:
        return getattr(importlib.import_module(places[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
