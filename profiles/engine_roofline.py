"""Iterations of a rollout engine from its device's datasheet, as an `EngineTable`.

Every group of kernels takes the larger of its arithmetic and of reading its weights once. With p pipeline stages, p
batches are on their way at once and each sequence gets a token once they all went through; what the table calls an
iteration is that whole round, so every stage reads its weights p times in it. With data-parallel copies the table is
that of one copy, the others being equally busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lab.model import DTYPE_BYTES, attended
from profiles import roofline
from profiles.iteration import EngineTable

if TYPE_CHECKING:
    from profiles.layout import Layout

Floats = NDArray[np.float64]


def table(layout: Layout) -> EngineTable:
    """The engine of a rollout worker. Nothing in it is measured."""
    rollout, kind = layout.scenario.rollout, layout.device.kind
    tokens = _grid(layout, rollout.max_num_batched_tokens)
    sequences = _grid(layout, rollout.max_num_seqs)
    return EngineTable(
        token_grid=tokens,
        token_seconds=np.array([token_seconds(layout, float(n)) for n in tokens]),
        sequence_grid=sequences,
        sequence_seconds=np.array([sequence_seconds(layout, float(n)) for n in sequences]),
        step_s=_step_seconds(layout),
        sequence_s=roofline.ENGINE_SEQUENCE_S[kind],
        prefill_step_s=roofline.ENGINE_PREFILL_LAYER_S[kind] * layout.spec.layers,
        **_attention(layout),
    )


def seconds(layout: Layout, q: Mapping[str, float]) -> float:
    """One iteration with the quantities of `engine_step`, those of all copies together."""
    spread, kind = layout.worker.parallelism, layout.device.kind
    host = _step_seconds(layout) + roofline.ENGINE_SEQUENCE_S[kind] * q["sequences"]
    host += roofline.ENGINE_PREFILL_LAYER_S[kind] * layout.spec.layers * min(1.0, q.get("prefill_steps", 0.0))
    products = token_seconds(layout, q["tokens"] / spread.data)
    products += sequence_seconds(layout, q["sequences"] / spread.data)
    arithmetic = q["attention_flops"] / (_attention_flops(layout) * len(layout.worker.devices))
    read = q["kv_bytes"] * _kept_twice(layout) / (_streaming(layout) * len(layout.worker.devices))
    return host + products + arithmetic + read


def _step_seconds(layout: Layout) -> float:
    """What an iteration takes whatever is in it: the host's time for each stage, and the small kernels of all layers."""
    kind = layout.device.kind
    host = roofline.ENGINE_STEP_S[kind] * layout.worker.parallelism.pipeline
    return host + roofline.ENGINE_LAYER_S[kind] * layout.spec.layers


def _streaming(layout: Layout) -> float:
    """Bytes per second at which an engine's kernels read weights, keys and values on one device."""
    return layout.device.memory_bandwidth * roofline.ENGINE_MEMORY_EFFICIENCY[layout.device.kind]


def _computing(layout: Layout, dtype: str | None = None) -> float:
    """FLOP/s of an engine's kernels on one device."""
    return roofline.peak(layout, dtype) * roofline.DECODE_EFFICIENCY[layout.device.kind]


def token_seconds(layout: Layout, tokens: float) -> float:
    """What grows with the scheduled tokens of one copy: products with the layers' weights, and collectives."""
    spec, spread, dtype = layout.spec, layout.worker.parallelism, layout.worker.dtype
    batch = tokens / spread.pipeline
    routed = spec.moe.experts_per_token / spec.moe.num_experts * spec.expert_parameters if spec.moe else 0.0
    dense = spec.active_matrix_parameters - routed + layout.adapter_parameters
    total = _products(layout, dense / spread.tensor, batch, dense / spread.tensor * DTYPE_BYTES[dtype])
    if spec.moe is not None:
        hit = 1 - (1 - spec.moe.experts_per_token / spec.moe.num_experts) ** (batch * spread.data)
        share = 1 / (spread.tensor * spread.data)
        read = hit * spec.expert_parameters * DTYPE_BYTES[dtype] * share
        total += _products(layout, routed * share, batch * spread.data, read)
    return total + roofline.engine_talk(layout, tokens)


def sequence_seconds(layout: Layout, sequences: float) -> float:
    """The LM head of one copy, for the last token of each sequence."""
    spec, spread = layout.spec, layout.worker.parallelism
    head = spec.vocabulary * spec.hidden / spread.tensor
    batch = sequences / spread.pipeline
    return spread.pipeline * _products(layout, head, batch, head * DTYPE_BYTES[layout.activations])


def _products(layout: Layout, parameters: float, tokens: float, read: float) -> float:
    """Seconds of `tokens` rows by matrices of one device, whose weights are `read` bytes."""
    arithmetic = 2 * parameters * tokens / _computing(layout)
    return max(arithmetic, read / _streaming(layout))


def _attention(layout: Layout) -> dict[str, Any]:
    """The attention part of the table: two constants where it is linear in the context, else a grid."""
    spec, spread = layout.spec, layout.worker.parallelism
    devices = spread.tensor * spread.pipeline
    flops, bandwidth = _attention_flops(layout) * devices, _streaming(layout) * devices
    kept = _kept_twice(layout)
    if spec.mla is None and spec.sliding_window is None:
        read = spec.kv_bytes_per_token(layout.worker.kv_dtype) * kept / bandwidth
        return {"token_context_s": spec.attention_flops(1.0) / flops, "context_read_s": read}
    longest = float(layout.scenario.workload.max_sequence_tokens + 1)
    contexts = sorted({0.0, longest, min(float(spec.sliding_window or longest), longest)})
    chunks = np.array([0.0, *np.geomspace(16, max(32, layout.scenario.rollout.max_num_batched_tokens), 12)])
    prefixes, decodes = np.array(contexts), np.array([0.0, float(layout.scenario.rollout.max_num_seqs)])

    def reading(context: float) -> float:
        return spec.kv_bytes(context, layout.worker.kv_dtype) * kept / bandwidth

    def prefill(chunk: float, prefix: float) -> float:
        return spec.causal_attention_flops(chunk, before=prefix) / flops + (reading(prefix) if chunk else 0.0)

    def decode(context: float) -> float:
        windowed = attended(1, before=context, window=spec.sliding_window)
        work = spec.attention_flops(attended(1, before=context), windowed=windowed, absorbed=True)
        return work / flops + reading(context)

    before = np.array([[prefill(chunk, prefix) for prefix in prefixes] for chunk in chunks])
    after = np.array([[number * decode(context) for context in contexts] for number in decodes])
    grids = {"chunk_grid": chunks, "prefix_grid": prefixes, "decode_grid": decodes, "context_grid": np.array(contexts)}
    return {**grids, "attention_seconds": before[:, :, None, None] + after[None, None]}


def _attention_flops(layout: Layout) -> float:
    """FLOP/s of one device in attention, which computes in 16 bits or more."""
    return _computing(layout, layout.activations)


def _kept_twice(layout: Layout) -> float:
    """How often keys and values are kept in all: more than once where ranks outnumber the heads that hold them."""
    heads = 1 if layout.spec.mla is not None else layout.spec.kv_heads
    return max(1.0, layout.worker.parallelism.tensor / heads)


def _grid(layout: Layout, last: int) -> Floats:
    """Counts of tokens or sequences: doubling, with three more steps where work overtakes the reading of weights."""
    knee = _computing(layout) / _streaming(layout)
    knee *= DTYPE_BYTES[layout.worker.dtype] / 2 * layout.worker.parallelism.pipeline
    powers = [float(2**i) for i in range(int(np.ceil(np.log2(last))) + 1)]
    return np.unique([0.0, *powers, *(x for x in (0.7 * knee, knee, 1.4 * knee) if x < powers[-1])])
