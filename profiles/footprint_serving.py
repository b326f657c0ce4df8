"""What a rollout engine and a frozen model hold on one device."""

from __future__ import annotations

from dataclasses import dataclass

from lab.model import ModelSpec
from profiles.footprint import (
    FRAGMENTATION,
    Footprint,
    device_parameters,
    fragmented,
    overhead,
    size_of,
)

ENGINE_LOGIT_BYTES = 8.0
"""Per logit of a sampled sequence beside the model's own logits: fp32 logits and probabilities (vLLM's sampler)."""
SCORE_LOGIT_BYTES = 12.0
"""Per logit of a scored token: fp32 logits, the ones divided by the temperature, their log-softmax."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """One rank of a rollout engine.

    Attributes:
        capacity_bytes: of the device; fraction: the engine's share of it (`gpu_memory_utilization`).
        kv_bytes: the KV cache of the whole engine in bytes; overrides the fraction.
        max_num_seqs, max_num_batched_tokens: what the profiling run at start assumes.
        adapter: parameters of a LoRA adapter held beside the weights; None: none.
        data: copies of the attention inside the engine, which share experts and sequences.
    """

    spec: ModelSpec
    capacity_bytes: float
    fraction: float = 0.9
    kv_bytes: float | None = None
    block_tokens: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    adapter: float | None = None
    device_kind: str = "gpu"

    @property
    def block_bytes(self) -> float:
        """One KV block on one device; latent attention is not divided by tensor parallelism, and a head is not split."""
        whole = self.block_tokens * self.spec.kv_bytes_per_token(self.kv_dtype or wide(self.dtype))
        each = whole / self.pipeline
        return each if self.spec.mla else each / min(self.tensor, self.spec.kv_heads)

    @property
    def blocks(self) -> int:
        """KV blocks as the engine counts them (`num_gpu_blocks`), the null block included; at least one beside it.

        Whole blocks of what the fraction of the device leaves beside everything else (vLLM's determine_available_memory).
        """
        if self.kv_bytes is not None:
            # A size given for the engine is divided over its ranks.
            return max(2, int(self.kv_bytes // (self.block_bytes * self.tensor * self.pipeline * self.data)))
        return max(2, int(self.room_bytes // self.block_bytes))

    @property
    def beside(self) -> dict[str, float]:
        """What one device holds beside the KV cache, by consumer, in bytes."""
        return _beside(self)

    @property
    def room_bytes(self) -> float:
        """What the fraction of one device leaves for KV; below zero where the rest alone is too large."""
        return self.fraction * self.capacity_bytes - sum(self.beside.values())


def serving(engine: Serving) -> Footprint:
    """Bytes on one device. All of it stays: the profiling run's activations are what iterations then need."""
    return Footprint(resident={**_beside(engine), "KV cache": engine.blocks * engine.block_bytes})


def _beside(engine: Serving) -> dict[str, float]:
    """Everything but the KV cache."""
    spec, t = engine.spec, engine.tensor
    found = {"weights": weight_bytes(spec, engine.dtype, tensor=t, pipeline=engine.pipeline, expert=engine.data)}
    if engine.adapter is not None:
        found["adapters"] = engine.adapter / (t * engine.pipeline) * size_of(wide(engine.dtype))
    found["activations"] = engine.max_num_batched_tokens * forward_width(spec, t) * size_of(wide(engine.dtype))
    narrow = size_of(wide(engine.dtype)) if size_of(wide(engine.dtype)) < 4 else 0.0
    found["logits"] = engine.max_num_seqs * spec.vocabulary * (narrow + ENGINE_LOGIT_BYTES)
    return found | overhead(engine.device_kind, 1 if t * engine.pipeline * engine.data > 1 else 0)


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """One rank of a frozen model that scores `tokens` in one forward pass; `outputs` per token as in Training."""

    spec: ModelSpec
    tokens: float
    dtype: str = "bfloat16"
    tensor: int = 1
    data: int = 1
    zero_stage: int = 0
    outputs: int | None = None
    fragmentation: float = FRAGMENTATION
    device_kind: str = "gpu"


def scoring(frozen: Scoring) -> Footprint:
    """Bytes on one device: weights as long as it is loaded, one layer's activations and the logits in a pass."""
    spec, size = frozen.spec, size_of(wide(frozen.dtype))
    outputs = spec.vocabulary if frozen.outputs is None else frozen.outputs
    share = frozen.data if frozen.zero_stage == 3 else 1
    working = {
        "activations": frozen.tokens * forward_width(spec, frozen.tensor) * size,
        "logits": frozen.tokens * outputs / frozen.tensor * SCORE_LOGIT_BYTES,
    }
    return Footprint(
        resident={"weights": weight_bytes(spec, frozen.dtype, tensor=frozen.tensor) / share}
        | overhead(frozen.device_kind, 1 if frozen.tensor > 1 else 0),
        instants={"pass": fragmented(working, frozen.fragmentation)},
    )


def wide(dtype: str) -> str:
    """The dtype of activations, embeddings and norms beside weights of 8 bits (bitsandbytes and fp8 checkpoints
    quantise the layers' matrices only)."""
    return "bfloat16" if dtype in ("int8", "fp8") else dtype


def weight_bytes(spec: ModelSpec, dtype: str, *, tensor: int = 1, pipeline: int = 1, expert: int = 1) -> float:
    """Of a model on one device; 8-bit weights leave embeddings, head and norms in bfloat16."""
    matrices = spec.matrix_parameters
    rest = spec.parameters - matrices
    share = device_parameters(spec, tensor=tensor, pipeline=pipeline, expert=expert) / spec.parameters
    return share * (matrices * size_of(dtype) + rest * size_of(wide(dtype)))


def forward_width(spec: ModelSpec, tensor: int = 1) -> float:
    """Numbers per token that live at once in a forward pass without gradients: the residual, a norm's output, and the
    wider of attention (queries, keys, values, output) and MLP (before and after the nonlinearity)."""
    if spec.mla is None:
        attention = (2 * spec.heads + 2 * max(spec.kv_heads, tensor)) * spec.head_dim / tensor
    else:
        attention = spec.heads * (2 * spec.mla.qk_head_dim + 2 * spec.mla.v_head_dim) / tensor
    arrays = 3 if spec.gated else 2
    mlp = arrays * spec.intermediate / tensor
    if spec.moe is not None:
        copies = spec.moe.experts_per_token
        mlp = copies * (2 * spec.hidden + arrays * spec.moe.intermediate / tensor)
    return 2 * spec.hidden + max(attention, mlp)
