"""Published `peak memory allocated` of real trainers against the memory model; nothing is fitted on these rows.

Two sources. prime-rl's benchmark of its trainer alone prints `torch.cuda.max_memory_reserved`, so what the allocator
caches beside live tensors is part of the figure, a CUDA context is not. verl's logs print `max_memory_allocated` of a
process in which the trainer and a sleeping engine live together; torch goes on counting the engine's weights and KV
cache while it sleeps, which is why one of them exceeds its device.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from lab.library import devices, models
from lab.lora import Lora
from lab.model import ModelSpec, Moe
from profiles.footprint import GIB, Footprint, expert_adapter_parameters
from profiles.footprint_serving import Scoring, Serving, scoring, serving
from profiles.footprint_training import Training, footprint
from simulator.studies.accuracy import Row, Rule, ValidationSet

FILE = "published_cases.csv"
QUANTITY = "peak memory allocated"
RULES = (
    Rule(id="partial", sentence="the source leaves out part of the configuration (`usable` is not `full`)"),
    Rule(id="unknown-model", sentence="the model's dimensions are neither in the library nor stated here"),
)
"""Written down before a prediction was compared with a measurement."""

OUTSIDE = ("CUDA context", "NCCL buffers")
"""Consumers that torch's allocator does not see."""
GLM_AIR = ModelSpec(
    hidden=4096, layers=46, heads=96, kv_heads=8, head_dim=128, intermediate=10944, vocabulary=151552, qkv_bias=True,
    moe=Moe(num_experts=128, experts_per_token=8, intermediate=1408, shared_intermediate=1408, dense_layers=1),
    source="config.json of zai-org/GLM-4.5-Air, whose shape INTELLECT-3 has",
)  # fmt: skip
NAMES = {
    "Qwen3-0.6B": "qwen3-0.6b",
    "Qwen3-4B-Instruct-2507": "qwen3-4b",
    "Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
    "Qwen3-235B-A22B-Instruct-2507": "qwen3-235b-a22b",
    "Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b",
    "Qwen2-7B-Instruct": "qwen2.5-7b",
    "Llama-3.2-1B-Instruct": "llama-3.2-1b",
}
"""Names in the source -> the library's entry of the same shape."""
PRIME_COLUMNS = 2048
PRIME_ADAPTERS = 4
PRIME = (
    "fp32 sharded weights, bf16 compute, fp32 gradient reduction (the trainer's defaults)",
    f"fused loss over {PRIME_COLUMNS} vocabulary columns in RL, unfused in SFT (the trainer's defaults)",
    f"{PRIME_ADAPTERS} adapters loaded, one trained, with LoRA (the benchmark's command line)",
    "micro-batch of one packed sequence",
)
"""Inputs that the table does not state."""
VERL = (
    "fp32 sharded weights of what is trained, bf16 of the reference",
    "engine's share of memory 0.6, 1,024 sequences, 8,192 batched tokens",
    "6 bytes per logit in training (logits, entropy's softmax, gradient), 4 in scoring, all bf16",
    "the sleeping engine's weights and KV count as allocated",
)
VERL_TRAIN_BYTES, VERL_SCORE_BYTES = 6.0, 4.0


def published_memory(data: Path) -> ValidationSet:
    """All rows of the published peak memory in `data`, in GiB. Raises FileNotFoundError where the table is absent."""
    with (data / FILE).open(encoding="utf-8", newline="") as file:
        rows = tuple(_row(case) for case in csv.DictReader(file) if case["quantity"] == QUANTITY)
    notes = (
        "no constant is fitted on these rows; the allocator's share is GMLake's published average",
        "not blind: which arrays an unfused loss holds was checked against the difference between two published rows",
        "the sources' figures are per device, of the fullest or the first rank, after warm-up",
    )
    return ValidationSet(name="memory", title="Published peak memory of trainers", rows=rows, rules=RULES, notes=notes)


def rows(data: Path) -> tuple[Row, ...]:
    """The rows of `published_memory`."""
    return published_memory(data).rows


def _row(case: Mapping[str, str]) -> Row:
    row = partial(Row, case=case["case_id"], quantity=QUANTITY, measured=float(case["value"]), unit="GiB")
    if case["usable"] != "full":
        return row(predicted=None, excluded="partial")
    spec = _spec(case["actor_model"])
    if spec is None:
        return row(predicted=None, excluded="unknown-model")
    trainer_only = case["algorithm"].startswith("trainer microbenchmark")
    predicted = _prime(case, spec) if trainer_only else _verl(case, spec)
    return row(predicted=predicted / GIB, assumed=PRIME if trainer_only else VERL, reason=_reason(case))


def _spec(name: str) -> ModelSpec | None:
    return GLM_AIR if name == "INTELLECT-3" else models().get(NAMES.get(name, name))


def _seen(found: Footprint, *, fragmentation: bool = True) -> float:
    """What torch's statistics count of a peak."""
    left_out = OUTSIDE if fragmentation else (*OUTSIDE, "allocator fragmentation")
    return sum(size for name, size in found.consumers.items() if name not in left_out)


def _prime(case: Mapping[str, str], spec: ModelSpec) -> float:
    """prime-rl's trainer: FSDP2 with fp32 shards, every layer recomputed, all ranks one ZeRO-3 group."""
    reinforcement = " RL " in case["algorithm"]
    rank = re.search(r"LoRA\(r=(\d+)\)", case["algorithm"])
    trainer = Training(
        spec=spec,
        tokens=int(case["resp_len_max"].split()[0]),
        stored="float32",
        data=int(float(case["train_gpus"])),
        zero_stage=3,
        recompute="full",
        offload_activations="AC=Offload" in case["train_parallel"],
        adapter=_adapter(spec, int(rank[1])) if rank else None,
        adapters=PRIME_ADAPTERS,
        logit_columns=PRIME_COLUMNS if reinforcement else None,
        logit_bytes=16.0 if reinforcement else None,
    )
    return _seen(footprint(trainer))


def _adapter(spec: ModelSpec, rank: int) -> float:
    """Parameters of an adapter on every matrix of every layer, the routed experts' included."""
    return Lora(rank=rank).parameters(spec) + expert_adapter_parameters(spec, rank)


def _verl(case: Mapping[str, str], spec: ModelSpec) -> float:
    """verl's hybrid process: a sleeping engine, the actor's and the critic's FSDP shards, the reference's, and the
    largest of the actor's update, the critic's update and the log-prob pass."""
    train, score, critic_tokens = _verl_tokens(case)
    ranks = int(float(case["train_gpus"]))
    common = {"spec": spec, "stored": "float32", "data": ranks, "zero_stage": 3, "recompute": "full"}
    actor = footprint(Training(**common, tokens=train, logit_bytes=VERL_TRAIN_BYTES))  # type: ignore[arg-type]
    states = _loaded(actor)
    peaks = [_seen(actor, fragmentation=False) - states]
    if case["algorithm"].startswith("PPO"):
        critic = footprint(Training(**common, tokens=critic_tokens, outputs=1))  # type: ignore[arg-type]
        states += _loaded(critic)
        peaks.append(_seen(critic, fragmentation=False) - _loaded(critic))
    reference = scoring(Scoring(spec=spec, tokens=score, data=ranks, zero_stage=3))
    if "offload" not in case["ref_model"] and case["ref_model"] not in ("none", "none timed"):
        states += _loaded(reference)
    peaks.append(score * spec.vocabulary * VERL_SCORE_BYTES)
    width = re.search(r"TP(\d+)", case["gen_parallel"])
    engine = serving(
        Serving(
            spec=spec, capacity_bytes=_capacity(case["gpu_type"]), fraction=0.6, max_num_seqs=1024,
            tensor=int(width[1]) if width else 1,
        )
    )  # fmt: skip
    return engine.resident["weights"] + engine.resident["KV cache"] + states + max(peaks)


def _loaded(found: Footprint) -> float:
    return sum(size for name, size in found.resident.items() if name not in OUTSIDE)


def _verl_tokens(case: Mapping[str, str]) -> tuple[float, float, float]:
    """Tokens of the actor's micro-batch, of a log-prob pass and of the critic's micro-batch, on one device."""
    mean = float(case["prompt_len_mean"]) + float(case["resp_len_mean"])
    longest = float(case["prompt_len_max"]) + float(case["resp_len_max"])
    gpus = float(case["train_gpus"])
    cap = re.search(r"dynamic bsz (\d+) tok/GPU", case["train_parallel"])
    micro = re.search(r"micro (\d+)/GPU", case["train_parallel"])
    samples = float(micro[1]) if micro else 1.0
    if cap is None:
        packed = "remove_padding" in case["train_parallel"]
        each = mean if packed else longest
        return samples * each, (samples if packed else 2 * samples) * each, samples * each
    step = float(case["seqs_per_step"]) / gpus * mean
    return (
        min(float(cap[1]), step / float(case["optimizer_steps_per_step"])),
        min(float(cap[1]), step),
        samples * longest,
    )


def _capacity(gpu: str) -> float:
    """Bytes that the driver reports of the device, H100 and A100 having 80 GiB less what ECC and firmware keep."""
    entry = devices()["h100-80g-sxm" if gpu.startswith("H100") else "a100-80g-sxm"]
    return min(entry.memory_bytes, 79.1 * GIB)


def _reason(case: Mapping[str, str]) -> str:
    """Which term misses most, from the differences between rows of one configuration."""
    tokens = int(case["resp_len_max"].split()[0])
    if case["algorithm"].endswith("SFT Full"):
        return "arrays of several GiB fill whole segments, which the allocator's average share overstates"
    if (
        "LoRA" in case["algorithm"]
        and tokens == 65536
        and case["actor_model"] in ("Qwen3-0.6B", "Qwen3-4B-Instruct-2507")
    ):
        return "activations of one long sequence: the layer's gradients are not all alive at once in compiled code"
    return ""
