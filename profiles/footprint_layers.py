"""Activations: what one token leaves in a layer for the backward pass, and what the backward pass adds.

Counted tensor by tensor as in Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer
Models", section 4), whose 34·s·b·h bytes per layer follow for their layer (ungated MLP of width 4h, as many key heads
as query heads, dropout). Attention is computed blockwise (Dao 2023), so no scores are kept unless `scores` says so.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from lab.model import ModelSpec

Recompute = Literal["none", "selective", "full"]


class Widths(NamedTuple):
    """Numbers per token in one layer on one tensor-parallel rank; `fp32` are the ones kept in four bytes.

    Attributes:
        kept: saved for backward where nothing is recomputed; `light`: where all but matrix products and attention is.
        grads: gradients and scratch of the backward pass while the saved ones are still there.
    """

    kept: float
    light: float
    grads: float
    kept_fp32: float
    grads_fp32: float


def input_width(spec: ModelSpec) -> float:
    """Numbers per token that full recomputation keeps of each layer: its input, whole on every tensor-parallel rank."""
    return float(spec.hidden)


def widths(spec: ModelSpec, *, tensor: int = 1, sparse: bool | None = None, scores: int = 0) -> Widths:
    """Of one layer; `sparse`: with routed experts (None: where the model has them).

    `scores`: tokens of the sequence where attention keeps its softmax (Korthikanti's 2·a·s·b·s); 0: blockwise.
    """
    attention = _attention(spec, tensor, scores)
    sparse = spec.moe_layers > 0 if sparse is None else sparse
    mlp = _experts(spec, tensor) if sparse else _dense(spec, tensor)
    return Widths(
        kept=attention.kept + mlp.kept,
        light=attention.light + mlp.light,
        grads=max(attention.grads, mlp.grads),
        kept_fp32=attention.kept_fp32 + mlp.kept_fp32,
        grads_fp32=max(attention.grads_fp32, mlp.grads_fp32),
    )


def every_layer(spec: ModelSpec, *, tensor: int = 1, scores: int = 0) -> list[tuple[int, Widths]]:
    """How many layers have which widths: the first ones may be dense in a model with experts."""
    counts = ((spec.layers - spec.moe_layers, False), (spec.moe_layers, True))
    return [(count, widths(spec, tensor=tensor, sparse=sparse, scores=scores)) for count, sparse in counts if count]


def _attention(spec: ModelSpec, tensor: int, scores: int) -> Widths:
    """Norm input and output, queries, keys, values (before and after their own norm), the output; the backward pass
    adds dO, dQ, dK, dV, an fp32 accumulator of dQ, and dK, dV of every query head (flash-attention's mha_bwd)."""
    if spec.mla is None:
        queries, keys = spec.heads * spec.head_dim / tensor, max(spec.kv_heads / tensor, 1) * spec.head_dim
        values, latent = keys, 0.0
        whole = queries
    else:
        mla = spec.mla
        queries = keys = spec.heads * mla.qk_head_dim / tensor
        values = spec.heads * mla.v_head_dim / tensor
        latent, whole = float(mla.cached + (mla.q_lora_rank or 0)), values
    normed = queries + keys if spec.qk_norm else 0.0
    light = spec.hidden + queries + keys + values + latent + whole
    expanded = 2 * queries if spec.mla is None and spec.kv_heads < spec.heads else 0.0
    softmax = spec.heads / tensor * scores
    return Widths(
        kept=light + spec.hidden + normed + softmax,
        light=light,
        grads=whole + queries + keys + values + expanded + softmax,
        kept_fp32=0.0,
        grads_fp32=queries,
    )


def _dense(spec: ModelSpec, tensor: int) -> Widths:
    """Norm input and output, gate and up (or the one before the nonlinearity), their product; and their gradients."""
    wide = spec.intermediate / tensor
    before = (2 if spec.gated else 1) * wide
    light = spec.hidden + before
    return Widths(
        kept=light + spec.hidden + wide, light=light, grads=before + wide + spec.hidden, kept_fp32=0.0, grads_fp32=0.0
    )


def _experts(spec: ModelSpec, tensor: int) -> Widths:
    """As in torchtitan's MoE: tokens sorted by expert and padded to the grouped product's alignment (two copies), the
    experts' own activations and outputs, the outputs in fp32 while they are weighed; the shared experts' MLP."""
    moe = spec.moe
    assert moe is not None
    copies, wide = float(moe.experts_per_token * spec.hidden), moe.experts_per_token * moe.intermediate / tensor
    before, shared = (2 if spec.gated else 1), moe.shared_intermediate / tensor
    light = spec.hidden + copies + before * (wide + shared) + copies
    return Widths(
        kept=light + spec.hidden + copies + wide + shared,
        light=light,
        grads=2 * copies + (before + 1) * wide + spec.hidden,
        kept_fp32=copies + 2 * moe.num_experts,
        grads_fp32=copies,
    )
