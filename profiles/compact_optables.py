"""A compact profile from the op tables of one model on one GPU (`profiles.readers.optables`).

Such a folder times the products of one model only. Their efficiency is kept over the number of rows and the width of the
result; what it says nothing of (other depths, experts, collectives) is named in the profile's notes.

    python -m profiles.compact_optables FOLDER DEVICE MODEL      writes profiles/library/DEVICE.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lab.errors import InputError
from lab.model import ModelSpec
from profiles.compact import context_reference, gemm_reference, generation_reference, library_peaks
from profiles.compact_fit import fit_curve
from profiles.curve import Curve, Floats
from profiles.kernels import Peaks
from profiles.profile import Profile
from profiles.readers import optables

if TYPE_CHECKING:
    import pandas as pd

ROWS = np.array([1, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192], dtype=float)
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8"}


def products(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(n, k) of the layers that are matrix products, by their name in the tables."""
    heads = spec.heads * spec.head_dim
    return {
        "qkv_proj": ((spec.heads + 2 * spec.kv_heads) * spec.head_dim, spec.hidden), "o_proj": (spec.hidden, heads),
        "gate_up_proj": (2 * spec.intermediate, spec.hidden), "down_proj": (spec.hidden, spec.intermediate),
        "lm_head": (spec.vocabulary, spec.hidden),
    }  # fmt: skip


def profile_of(folder: Path, device: str, spec: ModelSpec, model: str) -> Profile:
    """The profile of a device from a folder `…/DTYPE/tp1`. Raises InputError where a table is absent or wrong."""
    from lab.library import device as library_device

    entry = library_device(device)
    peaks = library_peaks(entry.flops, entry.memory_bandwidth)
    dtype = DTYPES.get(folder.parent.name, "bfloat16")
    software = optables.described(folder).get("vllm_version", "unknown")
    return Profile(
        name=device, device=device, kind="measured", models=(model,),
        kernels=_gemm(folder, spec, peaks, dtype) | _attention(folder, spec, peaks, dtype),
        source={
            "method": "fitted from op tables of one model by profiles/compact_optables.py",
            "package": "LLMServingSim op tables (arXiv 2408.05499)", "licence": "MIT", "frameworks": [f"vllm {software}"],
            "peaks": {"flops": dict(peaks.flops), "bandwidth": peaks.bandwidth},
        },
        notes=(
            f"measured with the products of {model} only; widths and depths of other models follow the roofline",
            ("not measured: 8-bit products and caches, experts, attention with other than "
            f"{spec.heads // spec.kv_heads} heads per key head, collectives, training ops, host time"),
        ),
    )  # fmt: skip


def _gemm(folder: Path, spec: ModelSpec, peaks: Peaks, dtype: str) -> dict[str, Curve]:
    shapes, parts = products(spec), []
    for name, axis in (("dense.csv", "tokens"), ("per_sequence.csv", "sequences")):
        table = optables.read(folder, name)
        for layer, rows in table.groupby("layer"):
            if str(layer) in shapes:
                n, k = shapes[str(layer)]
                parts.append((rows[axis].to_numpy(float), n, k, rows["time_us"].to_numpy(float) * 1e-6))
    if not parts:
        problem, remedy = "none of its layers is a matrix product", f"name them {', '.join(shapes)}"
        raise InputError(file=str(folder / "dense.csv"), key="layer", problem=problem, remedy=remedy)
    m = np.concatenate([part[0] for part in parts])
    n = np.concatenate([np.full(len(part[0]), float(part[1])) for part in parts])
    k = np.concatenate([np.full(len(part[0]), float(part[2])) for part in parts])
    ratios = np.concatenate([part[3] for part in parts]) / gemm_reference(peaks, dtype, m, n, k)
    knots = {"m": ROWS, "n": np.unique(n), "k": np.array([float(np.exp(np.mean(np.log(np.unique(k)))))])}
    sizes = {"m": m, "n": n, "k": k}
    return {f"gemm.{dtype}": fit_curve(sizes, ratios, knots, source={"table": "dense.csv"}, unit="x roofline")}


def _attention(folder: Path, spec: ModelSpec, peaks: Peaks, dtype: str) -> dict[str, Curve]:
    """Prompts alone without prefix, and decoding alone; contexts are all equal in the tables."""
    table = optables.read(folder, "attention.csv")
    key, dim = f"{dtype}.{spec.head_dim}", spec.head_dim
    prompts = table[(table["n_decode"] == 0) & (table["kv_prefill"] == 0) & (table["prefill_chunk"] > 0)]
    decodes = table[(table["n_decode"] > 0) & (table["prefill_chunk"] == 0)]
    prompt = _sizes(spec, prompts, "tokens", "prefill_chunk", np.full(len(prompts), float(spec.heads)))
    decode = _sizes(spec, decodes, "context", "kv_decode", decodes["n_decode"].to_numpy(float) * spec.kv_heads)
    source = {"table": "attention.csv"}
    curves = {}
    for kind, sizes, rows, reference in (
        ("context_attention", prompt, prompts, context_reference),
        ("generation_attention", decode, decodes, generation_reference),
    ):
        ratios = rows["time_us"].to_numpy(float) * 1e-6 / reference(peaks, dtype, dim, *sizes.values())
        knots = {name: np.unique(x) for name, x in sizes.items()}
        curves[f"{kind}.{key}"] = fit_curve(sizes, ratios, knots, source=source, unit="x roofline")
    return curves


def _sizes(spec: ModelSpec, rows: pd.DataFrame, name: str, column: str, problems: Floats) -> dict[str, Floats]:
    per_key = np.full(len(rows), spec.heads / spec.kv_heads)
    return {name: rows[column].to_numpy(float), "problems": problems, "per_key": per_key}


def main(folder: str, device: str, model: str) -> None:
    from lab.library import model as library_model

    path = Path(__file__).parent / "library" / f"{device}.yaml"
    profile = profile_of(Path(folder), device, library_model(model), model)
    profile.save(path)
    for name, curve in profile.kernels.items():
        print(f"  {name:36} n {curve.points:6} p50 {curve.residual_median:6.1%} p90 {curve.residual_p90:6.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
