"""The profiles that ship for data-centre GPUs, fitted from full op tables (extra `silicon`).

python -m profiles.compact_silicon [DEVICE …]      writes profiles/library/DEVICE.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiles.compact import context_reference, gemm_reference, generation_reference, library_peaks, moe_reference
from profiles.compact_fit import fit_curve
from profiles.curve import DIGITS, Curve, Floats, Range
from profiles.kernels import Peaks
from profiles.profile import Profile
from profiles.readers import silicon
from profiles.readers.silicon import OpTable, monotone

Mask = NDArray[np.bool_]

GEMM_KNOTS: dict[str, Floats] = {
    "m": np.array([1, 8, 16, 32, 64, 128, 192, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768]),
    "n": np.array([128, 512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 65536]),
    "k": np.array([128, 512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 65536]),
}
CONTEXT_KNOTS: dict[str, Floats] = {
    "tokens": np.array([1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]),
    "problems": np.array([1, 4, 16, 64, 256, 1024, 4096, 16384], dtype=float),
    "per_key": np.array([1, 2, 4, 8, 16, 64]),
}
GENERATION_KNOTS: dict[str, Floats] = {
    "context": np.array([1, 63, 127, 255, 511, 1023, 2047, 4095, 8191, 16383, 32767, 131071]),
    "problems": np.array([1, 4, 16, 64, 256, 1024, 4096, 16384], dtype=float),
    "per_key": np.array([1, 2, 4, 8, 16, 64]),
}
MOE_KNOTS: dict[str, Floats] = {
    "rows": np.logspace(-6, 7, 14, base=4.0),
    "experts": np.logspace(0, 5, 6, base=4.0),
    "matrix": np.logspace(7, 14, 8, base=4.0),
}
HEAD_DIMS = (64, 128, 192, 256)
DISTRIBUTION = "power_law_1.2"
SMALLEST = 128
"""widths below are left out of matrix products: launches, not work"""


def profile_of(device: str) -> Profile:
    """The compact profile of a device of the library. Raises InputError where its tables are absent or wrong."""
    from lab.library import device as library_device

    entry, system = library_device(device), silicon.DEVICES[device]
    peaks = library_peaks(entry.flops, entry.memory_bandwidth)
    kernels = gemm_curves(system, peaks) | attention_curves(system, peaks) | moe_curves(system, peaks)
    kernels |= collective_curves(system)
    tables = {kind: silicon.table(system, kind).source for kind in ("gemm", "context_attention", "moe", "nccl")}
    return Profile(
        name=device, device=device, kind="measured", kernels=kernels,
        source={
            "method": "fitted from op tables of single kernels by profiles/compact_silicon.py",
            "package": silicon.PACKAGE, "version": tables["gemm"]["version"], "licence": silicon.LICENCE,
            "frameworks": sorted({table["framework"] for table in tables.values()}),
            "peaks": {"flops": dict(peaks.flops), "bandwidth": peaks.bandwidth},
        },
        notes=(
            "training ops, host time and links between machines were not measured: the datasheet roofline stands for them",
            f"experts with the token distribution {DISTRIBUTION}; attention without a window",
        ),
    )  # fmt: skip


def gemm_curves(system: str, peaks: Peaks) -> dict[str, Curve]:
    """By number format, from times that never fall in m."""
    from profiles.silicon_kernels import gemm_grids

    source, found = silicon.table(system, "gemm").source, {}
    for dtype, grid in gemm_grids(system).items():
        i, j, q = np.nonzero(~np.isnan(grid.seconds))
        wide = (grid.n[j] >= SMALLEST) & (grid.k[q] >= SMALLEST)
        m, n, k = grid.m[i][wide], grid.n[j][wide], grid.k[q][wide]
        ratios = grid.seconds[i, j, q][wide] / gemm_reference(peaks, dtype, m, n, k)
        if np.unique(n).size > 4:
            sizes = {"m": m, "n": n, "k": k}
            found[f"gemm.{dtype}"] = fit_curve(sizes, ratios, GEMM_KNOTS, source=_short(source), unit="x roofline")
    return found


def attention_curves(system: str, peaks: Peaks) -> dict[str, Curve]:
    """By format of the cache and size of a head; prefill and decode."""
    found = {}
    for kind in ("context_attention", "generation_attention"):
        rows = silicon.table(system, kind)
        for kept in np.unique(rows["kv_cache_dtype"].astype(str)):
            for dim in HEAD_DIMS:
                mine = (rows["kv_cache_dtype"] == kept) & (rows["head_dim"] == dim) & (rows["window_size"] == 0)
                if mine.sum() > 100:
                    found[f"{kind}.{kept}.{dim}"] = _attention(rows, mine, peaks, kind, str(kept), dim)
    return found


def _attention(rows: OpTable, mine: Mask, peaks: Peaks, kind: str, kept: str, dim: int) -> Curve:
    def column(name: str) -> Floats:
        return np.asarray(rows[name][mine], dtype=float)

    batch, heads, keys = column("batch_size"), column("num_heads"), column("num_key_value_heads")
    sizes: dict[str, Floats]
    if kind == "context_attention":
        sizes = {"tokens": column("isl"), "problems": batch * heads, "per_key": heads / keys}
        reference, knots = context_reference(peaks, kept, dim, **sizes), CONTEXT_KNOTS
    else:
        sizes = {"context": column("step"), "problems": batch * keys, "per_key": heads / keys}
        reference, knots = generation_reference(peaks, kept, dim, **sizes), GENERATION_KNOTS
    return fit_curve(sizes, rows.seconds[mine] / reference, knots, source=_short(rows.source), unit="x roofline")


def moe_curves(system: str, peaks: Peaks) -> dict[str, Curve]:
    """By number format of the experts."""
    rows, found = silicon.table(system, "moe"), {}
    for dtype in np.unique(rows["moe_dtype"].astype(str)):
        mine = (rows["moe_dtype"] == dtype) & (rows["distribution"] == DISTRIBUTION)
        experts = rows["num_experts"][mine].astype(float)
        sizes: dict[str, Floats] = {
            "rows": rows["num_tokens"][mine] * rows["topk"][mine] / experts,
            "experts": experts / rows["moe_ep_size"][mine],
            "matrix": 1.0 * rows["hidden_size"][mine] * rows["inter_size"][mine] / rows["moe_tp_size"][mine],
        }
        if mine.sum() > 100:
            ratios = rows.seconds[mine] / moe_reference(peaks, str(dtype), **sizes)
            found[f"moe.{dtype}"] = fit_curve(sizes, ratios, MOE_KNOTS, source=_short(rows.source), unit="x roofline")
    return found


def collective_curves(system: str) -> dict[str, Curve]:
    """By operation and ranks, every measured size."""
    from lab.errors import InputError

    found: dict[str, Curve] = {}
    for kind, label, dtype in (
        ("custom_allreduce", "backend", "allreduce_dtype"), ("fused_allreduce", "allreduce_dtype", "allreduce_dtype"),
        ("nccl", "op_name", "nccl_dtype"),
    ):  # fmt: skip
        try:
            rows = silicon.table(system, kind)
        except InputError:
            continue
        sent = silicon.message_bytes(rows, dtype)
        for name in np.unique(rows[label].astype(str)):
            for ranks in np.unique(rows["num_gpus"]):
                mine = (rows[label] == name) & (rows["num_gpus"] == ranks)
                if _called(kind, str(name)) and mine.sum() > 2:
                    curve = collective_curve(sent[mine], rows.seconds[mine], _short(rows.source))
                    found[f"{_called(kind, str(name))}.{ranks}"] = curve
    return found


def _called(kind: str, label: str) -> str:
    """The name of a curve; empty for what is not kept (vLLM's all-reduce stands for NCCL's)."""
    if kind == "fused_allreduce":
        return "fused_all_reduce"
    names = {
        "vllm_graph": "all_reduce", "vllm_eager": "all_reduce_eager", "all_gather": "all_gather",
        "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all",
    }  # fmt: skip
    return names.get(label, "")


def collective_curve(sent: Floats, seconds: Floats, source: dict[str, Any]) -> Curve:
    """All points, the lowest of each size, never falling; residuals of each inner point, left out."""
    sizes, at = np.unique(sent, return_inverse=True)
    least = np.full(len(sizes), np.inf)
    np.minimum.at(least, at, seconds)
    least = monotone(least)
    share = np.log(sizes[1:-1] / sizes[:-2]) / np.log(sizes[2:] / sizes[:-2])
    guessed = np.exp((1 - share) * np.log(least[:-2]) + share * np.log(least[2:]))
    errors = np.abs(guessed / least[1:-1] - 1)
    return Curve(
        axes={"bytes": tuple(map(float, sizes))}, values=tuple(float(f"{x:.{DIGITS}g}") for x in least), unit="s",
        points=len(seconds), held_out=len(errors), residual_median=round(float(np.median(errors)), 4),
        residual_p90=round(float(np.quantile(errors, 0.9)), 4),
        ranges={"bytes": Range(low=float(sizes[0]), high=float(sizes[-1]))}, source=source,
    )  # fmt: skip


def _short(source: dict[str, str]) -> dict[str, Any]:
    """What tells a curve's table; the package stands in the profile's own source."""
    return {"table": source["table"]}


def main(devices: list[str]) -> None:
    """Writes the profiles of the named devices, or of all."""
    for device in devices or list(silicon.DEVICES):
        path = Path(__file__).parent / "library" / f"{device}.yaml"
        profile = profile_of(device)
        profile.save(path)
        print(f"{path} {path.stat().st_size / 1e3:.0f} kB")
        for name, curve in profile.kernels.items():
            print(f"  {name:36} n {curve.points:6} p50 {curve.residual_median:6.1%} p90 {curve.residual_p90:6.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
