"""Forward and backward passes of training and scoring, from the kernels of their device.

A pass takes what its kernels take: matrix products and attention at their sizes, and the small kernels that only move
data. The same kernels that make up an engine's iteration are used (`profiles.engine_table`), without CUDA graphs:
launches from Python are a floor below which no pass gets (`profiles.roofline`).

    forward   layers · (products + attention + small) + head
    backward  layers · (2 · products + 3.4 · attention + 2 · small + sums of gradients) + 2 · head; and the layers'
              forward once more where they are recomputed
    head      product with the vocabulary, on the last pipeline stage, which paces the others; and passes over logits
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.measurement import HEADLESS
from profiles import engine_table as composed
from profiles.kernels import MEMORY_EFFICIENCY

if TYPE_CHECKING:
    from lab.model import ModelSpec
    from profiles.engine_table import Build
    from profiles.iteration import Floats
    from profiles.kernels import Kernels
    from profiles.layout import Layout

ATTENTION_BACKWARD = 3.4
"""time of attention's backward pass over its forward pass: 2.5 times the arithmetic (five products instead of two), at
0.74 of its speed (Shah et al. 2024, FlashAttention-3: 640 against 470 TFLOP/s for causal attention with heads of 128)"""
SUSTAINED = 0.85
"""speed of matrix products in training over that of the same kernels measured alone and cold: clocks under lasting
load, and streams that share memory with collectives. Fitted to the even half of the published cases (7 H100 and GB200
runs bound by training, 30 November 2026), rounded"""
EAGER_SMALL = 3.5
"""bytes moved by the small kernels of PyTorch's modules over those of an engine's fused ones: a norm widens to float32,
squares, averages, scales and narrows in kernels of their own, about 36 bytes a value instead of 8; rotary embeddings and
gated activations 2-3 times (modelling code of Hugging Face Transformers)"""
SMALL_BACKWARD = 2.0
"""small kernels of a backward pass over those of its forward pass: each reads what it is given beside what was kept"""
LOGIT_BYTES = {"forward": 18.0, "backward": 14.0}
"""moved per logit beside the product: written in 16 bits, read and widened to 32, and read for its maximum, its
exponentials and its entry; in the backward pass read, written as a gradient and narrowed again. As the cross-entropy of
Megatron and of PyTorch do, without a fused kernel"""
ATTENTION_TOKENS = 8192.0
"""tokens of the passes at which attention is asked"""
GRADIENT_BYTES = 8.0
"""moved per weight and backward pass: gradients of micro-batches are summed in float32, read and written once"""


GRID = np.unique(np.concatenate([[1.0], np.geomspace(16.0, 65536.0, 49)]))
"""tokens of a pass, and lengths of its sequences, at which its kernels are asked; between them times are linear"""


@dataclass(frozen=True, kw_only=True, eq=False)
class PassTable:
    """Seconds of one device in the forward pass of one pipeline stage, by kind of kernel, over tokens in it (GRID)."""

    layout: Layout
    products: Floats
    small: Floats
    head: Floats
    attention: Floats
    """of one token in sequences of so many"""
    bandwidth: float
    """bytes/s of kernels that only move data"""

    def work(self, op: str, q: Mapping[str, Any]) -> Any:
        """Seconds that the kernels of a pass take on the busiest device; quantities as in `lab.measurement.OPS`, of one
        pass or (passes,) each."""
        spec, headed = self.layout.spec, self.layout.worker.role not in HEADLESS
        tokens = np.maximum(q["tokens"] / self.layout.worker.parallelism.context, 1.0)
        adapted = q["linear_flops"] / spec.linear_flops(q["tokens"], head_tokens=q["tokens"] if headed else 0.0)
        products, small = adapted * _at(self.products, tokens), _at(self.small, tokens)
        attention = tokens * _at(self.attention, _length(spec, q))
        head = adapted * _at(self.head, tokens) if headed else 0.0
        logits = tokens * spec.vocabulary / self.layout.worker.parallelism.tensor if headed else 0.0
        memory = LOGIT_BYTES["backward" if op == "backward" else "forward"] * logits
        layers = products + attention + small
        if op != "backward":
            return layers + head + memory / self.bandwidth
        again = layers if self.layout.scenario.update.recompute == "full" else 0.0
        through = 2.0 * products + ATTENTION_BACKWARD * attention + SMALL_BACKWARD * small + 2.0 * head
        return again + through + (memory + GRADIENT_BYTES * _trained(self.layout)) / self.bandwidth


def table(layout: Layout, kernels: Kernels) -> PassTable:
    """The passes of a trainer or of a scoring model from the kernels of its device."""
    build, stages, spec = _build(layout, kernels), layout.worker.parallelism.pipeline, layout.spec
    return PassTable(
        layout=layout,
        products=_products(layout, build, GRID) / stages / SUSTAINED,
        small=EAGER_SMALL * spec.layers * np.asarray(composed.small_kernels(build, GRID)) / stages,
        head=np.asarray(kernels.gemm(build.dtype, GRID, build.share(spec.vocabulary), spec.hidden)) / SUSTAINED,
        attention=_attention(build) / stages,
        bandwidth=layout.device.memory_bandwidth * MEMORY_EFFICIENCY,
    )


def _at(values: Floats, size: Any) -> Any:
    """Linear between the points of GRID; beyond them in proportion."""
    inside = np.minimum(size, GRID[-1])
    return np.interp(inside, GRID, values) * (size / inside)


def _length(spec: ModelSpec, q: Mapping[str, Any]) -> Any:
    """Tokens of equal sequences in which as many pairs attend."""
    pairs = q["attention_flops"] / spec.attention_flops(1.0)
    return np.maximum(2 * pairs / np.maximum(q["tokens"], 1.0) - 1, 1.0)


def _products(layout: Layout, build: Build, tokens: Floats) -> Floats:
    """All layers' matrix products and activations; routed experts get the tokens of all ranks that share them."""
    spec, spread = layout.spec, layout.worker.parallelism
    total = spec.layers * composed.attention_matrices(build, tokens)
    total = total + (spec.layers - spec.moe_layers) * composed.mlp(build, tokens, spec.intermediate)
    if (moe := spec.moe) is None:
        return total
    k, met = build.kernels, tokens * spread.expert
    routed = k.moe(
        build.dtype, met, spec.hidden, moe.intermediate, moe.experts_per_token, moe.num_experts, spread.tensor,
        spread.expert,
    )  # fmt: skip
    router = k.gemm("bfloat16", tokens, moe.num_experts, spec.hidden)
    shared = composed.mlp(build, tokens, moe.shared_intermediate) if moe.shared_intermediate else 0.0
    sorted_bytes = 4 * tokens * moe.experts_per_token * spec.hidden * build.wide  # read and written, there and back
    return np.asarray(total + spec.moe_layers * (routed + router + shared + k.memory_bound(sorted_bytes)))


def _attention(build: Build) -> Floats:
    """All layers' attention, per token, in sequences of so many tokens; latent keys are widened first.

    As many sequences at once as hold `ATTENTION_TOKENS`: a GPU is then full.
    """
    spec, heads = build.spec, build.share(build.spec.heads)
    kv_heads, head_dim = build.share(spec.kv_heads), spec.head_dim
    if spec.mla is not None:
        kv_heads, head_dim = heads, spec.mla.qk_head_dim
    batch = np.maximum(ATTENTION_TOKENS / GRID, 1.0)
    seconds = build.kernels.context_attention(batch, GRID, 0.0, heads, kv_heads, head_dim, build.kv_dtype)
    return np.asarray(spec.layers * seconds / (batch * GRID))


def _build(layout: Layout, kernels: Kernels) -> Build:
    dtype = layout.worker.dtype
    return composed.Build(
        spec=layout.spec, kernels=kernels, dtype=dtype, expert_dtype=dtype, head_dtype=dtype,
        kv_dtype=layout.activations, tensor_parallel=layout.worker.parallelism.tensor, expert_parallel=1,
        data_parallel=1, fusion=composed.Fusion(),
    )  # fmt: skip


def _trained(layout: Layout) -> float:
    """Weights of one device whose gradients are summed."""
    return float(layout.scenario.trainable_parameters(layout.worker.role)) * layout.share
