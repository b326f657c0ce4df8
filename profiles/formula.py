"""The cost formulas: each op's time is a sum of coefficient × quantity, with coefficients ≥ 0.

Fitting and predicting both use these. The quantities are those of `lab.measurement.OPS`; `each` counts calls or
passes, so its coefficient is the constant part of a formula.
"""

from __future__ import annotations

from collections.abc import Mapping

from lab.measurement import LOGGED_STAGES

FORMULAS: dict[str, tuple[str, ...]] = {
    "engine_step": (
        "each", "layers", "prefill_steps", "sequences", "linear_flops", "activations", "attention_flops", "kv_bytes",
    ),
    "rollout_host": ("each", "samples", "tokens"),
    "logprob": ("each", "layers", "linear_flops", "activations", "attention_flops"),
    "score_host": ("each", "samples", "tokens"),
    "reward": ("each", "samples", "tokens"),
    "forward": ("each", "layers", "linear_flops", "activations", "attention_flops", "adapter_values", "zero3_passes"),
    "backward": (
        "each", "layers", "linear_flops", "activations", "attention_flops", "adapter_values", "zero2_passes",
        "zero3_passes",
    ),
    "optimizer": (
        "each", "parameters", "zero1_passes", "zero2_passes", "zero3_passes", "gathers", "gathered_bytes",
    ),
    "grad_sync": ("each", "bytes", "zero1_bytes"),
    "update_host": ("each", "minibatches", "samples", "tokens", "peers"),
    "advantage": ("each", "samples", "tokens"),
    "weight_sync": ("each", "bytes"),
    "checkpoint": ("each", "bytes"),
    "checkpoint_read": ("each", "bytes"),
    "dispatch": ("each", "bytes"),
    "message": ("each",),
    "all_reduce": ("each", "bytes"),
    "reduce_scatter": ("each", "bytes"),
    "all_gather": ("each", "bytes"),
    "broadcast": ("each", "bytes"),
    "engine_start": ("each", "bytes"),
    "engine_sleep": ("each", "bytes"),
    "engine_wake": ("each", "bytes"),
    "engine_stop": ("each", "bytes"),
    "release": ("each", "bytes"),
    "trainer_start": ("each", "bytes"),
    "scorer_start": ("each", "bytes"),
    "engine_launch": ("each",),
    "trainer_launch": ("each",),
    "scorer_launch": ("each",),
    "process_launch": ("each",),
} | {f"{stage}_stage": ("each", "tokens") for stage in LOGGED_STAGES}  # fmt: skip

PARALLEL = frozenset({"linear_flops", "activations", "attention_flops", "adapter_values", "kv_bytes"})
"""terms that more threads divide"""

MERGED = ("activations", "layers", "gathers", "zero1_bytes", "peers")
"""terms that only networks of different shapes, or trainers of different numbers of ranks or ZeRO stages, tell apart from
others: with one network and trainer they are part of those others"""

_PER_SEQUENCE, _CONTEXT = "number of tokens for each sequence", "context"
RATIOS: dict[frozenset[str], str] = {
    frozenset({"sequences", "linear_flops"}): _PER_SEQUENCE,
    frozenset({"attention_flops", "kv_bytes"}): _PER_SEQUENCE,
    frozenset({"sequences", "kv_bytes"}): _CONTEXT,
    frozenset({"sequences", "attention_flops"}): _CONTEXT,
    frozenset({"linear_flops", "kv_bytes"}): _CONTEXT,
    frozenset({"linear_flops", "attention_flops"}): _CONTEXT,
    frozenset({"samples", "tokens"}): "number of tokens for each sample",
    frozenset({"minibatches", "samples"}): "number of samples in each mini-batch",
}
"""what is the same at all points where two terms rise in proportion"""


def terms(op: str, quantities: Mapping[str, float]) -> dict[str, float]:
    """The quantities that an op's formula multiplies, `each` among them; absent ones are zero."""
    each = quantities.get("calls", quantities.get("passes", 1.0))
    return {name: each if name == "each" else quantities.get(name, 0.0) for name in FORMULAS[op]}
