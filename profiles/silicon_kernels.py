"""SiliconKernels: kernel times interpolated in the full op tables of a system (extra `silicon`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lab.errors import InputError
from profiles.grids import Floats, Grid, filled, line, pivot
from profiles.kernels import LAUNCH_S, MEMORY_EFFICIENCY, Peaks, prefix_share
from profiles.readers import silicon

GEMM_DTYPES = {"float16": "bfloat16", "int8": "fp8", "int4_wo": "bfloat16", "w4a16_mxfp4": "bfloat16"}
"""the table that stands for a format without one of its own"""
TENSOR_TO_FLOAT32 = 16.0
"""bfloat16 over float32 FLOP/s where a system is no device of the library: A100 312/19.5, H100 989/67 (datasheets)"""


TINY = 1e-12
"""seconds, against division by zero where nothing is asked"""


@dataclass(frozen=True, eq=False)
class GemmGrid:
    """Times of one number format over (m, n, k), never falling in m; NaN where not measured."""

    m: Floats
    n: Floats
    k: Floats
    seconds: Floats


@lru_cache(maxsize=16)
def gemm_grids(system: str, folder: Path | None = None) -> dict[str, GemmGrid]:
    """The matrix products of a system, by number format, all on the same axes.

    Products with block scales were measured with one launch from the host at a time: 60-300 us whatever the size, which
    a CUDA graph does not pay. There the times of per-tensor scales count where they are lower.
    """
    rows = silicon.table(system, "gemm", folder)
    m, i = np.unique(rows["m"], return_inverse=True)
    n, j = np.unique(rows["n"], return_inverse=True)
    k, q = np.unique(rows["k"], return_inverse=True)
    tables = {}
    for dtype in np.unique(rows["gemm_dtype"].astype(str)):
        mine = rows["gemm_dtype"] == dtype
        tables[str(dtype)] = np.full((len(m), len(n), len(k)), np.nan)
        tables[str(dtype)][i[mine], j[mine], q[mine]] = rows.seconds[mine]
    if "fp8_block" in tables and "fp8" in tables:
        tables["fp8_block"] = np.fmin(tables["fp8_block"], tables["fp8"])
    axes = m.astype(float), n.astype(float), k.astype(float)
    return {dtype: GemmGrid(*axes, silicon.monotone(table, 0)) for dtype, table in tables.items()}


@lru_cache(maxsize=64)
def _groups(system: str, kind: str, folder: Path | None) -> dict[tuple[Any, ...], NDArray[np.int64]]:
    """Row numbers of a table by everything that is not an axis."""
    import pandas as pd

    rows = silicon.table(system, kind, folder)
    names = {
        "context_attention": ("num_heads", "num_key_value_heads", "head_dim", "window_size", "kv_cache_dtype"),
        "generation_attention": ("num_heads", "num_key_value_heads", "head_dim", "window_size", "kv_cache_dtype"),
        "moe": ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "distribution", "moe_dtype"),
        "custom_allreduce": ("num_gpus", "backend"),
        "fused_allreduce": ("num_gpus", "allreduce_dtype"),
        "nccl": ("num_gpus", "op_name"),
    }[kind]  # fmt: skip
    frame = pd.DataFrame({name: rows[name] for name in names})
    indices: dict[Any, Any] = dict(frame.groupby(list(names), sort=False).indices)
    return {tuple(key): np.asarray(index) for key, index in indices.items()}


@lru_cache(maxsize=512)
def _attention_grid(system: str, kind: str, key: tuple[Any, ...], folder: Path | None) -> Grid:
    """Batch × length of one shape of attention."""
    rows, mine = silicon.table(system, kind, folder), _groups(system, kind, folder)[key]
    length = rows["isl"] if kind == "context_attention" else rows["step"]
    return filled(*pivot(rows["batch_size"][mine], length[mine], rows.seconds[mine]))


@lru_cache(maxsize=16)
def peaks(system: str) -> Peaks:
    """The datasheet that comes with the tables."""
    import yaml

    from lab.library import device

    text = (silicon.systems_folder() / f"{system}.yaml").read_text()
    gpu = yaml.safe_load(text)["gpu"]
    flops = {"bfloat16": float(gpu["bfloat16_tc_flops"])}
    flops["fp8"] = float(gpu.get("fp8_tc_flops") or flops["bfloat16"])
    own = next((name for name, known in silicon.DEVICES.items() if known == system), None)
    flops["float32"] = device(own).flops["float32"] if own else flops["bfloat16"] / TENSOR_TO_FLOAT32
    flops["nvfp4"] = float(gpu.get("fp4_tc_flops") or flops["fp8"])
    return Peaks(flops=flops, bandwidth=float(gpu["mem_bw"]))


@dataclass(eq=False)
class SiliconKernels:
    """Kernels of one system of the tables, or of the device of the library that it is."""

    system: str
    distribution: str = "power_law_1.2"
    """how tokens spread over experts; balanced and power_law_1.01 are measured too"""
    folder: Path | None = None
    notes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.system = silicon.DEVICES.get(self.system, self.system)

    def token_limit(self, dtype: str) -> float:
        grid = gemm_grids(self.system, self.folder)[self._stands(dtype)]
        return float(grid.m[~np.isnan(grid.seconds).all(axis=(1, 2))][-1])

    def _stands(self, dtype: str) -> str:
        """The measured format that stands for one."""
        grids = gemm_grids(self.system, self.folder)
        stands = dtype if dtype in grids else GEMM_DTYPES.get(dtype, "bfloat16")
        if stands not in grids:
            stands = "bfloat16"
        if stands != dtype and dtype != "float16":
            scaled = ", slower by the ratio of their rooflines" if dtype == "float32" else ""
            self.notes.add(f"no {dtype} matrix products were measured: {stands} stands for them{scaled}")
        return stands

    def gemm(self, dtype: str, m: ArrayLike, n: int, k: int) -> Floats:
        """Linear in m. Sizes n and k between measured ones: efficiency against the roofline, bilinear in log n, log k.

        Beyond the largest n or k the product is cut in equal parts that are measured.
        """
        stands = self._stands(dtype)
        grid = gemm_grids(self.system, self.folder)[stands]
        parts = int(np.ceil(n / grid.n[-1]) * np.ceil(k / grid.k[-1]))
        n_part, k_part = n / np.ceil(n / grid.n[-1]), k / np.ceil(k / grid.k[-1])
        column_m, column = _column(self.system, self.folder, stands, n_part, k_part)
        self._beyond(m, column_m, "matrix products of more tokens")
        measured = parts * line(column_m, column, m)
        if dtype != "float32" or stands == dtype:
            return measured
        roof = peaks(self.system)
        return np.asarray(measured * roof.gemm(dtype, m, n, k) / np.maximum(roof.gemm(stands, m, n, k), TINY))

    def context_attention(
        self, batch: ArrayLike, isl: ArrayLike, prefix: ArrayLike, heads: int, kv_heads: int, head_dim: int,
        kv_dtype: str, window: int = 0,
    ) -> Floats:  # fmt: skip
        """Without prefix as measured. A chunk after a prefix takes its share of the pairs of the whole prompt."""
        batch, isl, prefix = np.broadcast_arrays(
            np.asarray(batch, float), np.asarray(isl, float), np.asarray(prefix, float)
        )
        whole = isl + prefix
        alone = self._attention("context_attention", batch, isl, heads, kv_heads, head_dim, kv_dtype, window)
        longest = self._attention("context_attention", batch, whole, heads, kv_heads, head_dim, kv_dtype, window)
        share = isl / np.maximum(whole, 1) if window else prefix_share(isl, prefix)
        shared = longest * share
        return np.where(isl <= 0, 0.0, np.maximum(alone, np.where(prefix > 0, shared, alone)))

    def generation_attention(
        self, batch: ArrayLike, context: ArrayLike, heads: int, kv_heads: int, head_dim: int, kv_dtype: str,
        window: int = 0,
    ) -> Floats:  # fmt: skip
        """Bilinear on linear axes of batch and context."""
        batch, context = np.broadcast_arrays(np.asarray(batch, float), np.asarray(context, float))
        seconds = self._attention("generation_attention", batch, context, heads, kv_heads, head_dim, kv_dtype, window)
        return np.where(batch <= 0, 0.0, seconds)

    def _attention(
        self, kind: str, batch: Floats, length: Floats, heads: int, kv_heads: int, head_dim: int, kv_dtype: str,
        window: int,
    ) -> Floats:  # fmt: skip
        shapes, dim, kept, cut = self._shapes(kind, heads, kv_heads, head_dim, kv_dtype, window)
        fewer: Floats | float = 1.0
        if window and not cut and kind == "generation_attention":
            length = np.minimum(length, window)
        elif window and not cut:
            below = np.minimum(length, window)
            fewer = (below * (below + 1) / 2 + (length - below) * window) / np.maximum(length * (length + 1) / 2, 1)
        total = np.zeros(length.shape)
        for weight, (own_heads, own_kv), times in shapes:
            key = (own_heads, own_kv, dim, cut, kept)
            grid = _attention_grid(self.system, kind, key, self.folder)
            total = total + weight * _extended(kind, grid, batch * times, length, 1 if cut else 2)
        slower = 1.0
        if kv_dtype == "float32" and kept != kv_dtype:
            roof = peaks(self.system)
            decode = kind == "generation_attention"
            slower = 2.0 if decode else roof.of("bfloat16") / roof.of("float32")
        return np.asarray(total * fewer * slower * head_dim / dim)

    def _shapes(
        self, kind: str, heads: int, kv_heads: int, head_dim: int, kv_dtype: str, window: int
    ) -> tuple[list[tuple[float, tuple[int, int], float]], int, str, int]:
        """Measured shapes that stand for one: (weight, heads, factor on the batch), head size, cache format, window."""
        keys = _groups(self.system, kind, self.folder)
        kept = {"float16": "bfloat16", "int8": "fp8"}.get(kv_dtype, kv_dtype)
        if not any(key[4] == kept for key in keys):
            self.notes.add(f"no attention with a {kept} cache was measured: bfloat16 stands for it")
            kept = "bfloat16"
        dims = sorted({key[2] for key in keys if key[4] == kept})
        dim = int(min(dims, key=lambda own: abs(np.log(own / head_dim))))
        if dim != head_dim:
            self.notes.add(f"no attention with heads of {head_dim} was measured: scaled from {dim}")
        own = {key[:2] for key in keys if key[2:] == (dim, window, kept)}
        cut = window if own else 0
        own = own or {key[:2] for key in keys if key[2:] == (dim, 0, kept)}
        return _nearest(heads, kv_heads, own, self.notes), dim, kept, cut

    def moe(
        self, dtype: str, tokens: ArrayLike, hidden: int, intermediate: int, topk: int, num_experts: int, tp: int,
        ep: int,
    ) -> Floats:  # fmt: skip
        """Linear in tokens; a shape that was not measured is scaled from the nearest one by their rooflines."""
        from profiles.silicon_experts import moe_seconds

        shape = {
            "hidden": hidden, "intermediate": intermediate, "topk": topk, "num_experts": num_experts, "tp": tp, "ep": ep,
        }  # fmt: skip
        measured = moe_seconds(self, dtype, np.asarray(tokens, dtype=float), shape)
        if dtype != "float32":
            return measured
        roof, asked = peaks(self.system), np.maximum(np.asarray(tokens, dtype=float), 1.0)
        return np.asarray(measured * roof.moe(dtype, asked, shape) / roof.moe("bfloat16", asked, shape))

    def collective(self, op: str, size: ArrayLike, ranks: int, graph: bool = True) -> Floats:
        """Linear in bytes. All-reduce as vLLM does it, inside a CUDA graph or not; `fused_all_reduce` with the kernels
        of TensorRT-LLM that FlashInfer has too, or vLLM's where these are quicker; the others as NCCL.
        """
        if ranks == 1:
            return np.zeros(np.shape(size))
        if op == "fused_all_reduce":
            plain = self.collective("all_reduce", size, ranks, graph)
            found = _fused(self.system, self.folder)
            return np.minimum(plain, self._sent("fused_allreduce", "bfloat16", size, ranks)) if found else plain
        if op == "all_reduce":
            return self._sent("custom_allreduce", "vllm_graph" if graph else "vllm_eager", size, ranks)
        return self._sent("nccl", op.replace("all_to_all", "alltoall"), size, ranks)

    def _sent(self, kind: str, label: str, size: ArrayLike, ranks: int) -> Floats:
        known = self._ranks(kind, label, ranks)
        sizes, seconds = _messages(self.system, kind, label, known, self.folder)
        self._beyond(size, sizes, f"{kind} of more bytes")
        measured = line(sizes, seconds, size)
        return measured if known == ranks else measured * ((ranks - 1) / ranks) / ((known - 1) / known)

    def _ranks(self, kind: str, label: str, ranks: int) -> int:
        known = sorted({int(key[0]) for key in _groups(self.system, kind, self.folder) if key[1] == label})
        nearest = min(known, key=lambda own: (own < ranks, abs(own - ranks)))
        if nearest != ranks:
            self.notes.add(f"no collective of {ranks} ranks was measured: scaled from {nearest}")
        return nearest

    def memory_bound(self, size: ArrayLike) -> Floats:
        return np.asarray(LAUNCH_S + np.asarray(size, float) / (peaks(self.system).bandwidth * MEMORY_EFFICIENCY))

    def _beyond(self, asked: ArrayLike, axis: Floats, what: str) -> None:
        if np.max(asked) > axis[-1] * 1.01:
            self.notes.add(f"{what} than measured ({axis[-1]:g})")


@lru_cache(maxsize=4096)
def _column(system: str, folder: Path | None, dtype: str, n: float, k: float) -> tuple[Floats, Floats]:
    """The measured m and their times at one (n, k)."""
    grid = gemm_grids(system, folder)[dtype]
    corners = [(u * v, i, j) for i, u in _between(grid.n, n) for j, v in _between(grid.k, k)]
    roof, own = peaks(system), np.zeros(len(grid.m))
    if len(corners) == 1:
        own = grid.seconds[:, corners[0][1], corners[0][2]]
    else:
        for weight, i, j in corners:
            slower = grid.seconds[:, i, j] / roof.gemm(dtype, grid.m, grid.n[i], grid.k[j])
            own = own + weight * np.log(slower)
        own = np.exp(own) * roof.gemm(dtype, grid.m, n, k)
    there = ~np.isnan(own)
    return grid.m[there], silicon.monotone(own[there])


def _between(axis: Floats, x: float) -> list[tuple[int, float]]:
    """Indices around x and their weights on a logarithmic axis; the end where x lies beyond."""
    at = int(np.searchsorted(axis, x))
    if at == len(axis):
        return [(at - 1, 1.0)]
    if axis[at] == x or at == 0:
        return [(at, 1.0)]
    share = float(np.log(x / axis[at - 1]) / np.log(axis[at] / axis[at - 1]))
    return [(at - 1, 1 - share), (at, share)]


def _extended(kind: str, grid: Grid, batch: Floats, length: Floats, power: int) -> Floats:
    """Beyond the longest prompt, whole-prompt attention grows with the square of the length; in a window, with it."""
    if kind == "generation_attention":
        return grid.at(batch, length)
    longest = grid.columns[-1]
    beyond: Floats = np.maximum(length / longest, 1.0) ** power
    return grid.powers(batch, np.minimum(length, longest)) * beyond


def _nearest(
    heads: int, kv_heads: int, own: set[tuple[int, int]], notes: set[str]
) -> list[tuple[float, tuple[int, int], float]]:
    """Measured head counts for a wanted one.

    Each group of queries that shares a key head is a problem of its own, so f times as many of both are f times the
    batch. Between measured numbers of queries per key: interpolated in their logarithm.
    """
    if (heads, kv_heads) in own:
        return [(1.0, (heads, kv_heads), 1.0)]
    per_key = heads / kv_heads
    same = [shape for shape in own if shape[0] / shape[1] == per_key]
    if same:
        best = min(same, key=lambda shape: abs(np.log(shape[1] / kv_heads)))
        return [(1.0, best, kv_heads / best[1])]
    notes.add(f"no attention with {heads} heads on {kv_heads} was measured: interpolated")
    keys = min({shape[1] for shape in own}, key=lambda number: abs(np.log(number / kv_heads)))
    counts = np.array(sorted(shape[0] for shape in own if shape[1] == keys), dtype=float)
    wanted = per_key * keys
    picked = _between(counts, wanted)
    return [(weight, (int(counts[i]), keys), kv_heads / keys) for i, weight in picked]


@lru_cache(maxsize=32)
def _fused(system: str, folder: Path | None) -> bool:
    """Whether fused all-reduces were measured."""
    try:
        silicon.table(system, "fused_allreduce", folder)
    except InputError:
        return False
    return True


@lru_cache(maxsize=256)
def _messages(system: str, kind: str, label: str, ranks: int, folder: Path | None) -> tuple[Floats, Floats]:
    """Bytes and seconds of one collective, never falling; of equal sizes the least time."""
    rows = silicon.table(system, kind, folder)
    mine = _groups(system, kind, folder)[(ranks, label)]
    size = silicon.message_bytes(rows, "nccl_dtype" if kind == "nccl" else "allreduce_dtype")[mine]
    sizes, at = np.unique(size, return_inverse=True)
    least = np.full(len(sizes), np.inf)
    np.minimum.at(least, at, rows.seconds[mine])
    return sizes, silicon.monotone(least)
