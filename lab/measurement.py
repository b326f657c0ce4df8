"""Measurement: one measured point of an op, the currency between measuring and fitting."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from lab.errors import InputError
from lab.explain import nearest
from lab.library import devices
from lab.load import content
from lab.model import ModelSpec
from lab.timeline import Span

OPS = {
    # op: the quantities that a point of it carries. Cost formulas over them live in `profiles/formula.py`.
    "engine_step": "one iteration of the rollout engine: sequences, kv_bytes, prefill_steps, and of a pass all but `passes`",
    "rollout_host": "a rollout beyond its iterations (requests in, samples out): calls, samples, tokens",
    "logprob": "a frozen forward pass: passes, tokens (padded), layers, linear_flops, activations, attention_flops",
    "score_host": "a scoring call beyond its passes (unpacking, padding, packing): calls, samples, tokens",
    "reward": "a rule-based reward: calls, samples, tokens",
    "forward": "a training forward pass with its loss: the same, adapter_values, zero3_passes",
    "backward": "a backward pass: the same of its forward pass, adapter_values, zero2_passes, zero3_passes",
    "optimizer": "one optimizer step of one rank: passes, parameters, gathers, gathered_bytes, zeroN_passes",
    "grad_sync": "an all-reduce of gradients: calls, bytes, ranks, zero1_bytes",
    "update_host": "an update call beyond its passes: calls, minibatches, samples, tokens, peers",
    "advantage": "advantages of a step's samples: calls, samples, tokens",
    "weight_sync": "weights from the trainer into a live engine: calls, bytes",
    "checkpoint": "one written checkpoint: calls, bytes",
    "checkpoint_read": "one checkpoint read back and checked: calls, bytes",
    "dispatch": "a remote call with its arguments and result, beyond the work: calls, bytes",
    "message": "a call between processes, as the seconds that it takes from cores: calls",
    "all_reduce": "a collective: calls, bytes (of one rank's input), ranks",
    "reduce_scatter": "a collective: calls, bytes (of one rank's whole input), ranks",
    "all_gather": "a collective: calls, bytes (of the whole result), ranks",
    "broadcast": "a collective: calls, bytes (sent by the root), ranks",
    "engine_start": "an engine built anew around given weights, imports left out: calls, bytes (of weights)",
    "engine_sleep": "an engine that moves its weights off the device and drops its cache: calls, bytes (of weights)",
    "engine_wake": "the same weights back on the device: calls, bytes",
    "engine_stop": "an engine ended and its memory given back, the process stays: calls, bytes (of weights)",
    "release": "a trainer or a frozen model dropped and its memory given back: calls, bytes (of weights and states)",
    "trainer_start": "a trainer built anew and its saved states read back: calls, bytes (of weights and states)",
    "scorer_start": "a frozen model built anew: calls, bytes (of weights)",
    "engine_launch": "a fresh process of an engine, imports and all, until it can work: calls",
    "trainer_launch": "a fresh process of a trainer: calls",
    "scorer_launch": "a fresh process of a frozen model: calls",
    "process_launch": "a fresh process without a model (a function, a buffer): calls",
}
OPS |= {
    # Kernels of an engine: one call on one device, as op tables of real GPUs give them (`profiles/readers/silicon.py`).
    "gemm": "a matrix product of m×k by k×n: m, n, k, bits (of a stored weight)",
    "context_attention": "attention of new tokens: batch, tokens (of each), prefix, heads, kv_heads, head_dim, window, kv_bits",
    "generation_attention": "attention of one new token each: batch, context, heads, kv_heads, head_dim, window, kv_bits",
    "moe": "the routed experts of a layer: tokens, hidden, intermediate, topk, num_experts, tp, ep, bits",
    "all_to_all": "a collective: calls, bytes (of one rank's input), ranks",
    # Parts of one model on one device, as LLMServingSim's tables give them (`profiles/readers/optables.py`); `point`
    # names the part.
    "layer": "one call of a part of the network: tokens",
    "head": "LM head or sampler: sequences",
    "attention": "attention of one layer: prefill_chunk, kv_prefill, n_decode, kv_decode (mean context)",
}
_PASS = "passes tokens layers linear_flops activations attention_flops"
_ZERO = "zero1_passes zero2_passes zero3_passes"
_KV = "heads kv_heads head_dim window kv_bits"
_NAMES = {
    "engine_step": f"{_PASS} sequences kv_bytes prefill_steps",
    "logprob": _PASS,
    "forward": f"{_PASS} adapter_values {_ZERO}",
    "backward": f"{_PASS} adapter_values {_ZERO}",
    "optimizer": f"passes parameters gathers gathered_bytes {_ZERO}",
    "grad_sync": "calls bytes ranks zero1_bytes",
    "update_host": "calls minibatches samples tokens peers",
    "gemm": "m n k bits",
    "context_attention": f"batch tokens prefix {_KV}",
    "generation_attention": f"batch context {_KV}",
    "moe": "tokens hidden intermediate topk num_experts tp ep bits",
    "layer": "tokens",
    "head": "sequences",
    "attention": "prefill_chunk kv_prefill n_decode kv_decode",
}
_NAMES |= dict.fromkeys(("rollout_host", "score_host", "reward", "advantage"), "calls samples tokens")
_NAMES |= dict.fromkeys(("message", "engine_launch", "trainer_launch", "scorer_launch", "process_launch"), "calls")
_NAMES |= dict.fromkeys(
    (
        "weight_sync",
        "checkpoint",
        "checkpoint_read",
        "dispatch",
        "engine_start",
        "engine_sleep",
        "engine_wake",
        "engine_stop",
        "release",
        "trainer_start",
        "scorer_start",
    ),
    "calls bytes",
)
_NAMES |= dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"), "calls bytes ranks")
LOGGED_STAGES = (
    "gen", "old_log_prob", "ref", "values", "reward", "adv", "update_critic", "update_actor", "reshard",
    "testing", "save_checkpoint",
)  # fmt: skip
"""timers of a verl step log"""
OPS |= {f"{stage}_stage": "a whole stage in a step log: steps, tokens" for stage in LOGGED_STAGES}
_NAMES |= {f"{stage}_stage": "steps tokens" for stage in LOGGED_STAGES}
QUANTITIES = {op: tuple(_NAMES[op].split()) for op in OPS}
"""by op: the names that the quantities of a point of it may have"""
HELD_OUT = "held-out"
"""`source` of measurements that are never fitted: they say how well a fit does on what it has not seen"""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """How long one op took, once or as the median of a few repeats."""

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
    spread: float = 0.0
    """of the repeats: from their first to their third quartile, over their median"""
    source: str = "measured"
    point: str = ""
    """the point of a sweep's grid that this repeats; empty: points are told apart by their quantities"""


HEADLESS = frozenset({"critic", "reward"})
"""roles whose network ends in one number per token instead of logits"""


def pass_quantities(
    spec: ModelSpec, role: str, num_samples: int, longest: int, zero_stage: int = 0
) -> dict[str, float]:
    """Quantities of one forward pass over right-padded samples; padded rows cost like full ones.

    In a causal pass of length T, T (T + 1) / 2 pairs of tokens attend.
    """
    columns = pass_columns(spec, role, np.array([num_samples]), np.array([longest]), zero_stage)
    return {name: float(column[0]) for name, column in columns.items()}


def pass_columns(
    spec: ModelSpec, role: str, num_samples: npt.NDArray[np.int64], longest: npt.NDArray[np.int64], zero_stage: int = 0
) -> dict[str, npt.NDArray[np.float64]]:
    """The quantities of many passes, (passes,) each."""
    tokens = (num_samples * longest).astype(float)
    pairs = tokens * (longest + 1) / 2
    linear = spec.linear_flops(1.0, head_tokens=0.0 if role in HEADLESS else 1.0)
    constant = {"passes": 1.0, "layers": float(spec.layers)} | zero_quantities(zero_stage)
    return {
        "tokens": tokens,
        "linear_flops": linear * tokens,
        "attention_flops": spec.attention_flops(1.0) * pairs,
        "activations": tokens * spec.layers * spec.hidden,
    } | {name: np.full(len(tokens), value) for name, value in constant.items()}


def packed_quantities(
    spec: ModelSpec, role: str, lengths: Sequence[int], zero_stage: int = 0, tokens: int | None = None
) -> dict[str, float]:
    """Quantities of one forward pass over samples laid end to end: no padding, and each attends to itself alone.

    `tokens`: that the pass reads, where samples share some of them.
    """
    found = pass_quantities(spec, role, 1, sum(lengths) if tokens is None else tokens, zero_stage)
    return found | {"attention_flops": spec.attention_flops(sum(n * (n + 1) / 2 for n in lengths))}


def zero_quantities(zero_stage: int) -> dict[str, float]:
    """What a pass of a ZeRO stage counts beside its work; nothing without ZeRO."""
    return {f"zero{zero_stage}_passes": 1.0} if zero_stage else {}


def optimizer_quantities(parameters: int, size: float, zero_stage: int, ranks: int) -> dict[str, float]:
    """Quantities of one optimizer step of one of `ranks` that average gradients.

    `size`: bytes of the weights; of ZeRO 1 and 2 each rank changes its part of them and gathers the others.
    """
    found = {"passes": 1.0, "parameters": float(parameters)}
    if ranks > 1 and zero_stage in (1, 2):
        return found | {"gathers": 1.0, "gathered_bytes": size * (ranks - 1) / ranks}
    return found | zero_quantities(zero_stage)


def grad_sync_quantities(size: float, zero_stage: int, ranks: int) -> dict[str, float]:
    """Quantities of averaging gradients of `size` bytes; ZeRO 1 copies them into buckets, one by one."""
    found = {"calls": 1.0, "bytes": size, "ranks": float(ranks)}
    return found | ({"zero1_bytes": size} if zero_stage == 1 else {})


def update_quantities(samples: int, tokens: int, minibatches: int, ranks: int) -> dict[str, float]:
    """Quantities of one update call on one of `ranks`, which tell each other what they learnt."""
    found = {"calls": 1.0, "minibatches": float(minibatches), "samples": float(samples), "tokens": float(tokens)}
    return found | ({"peers": ranks - 1.0} if ranks > 1 else {})


def write_jsonl(measurements: Iterable[Measurement], path: Path) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(point) + b"\n" for point in measurements))


def read_jsonl(path: Path) -> list[Measurement]:
    """The measurements in a file. Raises InputError naming file, line, field and value of the first that is none."""
    found = []
    for number, line in enumerate(content(path, "a file of measurements").splitlines(), start=1):
        if line.strip():
            found.append(_measurement(line, str(path), number))
    if not found:
        raise InputError(file=str(path), problem="the file holds no measurement", remedy=_REMEDY)
    return found


_PATH = re.compile(r"at `\$\.(\w+)")
_REMEDY = "restore the file, or measure again with `lab profile`"


def _measurement(line: bytes, file: str, number: int) -> Measurement:
    try:
        record = json.loads(line)  # NaN and Infinity pass here, to be refused by name below
        point = msgspec.convert(record, Measurement)
    except msgspec.ValidationError as error:
        key = (_PATH.findall(str(error)) or [None])[0]
        value = f"{record.get(key)!r}: " if key and isinstance(record, dict) and key in record else ""
        raise InputError(file=file, line=number, key=key, problem=f"{value}{error}", remedy=_REMEDY) from None
    except (ValueError, RecursionError) as error:
        problem = f"not a JSON object: {str(error)[:200]}"
        raise InputError(file=file, line=number, problem=problem, remedy=_REMEDY) from None
    for field, found, problem in faults(point):
        raise InputError(file=file, line=number, key=field, problem=f"{found!r} {problem}", remedy=_REMEDY)
    return point


def faults(point: Measurement) -> Iterator[tuple[str, object, str]]:
    """What no measurement can hold: (field, value, what is wrong with it)."""
    if point.op not in OPS:
        yield "op", point.op, f"is no op; {nearest(point.op, OPS, 'ops')}"
    if point.device not in devices():
        yield "device", point.device, f"is not in the device library; {nearest(point.device, devices(), 'devices')}"
    if not (math.isfinite(point.seconds) and point.seconds > 0):
        yield "seconds", point.seconds, "is no time above 0 s"
    yield from _strange(point)
    for name, value in point.quantities.items():
        if not (math.isfinite(value) and value >= 0):
            yield f"quantities.{name}", value, "is not a number of 0 or more"
    for name, least in (("neighbours", 0), ("threads", 1), ("repeats", 1), ("spread", 0)):
        value = getattr(point, name)
        if not value >= least:
            yield name, value, f"is below {least}"


def _strange(point: Measurement) -> Iterator[tuple[str, object, str]]:
    """Quantities that a point of its op does not have."""
    known = QUANTITIES.get(point.op, tuple(point.quantities))
    for name, value in point.quantities.items():
        if name not in known:
            yield (
                f"quantities.{name}",
                value,
                f"is of a quantity that {point.op} does not have; it has {', '.join(known)}",
            )


def known_quantities(points: list[Measurement], file: str) -> list[Measurement]:
    """The same points. Raises InputError naming the first quantity that its op does not have."""
    for point in points:
        for field, value, problem in _strange(point):
            raise InputError(file=file, key=field, problem=f"{value!r} {problem}", remedy=_REMEDY)
    return points


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
    ("evaluate", "decode"): "engine_step",
    ("evaluate", "prefill"): "engine_step",
    ("evaluate", "forward"): "logprob",
    ("switch", "stop"): "engine_stop",
    ("switch", "start"): "engine_start",
    ("switch", "drop"): "release",
    ("switch", "save"): "checkpoint",
    ("switch", "restore"): "trainer_start",
    ("switch", "load"): "scorer_start",
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
