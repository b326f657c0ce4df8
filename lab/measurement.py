"""Measurement: one measured point of an op, the currency between measuring and fitting."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from lab.model import ModelSpec
from lab.timeline import Span

OPS = {
    # op: the quantities that a point of it carries. Cost formulas over them live in `profiles/cost.py`.
    "engine_step": "one iteration of the rollout engine: sequences, tokens (scheduled), linear_flops, attention_flops, kv_bytes",
    "rollout_host": "a rollout beyond its iterations (requests in, samples out): calls, samples, tokens",
    "logprob": "one frozen forward pass with log-probs of the next tokens: passes, tokens (padded), linear_flops, attention_flops",
    "score_host": "a scoring call beyond its passes (unpacking, padding, packing): calls, samples, tokens",
    "reward": "a rule-based reward: calls, samples, tokens",
    "forward": "a training forward pass with its loss: passes, tokens (padded), linear_flops, attention_flops",
    "backward": "a backward pass: passes, tokens (padded), linear_flops, attention_flops (of the forward pass)",
    "optimizer": "one optimizer step of one rank: passes, parameters",
    "grad_sync": "an all-reduce of gradients: calls, bytes, ranks",
    "update_host": "an update call beyond its passes: calls, minibatches, samples, tokens",
    "advantage": "advantages of a step's samples: calls, samples, tokens",
    "weight_sync": "weights from the trainer into a live engine: calls, bytes",
    "checkpoint": "one written checkpoint: calls, bytes",
    "dispatch": "a remote call with its arguments and result, beyond the work: calls, bytes",
    # Kernels of the rollout engine, one call on one device each, as the op tables give them (`profiles/readers`).
    "gemm": "a matrix product m×k by k×n: m, n, k, bits (of an input element)",
    "context_attention": "attention of new tokens: batch, tokens (of each), prefix, heads, kv_heads, head_dim, window, kv_bits",
    "generation_attention": "attention of one new token: batch, context (of each), heads, kv_heads, head_dim, window, kv_bits",
    "moe": "router-chosen experts: tokens, hidden, intermediate, topk, num_experts, tp, ep, bits",
    "all_reduce": "calls, bytes (of one rank's input), ranks",
    "all_gather": "calls, bytes (of the whole result), ranks",
    "reduce_scatter": "calls, bytes (of the whole input), ranks",
    "all_to_all": "calls, bytes (of one rank's input), ranks",
}


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """How long one op took, once or as the mean of a few repeats."""

    op: str
    """a key of OPS"""
    quantities: dict[str, float]
    """what was done: numbers of tokens, bytes, FLOPs, … as OPS names them"""
    seconds: float
    model: str = ""
    """architecture in the model library"""
    device: str = "cpu-core"
    """device in the device library"""
    neighbours: int = 0
    """other cores of the machine kept busy meanwhile"""
    threads: int = 1
    repeats: int = 1
    source: str = "measured"


HEADLESS = frozenset({"critic", "reward"})
"""roles whose network ends in one number per token instead of logits"""


def pass_quantities(spec: ModelSpec, role: str, num_samples: int, longest: int) -> dict[str, float]:
    """Quantities of one forward pass over right-padded samples; padded rows cost like full ones.

    In a causal pass of length T, T (T + 1) / 2 pairs of tokens attend.
    """
    tokens = num_samples * longest
    return {
        "passes": 1.0,
        "tokens": float(tokens),
        "linear_flops": spec.linear_flops(tokens, head_tokens=0 if role in HEADLESS else tokens),
        "attention_flops": spec.attention_flops(num_samples * longest * (longest + 1) / 2),
    }


def write_jsonl(measurements: Iterable[Measurement], path: Path) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(point) + b"\n" for point in measurements))


def read_jsonl(path: Path) -> list[Measurement]:
    """Raises ValueError naming the line that is no measurement."""
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            found.append(msgspec.json.decode(line, type=Measurement))
        except msgspec.MsgspecError as error:
            raise ValueError(f"line {number}: {error}") from None
    return found


_STAGE_OPS = {
    ("rollout", "decode"): "engine_step",
    ("rollout", "prefill"): "engine_step",
    ("reference", "forward"): "logprob",
    ("value", "forward"): "logprob",
    ("reward", "forward"): "logprob",
    ("update_actor", "forward"): "forward",
    ("update_critic", "forward"): "forward",
    ("update_actor", "backward"): "backward",
    ("update_critic", "backward"): "backward",
    ("update_actor", "optimizer"): "optimizer",
    ("update_critic", "optimizer"): "optimizer",
    ("update_actor", "grad_sync"): "grad_sync",
    ("update_critic", "grad_sync"): "grad_sync",
    ("weight_sync", "transfer"): "weight_sync",
    ("checkpoint", "write"): "checkpoint",
}
_HOSTS = {
    "rollout": "rollout_host",
    "reference": "score_host",
    "value": "score_host",
    "reward": "reward",
    "advantage": "advantage",
    "update_actor": "update_host",
    "update_critic": "update_host",
}


def of_spans(spans: Iterable[Span], *, model: str, device: str, neighbours: int = 0, source: str) -> list[Measurement]:
    """Measurements in the spans of a real run: each op that carries its `quantities`, and each stage's time beyond its ops.

    An op span's quantities are in `attrs["quantities"]`, a stage's in the same place, both with the names of OPS.
    """

    def point(op: str, span: Span, seconds: float) -> Measurement:
        return Measurement(
            op=op, quantities=span.attrs["quantities"], seconds=seconds, model=model, device=device,
            neighbours=neighbours, source=source,
        )  # fmt: skip

    spans = list(spans)
    inside: dict[str, float] = {}
    found = []
    for span in spans:
        if span.op:
            stage = span.span_id.split("#")[0]
            inside[stage] = inside.get(stage, 0.0) + span.seconds
        op = _STAGE_OPS.get((span.stage, span.op))
        if op and "quantities" in span.attrs:
            found.append(point(op, span, span.seconds))
    for span in spans:
        host = _HOSTS.get(span.stage)
        if not span.op and host and "quantities" in span.attrs:
            found.append(point(host, span, span.seconds - inside.get(span.span_id, 0.0)))
    return found
