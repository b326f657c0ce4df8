"""Will it fit? Peak bytes of every pool's fullest device, first version.

Training: weights and gradients in the model's dtype, fp32 weights and two moments for Adam (12 bytes a parameter),
divided as ZeRO 1, 2, 3 do (Rajbhandari et al. 2020); activations s·b·h·34 bytes per layer without recomputation,
only the layer inputs with it (Korthikanti et al. 2022), and the fp32 logits of one micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from lab.library import device as library_device
from lab.model import DTYPE_BYTES
from lab.placement import Train, Worker
from lab.scenario import Scenario

ADAM_STATE_BYTES = 12.0
ACTIVATION_BYTES = 34.0


def peaks(scenario: Scenario) -> dict[str, dict[str, Any]]:
    """By pool: peak_bytes of its fullest device, capacity_bytes of one device, and whether that fits."""
    used: dict[str, float] = defaultdict(float)
    for worker in scenario.workers.values():
        for device in worker.devices:
            used[device] += device_bytes(scenario, worker)
    found = {}
    for pool, devices in scenario.devices.items():
        capacity = library_device(scenario.hardware.node_of(devices[0]).device).memory_bytes
        peak = max(used[device] for device in devices)
        found[pool] = {"peak_bytes": peak, "capacity_bytes": capacity, "fits": peak <= capacity}
    return found


def device_bytes(scenario: Scenario, worker: Worker) -> float:
    """Peak bytes that one worker needs on each of its devices."""
    if worker.role == "reward" and scenario.place.reward_score.kind == "function":
        return 0.0
    if worker.work == "train":
        return _training(scenario, worker)
    weights = scenario.spec(worker.role).weight_bytes(scenario.model(worker.role).dtype) / len(worker.devices)
    if worker.work == "generate":
        return weights + kv_bytes(scenario, worker) / len(worker.devices)
    return weights + _logits(scenario, worker)


def kv_bytes(scenario: Scenario, worker: Worker) -> float:
    """Bytes of an engine's KV cache, over all its devices; at least one block."""
    rollout, spec, dtype = scenario.rollout, scenario.spec("actor"), scenario.model("actor").dtype
    block = rollout.block_tokens * spec.kv_bytes_per_token(dtype)
    if rollout.kv_bytes is not None:
        return max(rollout.kv_bytes, block)
    capacity = library_device(scenario.hardware.node_of(worker.devices[0]).device).memory_bytes
    usable = rollout.kv_memory_fraction * capacity * len(worker.devices)
    return max(usable - spec.weight_bytes(dtype) - _logits(scenario, worker) * len(worker.devices), block)


def kv_blocks(scenario: Scenario, worker: Worker) -> int:
    """Blocks of `rollout.block_tokens` tokens in an engine's KV cache."""
    per_token = scenario.spec("actor").kv_bytes_per_token(scenario.model("actor").dtype)
    return int(kv_bytes(scenario, worker) // (per_token * scenario.rollout.block_tokens))


def _training(scenario: Scenario, worker: Worker) -> float:
    place = scenario.place
    train: Train = place.critic_train if worker.role == "critic" and place.critic_train else place.actor_train
    spec, size = scenario.spec(worker.role), DTYPE_BYTES[scenario.model(worker.role).dtype]
    parameters, ranks, stage = spec.parameters / len(worker.devices), train.data_parallel, train.zero_stage
    weights = parameters * size / (ranks if stage == 3 else 1)
    gradients = parameters * size / (ranks if stage >= 2 else 1)
    states = 0.0 if train.offload == "optimizer" else parameters * ADAM_STATE_BYTES / (ranks if stage >= 1 else 1)
    return weights + gradients + states + _activations(scenario, worker) + _logits(scenario, worker)


def _activations(scenario: Scenario, worker: Worker) -> float:
    """Of one micro-batch; one layer's own activations stay alive while it is recomputed."""
    spec, tokens = scenario.spec(worker.role), scenario.update.microbatch_tokens
    size = DTYPE_BYTES[scenario.model(worker.role).dtype] / 2
    layer = ACTIVATION_BYTES * tokens * spec.hidden * size / len(worker.devices)
    if scenario.update.recompute == "full":
        return layer + 2 * size * tokens * spec.hidden * spec.layers
    return layer * spec.layers


def _logits(scenario: Scenario, worker: Worker) -> float:
    """fp32 logits of what passes the LM head at once; a critic's or reward's head has one output."""
    if worker.role in ("critic", "reward"):
        return 0.0
    tokens = scenario.update.microbatch_tokens if worker.work != "generate" else scenario.rollout.max_num_seqs
    return 4.0 * tokens * scenario.spec(worker.role).vocabulary / len(worker.devices)
