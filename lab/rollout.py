"""The rollout engine's settings, and how work comes to the engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lab.records import Record
from lab.units import Bytes


class Rollout(Record):
    """The rollout engine. Names are vLLM's."""

    max_num_seqs: int = Field(default=256, ge=1, le=10**6, description="sequences that run at once in one engine")
    max_num_batched_tokens: int = Field(default=8192, ge=1, le=10**9, description="tokens scheduled in one iteration")
    kv_memory_fraction: float = Field(
        default=0.9, gt=0, le=1, description="share of device memory for weights and KV cache (gpu_memory_utilization)"
    )
    kv_bytes: Bytes | None = Field(
        default=None, gt=0, description="KV cache of each engine in bytes; overrides kv_memory_fraction"
    )
    block_tokens: int = Field(
        default=16, ge=1, description="tokens of a KV block (block_size); on GPUs a multiple of 16"
    )
    prefix_caching: bool = Field(default=True, description="samples of one prompt share its KV blocks")
    async_scheduling: bool | None = Field(
        default=None,
        description="schedule the next iteration while one is computed; simulated as the lag alone: what an iteration "
        "yields is known one iteration later, whose time stays the same; null: as vLLM does, on GPUs but not on a CPU",
    )
    reserve_full_isl: bool = Field(
        default=True, description="a request joins only where all its known tokens fit (scheduler_reserve_full_isl)"
    )
    reuse_uncached_first: bool = Field(
        default=True, description="freed blocks without known content are handed out first: vLLM 0.32; false: vLLM 0.19"
    )
    watermark: float = Field(
        default=0.0, ge=0, lt=1, description="share of KV blocks that admissions leave free beside running requests"
    )
    batching: Literal["continuous", "static"] = Field(
        default="continuous", description="static: the next batch begins when the last request of one has ended"
    )
    kv_layout: Literal["paged", "contiguous"] = Field(
        default="paged", description="contiguous: every request reserves room for the longest sequence when it joins"
    )
    dispatch: Literal["round_robin", "weighted", "least_loaded", "length_buckets"] = Field(
        default="round_robin",
        description="who gets which prompts of a step, all samples of a prompt together; weighted: in turn, by speed; "
        "least_loaded: the one that would get to it first; length_buckets: as many classes of length as there are "
        "speeds, the longest to the fastest engines, predicted from earlier steps (prompt i of every step is taken "
        "for the same prompt), before them the workload's mean",
    )
    over_issue: float = Field(
        default=0.0, ge=0, le=10,
        description="share of prompts issued beyond those of a step; the first prompts_per_step whose samples are all "
        "back are kept, and the rest is aborted",
    )  # fmt: skip
    stealing: bool = Field(
        default=False,
        description="an engine that has nothing waiting takes waiting samples from one that has more than it can start",
    )
