"""Serving measurements that come with the package `aiconfigurator-core`, and how each engine was started.

`systems/silicon_sample.csv`: one row per run, C clients in closed loop, with mean time to first token and per output
token. The file names model, system, lengths, parallelism and number format. What it leaves out is taken from the public
scripts of the benchmark that most rows come from (InferenceMAX, later InferenceX, benchmarks/*.sh of 2025-10 to
2026-04) and from vLLM's defaults; `assumed` lists it row by row.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.model import ModelSpec, Moe
from profiles.engine_table import Fusion

DENSE = ("meta-llama/Llama-3.1-70B", "Qwen/Qwen3-32B", "nvidia/Llama-3.1-8B-Instruct-FP8")
EVEN = "02468ace"
BLACKWELL = ("b200_sxm", "b300_sxm", "gb200", "gb300")
CONFIGS = {
    "meta-llama/Llama-3.1-70B": "meta-llama--Meta-Llama-3.1-70B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama--Meta-Llama-3.1-8B",
}
"""config.json of the package, where it is not the model's own name"""
MINIMAX = ModelSpec(
    hidden=3072, layers=62, heads=48, kv_heads=8, head_dim=128, intermediate=1536, vocabulary=200064, qk_norm=True,
    moe=Moe(num_experts=256, experts_per_token=8, intermediate=1536), source="config.json of MiniMax-M2.5",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    id: str
    model: str
    system: str
    precision: str
    prompt: int
    """nominal tokens"""
    response: int
    clients: int
    """of one engine"""
    devices: int
    data_parallel: int
    expert_parallel: int
    release: str
    benchmark: bool
    """of InferenceMAX: lengths spread over 80-100 % of the nominal ones, 10 requests per client, asynchronous scheduling"""
    tpot_s: float
    ttft_s: float

    @property
    def group(self) -> str:
        """What is left out together when constants are fitted."""
        return f"{self.system} {self.model}"

    @property
    def tensor_parallel(self) -> int:
        """Ranks of one engine; with attention in parallel over data the file's tp_size counts all devices."""
        return max(1, self.devices // self.data_parallel)

    def lengths(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Prompts and responses of the requests, drawn with a fixed seed."""
        number = min(10 * self.clients, 2000)
        if not self.benchmark:
            return np.full(number, self.prompt), np.full(number, self.response)
        draw = np.random.default_rng(0)
        sizes = [draw.integers(int(0.8 * size), size + 1, number) for size in (self.prompt, self.response)]
        return sizes[0], sizes[1]


class Engine(NamedTuple):
    """How the engine of a case was started."""

    spec: ModelSpec
    dtype: str
    expert_dtype: str
    kv_dtype: str
    fusion: Fusion
    budget: int
    asynchronous: bool
    assumed: tuple[str, ...]


def cases(half: str) -> tuple[Case, ...]:
    """vLLM's runs with prefill and decode in one engine. half: even, odd (last hex digit of sha256(id)) or all."""
    import pandas as pd

    from profiles.readers.silicon import systems_folder

    rows = pd.read_csv(systems_folder() / "silicon_sample.csv", keep_default_na=True)
    rows = rows[(rows["backend"] == "vllm") & (rows["mode"] == "agg")]
    return tuple(_case(row) for row in rows.to_dict("records") if half == "all" or _half(row["id"]) == half)


def _half(name: Any) -> str:
    return "even" if hashlib.sha256(str(name).encode()).hexdigest()[-1] in EVEN else "odd"


def _case(row: dict[Any, Any]) -> Case:
    def count(name: str) -> int:
        value = row[name]
        return int(value) if value == value and value else 1

    return Case(
        id=str(row["id"]), model=row["model_path"], system=row["system"],
        precision=row["precision"] if isinstance(row["precision"], str) else "bf16",
        prompt=int(row["isl"]), response=int(row["osl"]), clients=count("batch_size"), devices=count("tp_size"),
        data_parallel=count("attention_dp_size"), expert_parallel=count("moe_ep_size"),
        release=row["backend_version"] if isinstance(row["backend_version"], str) else "",
        benchmark="auto-gap" not in row["silicon_data_source"],
        tpot_s=row["silicon_tpot_ms"] * 1e-3, ttft_s=row["silicon_ttft_ms"] * 1e-3,
    )  # fmt: skip


@lru_cache(maxsize=32)
def spec_of(model: str) -> ModelSpec:
    """The architecture, from the package's copy of its config.json."""
    from lab.hf_config import read
    from profiles.readers.silicon import systems_folder

    if "MiniMax" in model:
        return MINIMAX
    name = CONFIGS.get(model, model.replace("/", "--"))
    return read(systems_folder().parent / "model_configs" / f"{name}_config.json")


def engine_of(case: Case) -> Engine:
    """Number formats, fusions and budget of a case."""
    new, assumed = case.system in BLACKWELL, ["KV capacity", "constants of other systems"]
    dtype, expert, kv = _formats(case, new)
    assumed += ["KV dtype", "token budget"]
    assumed += ["lengths 0.8-1.0 of nominal", "fusions"] if case.benchmark else ["fixed lengths"]
    if case.precision == "bf16":
        assumed.append("bfloat16")
    llama = "Llama" in case.model
    fusion = Fusion(norm_quant=not llama, attention_quant=llama, allreduce_norm=True) if new else Fusion()
    return Engine(
        spec=spec_of(case.model), dtype=dtype, expert_dtype=expert, kv_dtype=kv, fusion=fusion,
        budget=8192 if case.benchmark else 2048, asynchronous=case.benchmark, assumed=tuple(assumed),
    )  # fmt: skip


def _formats(case: Case, new: bool) -> tuple[str, str, str]:
    """Dense matrices, experts, cache. Checkpoints keep attention in 16 bits where only the experts are quantised."""
    quantised = {"fp4": "nvfp4", "fp8": "fp8", "bf16": "bfloat16", "int4": "int4_wo"}[case.precision]
    if "gpt-oss" in case.model:
        return "bfloat16", "w4a8_mxfp4_mxfp8" if new else "w4a16_mxfp4", "fp8" if new else "bfloat16"
    if "Kimi" in case.model:
        return "bfloat16", quantised, "bfloat16"
    if "MiniMax" in case.model or "Qwen3-235B" in case.model:
        blocks = "fp8_block" if case.precision == "fp8" else quantised
        return blocks, blocks, "bfloat16"
    return quantised, quantised, "fp8" if case.benchmark and "Llama" in case.model else "bfloat16"
