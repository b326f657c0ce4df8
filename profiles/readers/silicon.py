"""Measured kernel times of real GPUs: the op tables of the package `aiconfigurator-core` (extra `silicon`).

The package carries `systems/data/<system>/<family>/<framework>/<version>/<kind>_perf.parquet`: one row per measured
call on one GPU, `latency` in milliseconds. The lab reads vLLM's tables of the newest version, and NCCL's. Nothing of
the package is imported; its Python interface is not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.errors import InputError
from lab.measurement import Measurement

PACKAGE, MODULE = "aiconfigurator-core", "aiconfigurator_core"
LICENCE = "Apache-2.0 (package metadata)"
DEVICES = {
    # device library: system of the package
    "a100-80g-sxm": "a100_sxm",
    "h100-80g-sxm": "h100_sxm",
    "h200-141g-sxm": "h200_sxm",
    "b200-sxm": "b200_sxm",
    "gb200": "gb200",
    "l40s": "l40s",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
BITS = {
    "bfloat16": 16, "half": 16, "fp8": 8, "fp8_block": 8, "int8": 8, "nvfp4": 4, "int4_wo": 4,
    "w4a16_mxfp4": 4, "w4a8_mxfp4_mxfp8": 4,
}  # fmt: skip
"""width of a stored weight (of a cached key, of a sent element)"""


@dataclass(frozen=True)
class Kind:
    """Where the tables of one kind lie, and what their rows must say. Columns that are optional count as 0."""

    pattern: str
    keys: tuple[str, ...]
    optional: tuple[str, ...] = ()


_HEADS = ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype", "step")
_EXPERTS = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "distribution")
KINDS = {
    "gemm": Kind("gemm/vllm/*/gemm_perf.parquet", ("gemm_dtype", "m", "n", "k")),
    "context_attention": Kind("attention/vllm/*/context_attention_perf.parquet", _HEADS, ("window_size",)),
    "generation_attention": Kind("attention/vllm/*/generation_attention_perf.parquet", _HEADS, ("window_size",)),
    "moe": Kind("moe/vllm/*/moe_perf.parquet", ("moe_dtype", "num_tokens", *_EXPERTS)),
    "custom_allreduce": Kind(
        "comm/vllm/*/custom_allreduce_perf.parquet", ("allreduce_dtype", "num_gpus", "message_size", "backend")
    ),
    "fused_allreduce": Kind(
        "comm/trtllm/*/custom_allreduce_perf.parquet", ("allreduce_dtype", "num_gpus", "message_size")
    ),
    "nccl": Kind("comm/nccl/*/nccl_perf.parquet", ("op_name", "nccl_dtype", "num_gpus", "message_size")),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class OpTable:
    """One table as columns of equal length."""

    system: str
    kind: str
    file: Path
    version: str
    """of the framework that was measured"""
    columns: dict[str, NDArray[Any]]
    seconds: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    @property
    def source(self) -> dict[str, str]:
        """Provenance, as profiles keep it."""
        parts = self.file.parts
        framework = parts[parts.index(self.version) - 1] if self.version in parts else ""
        return {
            "package": PACKAGE, "version": metadata.version(PACKAGE), "licence": LICENCE,
            "table": "/".join(parts[-5:]), "framework": f"{framework} {self.version}",
        }  # fmt: skip


def systems_folder() -> Path:
    """The package's folder of systems. Raises InputError where the package is not installed."""
    found = util.find_spec(MODULE)
    if found is None or not found.submodule_search_locations:
        remedy = "pip install 'rlhf-lab[silicon]'"
        raise InputError(problem=f"the op tables need the package {PACKAGE}, which is not installed", remedy=remedy)
    return Path(next(iter(found.submodule_search_locations))) / "systems"


def systems() -> tuple[str, ...]:
    """Systems with a table of matrix products."""
    data = systems_folder() / "data"
    return tuple(sorted({path.relative_to(data).parts[0] for path in data.glob(f"*/{KINDS['gemm'].pattern}")}))


def _release(name: str) -> tuple[int, ...]:
    """0.24.0 -> (0, 24, 0) and 1.3.0rc20 -> (1, 3, 0, 20), so that releases can be ordered."""
    return tuple(int(part) for part in re.findall(r"\d+", name))


@lru_cache(maxsize=64)
def table(system: str, kind: str, folder: Path | None = None) -> OpTable:
    """The newest table of a kind. Raises InputError where the system has none, or a row or column is wrong."""
    root = (folder or systems_folder() / "data") / system
    found = sorted(root.glob(KINDS[kind].pattern), key=lambda path: _release(path.parent.name))
    if not found:
        remedy = "it must lie under SYSTEM/" + KINDS[kind].pattern
        raise InputError(file=str(root), problem=f"there is no {kind} table", remedy=remedy)
    return read_table(found[-1], system=system, kind=kind)


def read_table(path: Path, *, system: str, kind: str) -> OpTable:
    """A table file. Raises InputError naming the file and the column that is absent, or the row that is no time."""
    import pandas as pd

    frame = pd.read_parquet(path)
    rule = KINDS[kind]
    for name in (*rule.keys, "latency"):
        if name not in frame.columns:
            remedy = f"a {kind} table needs {', '.join((*rule.keys, 'latency'))}"
            raise InputError(file=str(path), key=name, problem="the table has no such column", remedy=remedy)
    latency = frame["latency"].to_numpy(dtype=float)
    wrong = np.flatnonzero(~(np.isfinite(latency) & (latency > 0)))
    if len(wrong):
        problem = f"row {wrong[0] + 1} takes {latency[wrong[0]]:g} ms, which is no time"
        raise InputError(file=str(path), key="latency", problem=problem)
    columns = {name: frame[name].to_numpy() for name in rule.keys}
    columns |= {name: frame[name].to_numpy() if name in frame else np.zeros(len(frame), int) for name in rule.optional}
    return OpTable(
        system=system, kind=kind, file=path, version=path.parent.name, columns=columns, seconds=latency * 1e-3
    )  # fmt: skip


def monotone(seconds: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    """T(m) := min over m' >= m of T(m'): doing more never takes less. Sizes rise along `axis`; NaN: not measured.

    A smaller size can always be padded to a larger one, so what costs more than a larger size is noise of the
    measurement or a poor choice of kernel that the padding avoids.
    """
    filled = np.where(np.isnan(seconds), np.inf, seconds)
    lowest = np.flip(np.minimum.accumulate(np.flip(filled, axis), axis), axis)
    return np.where(np.isnan(seconds), np.nan, lowest)


def measurements(system: str, kinds: tuple[str, ...] = tuple(KINDS)) -> Iterator[Measurement]:
    """Every row of the named tables, unfiltered, as a Measurement."""
    device = next((name for name, own in DEVICES.items() if own == system), system)
    for kind in kinds:
        rows = table(system, kind)
        ops, quantities = _QUANTITIES[kind](rows)
        source = f"{PACKAGE} {rows.source['version']}: {rows.source['table']}"
        names = list(quantities)
        for number, values in enumerate(zip(*quantities.values(), strict=True)):
            yield Measurement(
                op=ops[number], quantities=dict(zip(names, map(float, values), strict=True)),
                seconds=float(rows.seconds[number]), device=device, source=source,
            )  # fmt: skip


def bits(names: NDArray[Any]) -> NDArray[np.int64]:
    """Width of each named number format."""
    return np.array([BITS[name] for name in names])


def _gemm(rows: OpTable) -> tuple[list[str], dict[str, NDArray[Any]]]:
    return ["gemm"] * len(rows), {"m": rows["m"], "n": rows["n"], "k": rows["k"], "bits": bits(rows["gemm_dtype"])}


def _attention(rows: OpTable) -> dict[str, NDArray[Any]]:
    return {
        "heads": rows["num_heads"], "kv_heads": rows["num_key_value_heads"], "head_dim": rows["head_dim"],
        "window": rows["window_size"], "kv_bits": bits(rows["kv_cache_dtype"]),
    }  # fmt: skip


def _context(rows: OpTable) -> tuple[list[str], dict[str, NDArray[Any]]]:
    asked = {"batch": rows["batch_size"], "tokens": rows["isl"], "prefix": rows["step"]}
    return ["context_attention"] * len(rows), asked | _attention(rows)


def _generation(rows: OpTable) -> tuple[list[str], dict[str, NDArray[Any]]]:
    asked = {"batch": rows["batch_size"], "context": rows["step"]}
    return ["generation_attention"] * len(rows), asked | _attention(rows)


def _moe(rows: OpTable) -> tuple[list[str], dict[str, NDArray[Any]]]:
    return ["moe"] * len(rows), {
        "tokens": rows["num_tokens"], "hidden": rows["hidden_size"], "intermediate": rows["inter_size"],
        "topk": rows["topk"], "num_experts": rows["num_experts"], "tp": rows["moe_tp_size"],
        "ep": rows["moe_ep_size"], "bits": bits(rows["moe_dtype"]),
    }  # fmt: skip


def _custom(rows: OpTable) -> tuple[list[str], dict[str, NDArray[Any]]]:
    sent = message_bytes(rows, "allreduce_dtype")
    return ["all_reduce"] * len(rows), {"calls": np.ones(len(rows)), "bytes": sent, "ranks": rows["num_gpus"]}


def _nccl(rows: OpTable) -> tuple[list[str], dict[str, NDArray[Any]]]:
    ops = ["all_to_all" if name == "alltoall" else str(name) for name in rows["op_name"]]
    sent = message_bytes(rows, "nccl_dtype")
    return ops, {"calls": np.ones(len(rows)), "bytes": sent, "ranks": rows["num_gpus"]}


def message_bytes(rows: OpTable, dtype: str) -> NDArray[np.float64]:
    """Bytes of the collectives' messages; the tables count elements (at equal bytes, both types take equal time)."""
    return np.asarray(rows["message_size"] * bits(rows[dtype]) / 8.0)


_QUANTITIES = {
    "gemm": _gemm, "context_attention": _context, "generation_attention": _generation, "moe": _moe,
    "custom_allreduce": _custom, "fused_allreduce": _custom, "nccl": _nccl,
}  # fmt: skip
