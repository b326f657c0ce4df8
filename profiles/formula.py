"""The cost formulas: each op's time is a sum of coefficient × quantity, with coefficients ≥ 0.

Fitting and predicting both use these. The quantities are those of `lab.measurement.OPS`; `each` counts calls or
passes, so its coefficient is the constant part of a formula.
"""

from __future__ import annotations

from collections.abc import Mapping

FORMULAS: dict[str, tuple[str, ...]] = {
    "engine_step": ("each", "sequences", "linear_flops", "attention_flops", "kv_bytes"),
    "rollout_host": ("each", "samples", "tokens"),
    "logprob": ("each", "linear_flops", "attention_flops"),
    "score_host": ("each", "samples", "tokens"),
    "reward": ("each", "samples", "tokens"),
    "forward": ("each", "linear_flops", "attention_flops"),
    "backward": ("each", "linear_flops", "attention_flops"),
    "optimizer": ("each", "parameters"),
    "grad_sync": ("each", "bytes"),
    "update_host": ("each", "minibatches", "samples", "tokens"),
    "advantage": ("each", "samples", "tokens"),
    "weight_sync": ("each", "bytes"),
    "checkpoint": ("each", "bytes"),
    "dispatch": ("each", "bytes"),
}

PARALLEL = frozenset({"linear_flops", "attention_flops", "kv_bytes"})
"""terms that more threads divide"""


def terms(op: str, quantities: Mapping[str, float]) -> dict[str, float]:
    """The quantities that an op's formula multiplies, `each` among them; absent ones are zero."""
    each = quantities.get("calls", quantities.get("passes", 1.0))
    return {name: each if name == "each" else quantities.get(name, 0.0) for name in FORMULAS[op]}
