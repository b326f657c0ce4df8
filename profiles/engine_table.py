"""engine_table: kernels composed to the iterations of one model, as vLLM runs it with tensor and expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from profiles.iteration import EngineTable, Floats
from profiles.kernels import WIDTH, wide

if TYPE_CHECKING:
    from lab.model import ModelSpec
    from profiles.kernels import Kernels

TOKENS = np.unique(np.concatenate([
    np.arange(1.0, 18), np.arange(24.0, 257, 8), np.arange(256.0, 513, 32),
    np.geomspace(512, 32768, 7), [768, 1536, 3072, 6144, 12288], np.arange(512.0, 4353, 256),
]))  # fmt: skip
"""token counts at which the tables change slope"""
SEQUENCES = np.array([0, 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024], dtype=float)
CHUNKS = np.array(
    [0, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384], dtype=float
)
PREFIXES = np.concatenate([
    [-8192, -6144, -4096, -3072, -2048, -1024, -512, -256, -128, 0],
    [256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072],
]).astype(float)  # fmt: skip
DECODES = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], dtype=float)
CONTEXTS = np.array([0, 63, 127, 255, 511, 1023, 2047, 4095, 8191, 16383, 32767, 65535, 131071], dtype=float)
CAPTURED = np.array([1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)], dtype=float)
"""vLLM's default CUDA-graph sizes up to 512 (vllm/config/compilation.py)"""
SHORTEST = 16.0
"""tokens of the shortest prompt, for attention"""
BF16 = 2.0
STEP_S, SEQUENCE_S, PREFILL_LAYER_S = 5.4e-4, 3.5e-5, 1.45e-4
"""host time of vLLM on data-centre GPUs, per iteration, per scheduled sequence, and per layer of an iteration with
prefill, which runs outside full CUDA graphs: fitted on the even half of the dense cases of `lab validate --set silicon-dense`,
where leaving out a (system, model) group gives 0.4-0.8 ms, 21-41 us and 0.12-0.33 ms"""


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """Which small kernels an engine merges into others; the defaults are those of vLLM on Ampere and Hopper."""

    norm_quant: bool = True
    """inputs of 8 bits are made inside norms and activations (torch.compile); those of 4 bits or in blocks never are"""
    attention_quant: bool = False
    """attention writes quantised outputs (`enable_attn_fusion`)"""
    allreduce_norm: bool = False
    """all-reduce, norm and quantising are one kernel of FlashInfer (`fuse_allreduce_rms`)"""


@dataclass(frozen=True, kw_only=True)
class Build:
    """What a table is built from."""

    spec: ModelSpec
    kernels: Kernels
    dtype: str
    expert_dtype: str
    head_dtype: str
    kv_dtype: str
    tensor_parallel: int
    expert_parallel: int
    data_parallel: int
    fusion: Fusion

    @property
    def fused_reductions(self) -> bool:
        return self.fusion.allreduce_norm and self.tensor_parallel > 1

    @property
    def quantising(self) -> int:
        """Kernels of a layer that do nothing but quantise the input of a product."""
        if WIDTH[self.dtype] >= BF16:
            return 0
        alone = not self.fusion.norm_quant or WIDTH[self.dtype] < 1 or self.dtype == "fp8_block"
        before_products = 2 * (alone and not self.fused_reductions)
        return before_products + alone + (not self.fusion.attention_quant)

    @property
    def wide(self) -> float:
        """Bytes of an activation."""
        return wide(self.dtype)

    def share(self, size: int) -> int:
        """The part of a size that one rank holds, rounded up."""
        return -(-size // self.tensor_parallel)


def engine_table(
    spec: ModelSpec, dtype: str, kv_dtype: str, tensor_parallel: int, kernels: Kernels, expert_parallel: int = 1, *,
    expert_dtype: str | None = None, head_dtype: str = "bfloat16", data_parallel: int = 1, fusion: Fusion | None = None,
) -> EngineTable:  # fmt: skip
    """Times of one engine of `tensor_parallel` devices.

    dtype: of the matrices; experts may have another (`expert_dtype`), and the LM head stays in 16 bits as quantised
    checkpoints leave it (`head_dtype`). kv_dtype: of the cache. With `expert_parallel` the experts are spread over so
    many of the devices and cut over the rest. `data_parallel` engines that share their experts run in lock-step: each
    computes its own attention, and all tokens meet in the experts. Host time is not in it: `step_s` and `sequence_s`
    are zero.
    """
    build = Build(
        spec=spec, kernels=kernels, dtype=dtype, expert_dtype=expert_dtype or dtype, head_dtype=head_dtype,
        kv_dtype=kv_dtype, tensor_parallel=tensor_parallel, expert_parallel=expert_parallel,
        data_parallel=data_parallel, fusion=fusion or Fusion(),
    )  # fmt: skip
    before = len(kernels.notes)
    tokens = TOKENS[kernels.token_limit(dtype) >= TOKENS]
    table = EngineTable(
        token_grid=tokens, token_seconds=token_seconds(build, tokens),
        sequence_grid=SEQUENCES, sequence_seconds=sequence_seconds(build, SEQUENCES),
        chunk_grid=CHUNKS, prefix_grid=PREFIXES, decode_grid=DECODES, context_grid=CONTEXTS,
        attention_seconds=attention_seconds(build), capture_sizes=CAPTURED,
        measured=len(kernels.notes) == before,
    )  # fmt: skip
    return table


def token_seconds(build: Build, tokens: Floats) -> Floats:
    """Everything that depends on the scheduled tokens, all layers."""
    spec, k = build.spec, build.kernels
    moe_layers = spec.moe_layers
    total = spec.layers * (attention_matrices(build, tokens) + small_kernels(build, tokens))
    total = total + (spec.layers - moe_layers) * mlp(build, tokens, spec.intermediate)
    if moe_layers:
        total = total + moe_layers * experts(build, tokens)
    width = tokens * spec.hidden * build.wide
    reductions = 2 * spec.layers + 1  # after attention and after the MLP; one for the sharded embedding
    op = "fused_all_reduce" if build.fused_reductions else "all_reduce"
    total = total + reductions * k.collective(op, width, build.tensor_parallel)
    return np.asarray(total + k.memory_bound(2 * width) + k.memory_bound(2 * width))  # embedding, last norm


def attention_matrices(build: Build, tokens: Floats) -> Floats:
    """q, k, v in one product and o in another; the low-rank projections where attention is latent."""
    spec, k, dtype = build.spec, build.kernels, build.dtype
    heads = build.share(spec.heads)
    if spec.mla is None:
        qkv = (heads + 2 * build.share(spec.kv_heads)) * spec.head_dim
        return k.gemm(dtype, tokens, qkv, spec.hidden) + k.gemm(dtype, tokens, spec.hidden, heads * spec.head_dim)
    mla = spec.mla
    down = mla.cached + (mla.q_lora_rank or 0)
    queries = k.gemm(dtype, tokens, heads * mla.qk_head_dim, mla.q_lora_rank or spec.hidden)
    latent = k.gemm(dtype, tokens, heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    out = k.gemm(dtype, tokens, spec.hidden, heads * mla.v_head_dim)
    return k.gemm(dtype, tokens, down, spec.hidden) + queries + latent + out


def mlp(build: Build, tokens: Floats, intermediate: int) -> Floats:
    """Gate and up in one product, activation, down."""
    spec, k = build.spec, build.kernels
    own = build.share(intermediate)
    wide = (2 if spec.gated else 1) * own
    products = k.gemm(build.dtype, tokens, wide, spec.hidden) + k.gemm(build.dtype, tokens, spec.hidden, own)
    return products + k.memory_bound(tokens * (wide + own) * build.wide)


def experts(build: Build, tokens: Floats) -> Floats:
    """Router in 16 bits, routed experts, and the shared expert where there is one."""
    spec, k, moe = build.spec, build.kernels, build.spec.moe
    assert moe is not None
    ep, devices = build.expert_parallel, build.tensor_parallel * build.data_parallel
    met = tokens * build.data_parallel
    routed = k.moe(
        build.expert_dtype, met, spec.hidden, moe.intermediate, moe.experts_per_token, moe.num_experts,
        max(1, devices // ep), ep,
    )  # fmt: skip
    if build.data_parallel > 1:
        width = met * spec.hidden * build.wide
        routed = routed + k.collective("all_gather", width, devices) + k.collective("reduce_scatter", width, devices)
    router = k.gemm("bfloat16", tokens, moe.num_experts, spec.hidden)
    shared = mlp(build, tokens, moe.shared_intermediate) if moe.shared_intermediate else 0.0
    return np.asarray(router + routed + shared)


def small_kernels(build: Build, tokens: Floats) -> Floats:
    """Norms with their residual (read two, write two), rotary embedding, norms of queries and keys, cache, quantising."""
    spec, k = build.spec, build.kernels
    hidden, kv_width = tokens * spec.hidden, WIDTH[build.kv_dtype]
    norms = 0.0 if build.fused_reductions else spec.norms_per_layer * k.memory_bound(4 * hidden * build.wide)
    keys = 2 * tokens * build.share(spec.kv_heads) * spec.head_dim
    rotary = k.memory_bound(2 * (tokens * build.share(spec.heads) * spec.head_dim + keys) * build.wide)
    cache = k.memory_bound(keys * (build.wide + kv_width))
    quantising = build.quantising * k.memory_bound(hidden * (build.wide + WIDTH[build.dtype]))
    return norms + rotary * (2 if spec.qk_norm else 1) + cache + quantising


def sequence_seconds(build: Build, sequences: Floats) -> Floats:
    """LM head on one row of each sequence, its gather over the ranks, and sampling (a few passes over the logits)."""
    spec, k = build.spec, build.kernels
    logits = sequences * spec.vocabulary
    head = k.gemm(build.head_dtype, np.maximum(sequences, 1), build.share(spec.vocabulary), spec.hidden)
    gather = k.collective("all_gather", logits * build.wide, build.tensor_parallel)
    sampling = k.memory_bound(4 * logits * 4.0)
    return np.where(sequences > 0, head + gather + sampling, 0.0)


def attention_seconds(build: Build) -> Floats:
    """(chunks, prefixes, decodes, contexts): prefill and decode one after the other, all layers."""
    prefill = np.zeros((len(CHUNKS), len(PREFIXES)))
    decode = np.zeros((len(DECODES), len(CONTEXTS)))
    windowed = build.spec.window_layers
    for layers, window in ((build.spec.layers - windowed, 0), (windowed, build.spec.sliding_window or 0)):
        if layers:
            prefill = prefill + layers * _prefill(build, window)
            decode = decode + layers * _decode(build, window)
    return prefill[:, :, None, None] + decode[None, None, :, :]


def _prefill(build: Build, window: int) -> Floats:
    """(chunks, prefixes). Latent attention decompresses keys and values first and then is multi-head.

    c tokens with a negative prefix −p stand for b = c / (c − 2p) equal prompts, which attend to as many pairs:
    b·(c/b)²/2 = c·(−p) + c²/2. Prompts are not shorter than SHORTEST.
    """
    spec, heads = build.spec, build.share(build.spec.heads)
    kv_heads, head_dim = build.share(spec.kv_heads), spec.head_dim
    if spec.mla is not None:
        kv_heads, head_dim = heads, spec.mla.qk_head_dim
    chunks, prefixes = CHUNKS[:, None], PREFIXES[None, :]
    most = np.maximum(chunks / SHORTEST, 1.0)
    prompts = np.clip(chunks / np.maximum(chunks + 2 * np.minimum(prefixes, 0.0), 1e-9), 1.0, most)
    return build.kernels.context_attention(
        prompts, chunks / prompts, np.maximum(prefixes, 0.0), heads, kv_heads, head_dim, build.kv_dtype, window
    )


def _decode(build: Build, window: int) -> Floats:
    """(decodes, contexts). Latent attention reads one key of the cached width for all heads."""
    spec, heads = build.spec, build.share(build.spec.heads)
    kv_heads, head_dim = build.share(spec.kv_heads), spec.head_dim
    if spec.mla is not None:
        kv_heads, head_dim = 1, spec.mla.cached
    decodes, contexts = DECODES[:, None], CONTEXTS[None, :]
    return build.kernels.generation_attention(decodes, contexts, heads, kv_heads, head_dim, build.kv_dtype, window)
