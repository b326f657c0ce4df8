"""Will it fit? What lies on the devices of every pool of a scenario, by worker and consumer.

Workers that are loaded together add up, each with its own peak: their allocators keep what they once needed. Workers
that take a pool in time slices, one loaded at a time, need the largest of them only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lab.library import Device
from lab.library import device as library_device
from lab.measurement import HEADLESS
from lab.placement import Worker
from lab.scenario import Scenario
from profiles.footprint import Footprint, size_of
from profiles.footprint_serving import Scoring, Serving, scoring, serving, wide
from profiles.footprint_training import LIVE_NUMBERS, MOMENTS_BYTES, Training, footprint
from profiles.slices import fullest_turn

ADAM_STATE_BYTES = MOMENTS_BYTES + 4.0
"""Adam's two moments and the fp32 masters, per parameter (Rajbhandari et al. 2020)."""


@dataclass(frozen=True, kw_only=True)
class PoolMemory:
    """The fullest device of a pool.

    Attributes:
        workers: what each worker on it holds there, by the worker's name.
        peaks: bytes on every device of the pool, as the pool is shared.
        lying: what each has there when the device is fullest: less than it needs where it is another's turn.
        short: what an engine on the pool cannot hold, in words; empty where every engine holds the longest sequence.
        host_bytes: what states that the pool's trainers offload take in the host memory of its fullest machine.
    """

    pool: str
    device: str
    capacity_bytes: float
    how: str
    workers: Mapping[str, Footprint]
    peaks: Mapping[str, float]
    lying: Mapping[str, Footprint] = field(default_factory=dict)
    short: str = ""
    host_bytes: float = 0.0

    @property
    def sum_bytes(self) -> float:
        """With every worker loaded at once."""
        return together("resident", self.workers)

    @property
    def largest_bytes(self) -> float:
        """With one worker loaded at a time."""
        return together("time_sliced", self.workers)

    @cached_property
    def peak_bytes(self) -> float:
        return self.peaks[self.device]

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.capacity_bytes and not self.short

    @property
    def consumers(self) -> list[tuple[str, str, float]]:
        """Worker, consumer and bytes at the peak, the largest first."""
        lying = (self.lying or self.workers).items()
        found = [(name, what, size) for name, held in lying for what, size in held.consumers.items()]
        return sorted(found, key=lambda row: -row[2])


def together(how: str, workers: Mapping[str, Footprint]) -> float:
    """Bytes on a device that these workers share: the largest where they are loaded one at a time, else the sum."""
    each = [found.peak_bytes for found in workers.values()]
    return max(each, default=0.0) if how == "time_sliced" else sum(each)


def pools(scenario: Scenario) -> dict[str, PoolMemory]:
    """By pool: its fullest device and what lies there."""
    held: dict[str, dict[str, Footprint]] = {}
    alike: dict[tuple[Any, ...], Footprint] = {}
    short: dict[str, str] = {}
    for worker in scenario.workers.values():
        kind = scenario.hardware.node_of(worker.devices[0]).device
        key = (worker.role, worker.work, worker.parallelism, worker.dtype, worker.kv_dtype, kind)
        found = alike[key] if key in alike else alike.setdefault(key, worker_footprint(scenario, worker))
        for device in dict.fromkeys(worker.devices):
            held.setdefault(device, {})[worker.name] = found
        if worker.work == "generate" and worker.pool not in short:
            short[worker.pool] = _short(scenario, worker)
    return {
        pool: _fullest(scenario, pool, devices, held, short.get(pool, "")) for pool, devices in scenario.devices.items()
    }


def peaks(scenario: Scenario) -> dict[str, dict[str, Any]]:
    """By pool: peak_bytes of its fullest device, capacity_bytes of one device, and whether that fits."""
    return {
        name: {"peak_bytes": pool.peak_bytes, "capacity_bytes": pool.capacity_bytes, "fits": pool.fits}
        for name, pool in pools(scenario).items()
    }


def device_bytes(scenario: Scenario, worker: Worker) -> float:
    """Peak bytes that one worker needs on each of its devices."""
    return worker_footprint(scenario, worker).peak_bytes


def kv_bytes(scenario: Scenario, worker: Worker) -> float:
    """Bytes of an engine's KV cache on one of its devices, in whole blocks; at least one block."""
    engine = _engine(scenario, worker)
    return engine.blocks * engine.block_bytes


def kv_blocks(scenario: Scenario, worker: Worker) -> int:
    """Blocks of an engine's KV cache as the engine counts them, with the one that it keeps for itself."""
    return _engine(scenario, worker).blocks


def worker_footprint(scenario: Scenario, worker: Worker) -> Footprint:
    """What a worker holds on each of its devices. A reward function holds nothing, a head only itself."""
    if worker.role == "reward" and worker.work == "score" and scenario.place.reward_function:
        return Footprint(resident={})
    if worker.role == "reward" and worker.work == "score" and scenario.place.reward_head:
        return Footprint(resident={"reward head": scenario.spec("reward").hidden * size_of(wide(worker.dtype))})
    if worker.work == "generate":
        return serving(_engine(scenario, worker))
    if worker.work == "train":
        return footprint(_training(scenario, worker))
    return scoring(_scoring(scenario, worker))


def _fullest(
    scenario: Scenario, pool: str, devices: tuple[str, ...], held: Mapping[str, Mapping[str, Footprint]], short: str
) -> PoolMemory:
    sharing = scenario.sharing.get(pool)
    how = sharing.how if sharing else "exclusive"
    lying = {device: _lying(scenario, how, held.get(device, {})) for device in devices}
    needed = {device: together("resident", lying[device]) for device in devices}
    fullest = max(devices, key=lambda device: needed[device])
    return PoolMemory(
        pool=pool, device=fullest, capacity_bytes=capacity_bytes(_device(scenario, fullest)), how=how,
        workers=held.get(fullest, {}), lying=lying[fullest], peaks=needed, short=short,
        host_bytes=host_bytes(scenario, pool),
    )  # fmt: skip


def _lying(scenario: Scenario, how: str, held: Mapping[str, Footprint]) -> Mapping[str, Footprint]:
    """What each worker has on a device when it is fullest."""
    return fullest_turn(scenario, held) if how == "time_sliced" else held


def capacity_bytes(device: Device) -> float:
    """What programs can have of a device's memory: what its driver leaves them where that is known, else all of it."""
    return float(device.usable_bytes or device.memory_bytes)


def host_bytes(scenario: Scenario, pool: str) -> float:
    """Bytes of host memory that the trainers of a pool need for what they offload, on the machine with most of it."""
    by_machine: dict[str, float] = {}
    for worker in scenario.workers.values():
        if worker.pool == pool and worker.work == "train":
            each = _training(scenario, worker).host_bytes
            for device in worker.devices:
                machine = scenario.hardware.machine_of(device)
                by_machine[machine] = by_machine.get(machine, 0.0) + each
    return max(by_machine.values(), default=0.0)


def _device(scenario: Scenario, device: str) -> Device:
    return library_device(scenario.hardware.node_of(device).device)


def _engine(scenario: Scenario, worker: Worker) -> Serving:
    rollout, spread, device = scenario.rollout, worker.parallelism, _device(scenario, worker.devices[0])
    lora = scenario.model("actor").lora
    spec = scenario.spec("actor")
    return Serving(
        spec=spec, dtype=worker.dtype, kv_dtype=wide(worker.kv_dtype) if worker.kv_dtype == "int8" else worker.kv_dtype,
        capacity_bytes=capacity_bytes(device), device_kind=device.kind,
        fraction=rollout.kv_memory_fraction, kv_bytes=rollout.kv_bytes, block_tokens=rollout.block_tokens,
        max_num_seqs=rollout.max_num_seqs, max_num_batched_tokens=rollout.max_num_batched_tokens,
        tensor=spread.tensor, pipeline=spread.pipeline, data=spread.data,
        adapter=float(lora.parameters(spec)) if lora else None,
    )  # fmt: skip


def _training(scenario: Scenario, worker: Worker) -> Training:
    """DeepSpeed's trainer: weights in their dtype, fp32 masters beside narrower ones, default buckets."""
    train, spread, lora = scenario.train(worker.role), worker.parallelism, scenario.model(worker.role).lora
    spec = scenario.spec(worker.role)
    return Training(
        spec=spec, tokens=float(scenario.pass_tokens), dtype=wide(worker.dtype), stored=worker.dtype,
        data=train.data_parallel, tensor=spread.tensor, pipeline=spread.pipeline, context=spread.context,
        expert=spread.expert, zero_stage=train.zero_stage, offload=train.offload, recompute=scenario.update.recompute,
        adapter=float(lora.parameters(spec)) if lora else None, outputs=1 if worker.role in HEADLESS else None,
        gathered=LIVE_NUMBERS, buckets=True, device_kind=_device(scenario, worker.devices[0]).kind,
    )  # fmt: skip


def _scoring(scenario: Scenario, worker: Worker) -> Scoring:
    place = scenario.scored[worker.role]
    tokens = min(scenario.pass_tokens, place.max_batch_samples * scenario.workload.max_sequence_tokens)
    return Scoring(
        spec=scenario.spec(worker.role), tokens=float(tokens), dtype=worker.dtype, tensor=worker.parallelism.tensor,
        outputs=1 if worker.role == "reward" else None, device_kind=_device(scenario, worker.devices[0]).kind,
    )  # fmt: skip


def _short(scenario: Scenario, worker: Worker) -> str:
    """Words where the longest sequence needs more blocks than an engine has beside the one it keeps for itself."""
    if text := crowded(scenario, worker):
        return text
    engine, longest = _engine(scenario, worker), scenario.workload.max_sequence_tokens
    holds = (engine.blocks - 1) * engine.block_tokens
    return "" if holds >= longest else f"{worker.name} holds {holds} tokens of KV, the longest sequence has {longest}"


def crowded(scenario: Scenario, worker: Worker) -> str:
    """Words where weights and activations of an engine leave no room for KV on its devices; empty where they do."""
    engine = _engine(scenario, worker)
    if engine.kv_bytes is not None or engine.room_bytes >= 2 * engine.block_bytes:
        return ""
    weights = engine.beside["weights"]
    rest, own = sum(engine.beside.values()) - weights, engine.fraction * engine.capacity_bytes
    return (
        f"{worker.name} has {own / 1e9:.1f} GB of each device (kv_memory_fraction {engine.fraction:g} of "
        f"{engine.capacity_bytes / 1e9:.1f} GB); its weights take {weights / 1e9:.1f} GB, activations and the rest "
        f"{rest / 1e9:.1f} GB, which leaves no room for KV"
    )


def roomier(scenario: Scenario, worker: Worker) -> str:
    """What gives a crowded engine room: keys and values of the scenario."""
    remedies = [f"raise tensor_parallel above {worker.parallelism.tensor} (with fewer engines)"]
    kind = _device(scenario, worker.devices[0])
    narrow = next((dtype for dtype in ("fp8", "int8") if dtype in kind.flops), None)
    if narrow and worker.dtype not in ("fp8", "int8"):
        remedies.append(f"set dtype: {narrow}")
    return " or ".join(remedies)
