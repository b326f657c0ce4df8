"""Moves of weights and states: between trainer and engines, device and host, memory and storage. From datasheets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from lab.library import link as library_link
from profiles import collectives
from profiles.collectives import Group

if TYPE_CHECKING:
    from profiles.layout import Layout

MEMORY_EFFICIENCY = 0.8
"""share of peak memory bandwidth that streaming kernels reach (BabelStream on A100 and H100 reaches 0.8-0.9)"""
HOST_LINK = "pcie4"
"""between a GPU and the memory of its host"""
HOST_LINK_EFFICIENCY = 0.8
"""pinned copies reach about 25 of 32 GB/s (bandwidthTest of the CUDA samples on PCIe 4.0 x16)"""
ENGINE_START_S = {"gpu": 30.0, "cpu": 10.0}
"""an engine built around weights that are at hand: memory profiling, KV cache, CUDA graphs; order of vLLM's own log"""
ENGINE_STOP_S = {"gpu": 0.0, "cpu": 1.0}
"""an engine ended: on a CPU vLLM's own shutdown takes about a second; on GPUs not measured, and left out"""
ENGINE_SWITCH_S = 0.5
"""an engine put to sleep or woken, beyond the copy: freeing and mapping memory; order of vLLM's own log"""


SYNC_TENSOR_S = {"gpu": 5.0e-4, "cpu": 0.0}
"""of a weight sync, per parameter tensor: a broadcast of its own, and the loading of what arrived. GPU: 0.15 s for the
290 tensors of Qwen2-0.5B into vLLM once they share requests (Hugging Face TRL, pull request 5249; 0.6 s with a request
for each), less the 2 % that its bytes take. CPU: within the fitted costs"""


CORE_PASS_BYTES_S = 1.2e9
"""that a core reads and writes per second where it packs weights or compares them, in several steps of PyTorch each. Of
3.2 MB of float32 on an EPYC core: eight bits packed at 0.8 GB/s and unpacked at 1.8, changes found at 1.0 and put in at
1.7, hashed at 1.3"""


def host_copy_seconds(size: float) -> float:
    """Time of `size` bytes between one device and its host."""
    link = library_link(HOST_LINK)
    return link.latency + size / (link.bandwidth * HOST_LINK_EFFICIENCY)


def _host_copy(layout: Layout, q: Mapping[str, float]) -> float:
    """All devices of a worker copy their parts at once; a CPU core copies within its own memory."""
    if layout.device.kind == "cpu":
        return _memory_pass(layout, {"bytes": 2 * q["bytes"]})
    return host_copy_seconds(q["bytes"] / len(layout.worker.devices))


def _weight_sync(layout: Layout, q: Mapping[str, float]) -> float:
    """A broadcast from the sender's first device to every device of every engine; each keeps what it needs.

    Tensors go one after the other, each with a latency of its own beside its bytes.
    """
    engines = layout.scenario.team("actor", "generate")
    ends = [layout.worker.devices[0], *(device for engine in engines for device in engine.devices)]
    latency = SYNC_TENSOR_S[layout.device.kind] * num_tensors(layout)
    return latency + BROADCASTS[layout.scenario.weight_sync.route](layout, q["bytes"], ends)


def _pipelined(layout: Layout, size: float, ends: Sequence[str]) -> float:
    return collectives.seconds("broadcast", size, layout.group(ends))


def _in_rounds(layout: Layout, size: float, ends: Sequence[str]) -> float:
    """A binomial tree over the machines, then one inside each of them."""
    group = layout.group(ends)
    between, inside = (math.ceil(math.log2(n)) for n in (group.machines, group.per_machine))
    inter, intra = group.slowest, group.intra
    return between * (inter.latency + size / inter.bandwidth) + inside * (intra.latency + size / intra.bandwidth)


def _from_one(layout: Layout, size: float, ends: Sequence[str]) -> float:
    """The sender's link carries everything, its machine's ports what goes to other machines."""
    group, machine = layout.group(ends), layout.scenario.hardware.machine_of
    beyond = sum(machine(end) != machine(ends[0]) for end in ends)
    own = (len(ends) - 1) * size / group.intra.bandwidth
    return group.slowest.latency + max(own, beyond * size / group.inter.bandwidth)


BROADCASTS: dict[str, Callable[[Layout, float, Sequence[str]], float]] = {
    "chain": _pipelined,
    "tree": _in_rounds,
    "flat": _from_one,
}
"""by `weight_sync.route`: the time of `size` bytes from the first device to all others"""


def num_tensors(layout: Layout) -> int:
    """Parameter tensors that a weight sync sends, as checkpoints keep them: two of an adapter for each of its matrices."""
    spec = layout.spec
    matrices = 4 if spec.mla is None else 5 if spec.mla.q_lora_rank else 4
    mlp = 3 if spec.gated else 2
    dense = spec.layers - spec.moe_layers
    if layout.scenario.model(layout.worker.role).lora is not None:
        return 2 * (spec.layers * matrices + dense * mlp)
    small = spec.norms_per_layer + 3 * spec.qkv_bias + 2 * spec.qk_norm
    total = spec.layers * (matrices + small) + dense * mlp + 3 - spec.tied_embeddings
    if spec.moe is None:
        return total
    shared = mlp if spec.moe.shared_intermediate else 0
    return total + spec.moe_layers * (1 + mlp * spec.moe.num_experts + shared)


def _reshard(layout: Layout, q: Mapping[str, float]) -> float:
    """Whole weights are gathered from the shards of trainer ranks; nothing where the sender has them all."""
    train, devices = layout.scenario.train(layout.worker.role), shard_devices(layout)
    holders = len(devices) if train.zero_stage == 3 else layout.width * layout.worker.parallelism.expert
    whole = layout.group(devices)
    group = Group(ranks=holders, per_machine=min(holders, whole.per_machine), intra=whole.intra, inter=whole.inter)
    return collectives.seconds("all_gather", q["bytes"], group)


def shard_devices(layout: Layout) -> list[str]:
    """Devices that together hold a trainer's weights: of one rank, or of all where they share them out."""
    train = layout.scenario.train(layout.worker.role)
    if train.zero_stage == 3 or layout.worker.parallelism.expert > 1:
        return [device for rank in layout.scenario.team(layout.worker.role, "train") for device in rank.devices]
    return list(layout.worker.devices)


def _memory_pass(layout: Layout, q: Mapping[str, float]) -> float:
    """A kernel that reads and writes `bytes` in all, on every device at once (conversion, packing of 8-bit weights)."""
    return q["bytes"] / (layout.device.memory_bandwidth * MEMORY_EFFICIENCY * len(layout.worker.devices))


def _convert(layout: Layout, q: Mapping[str, float]) -> float:
    """Weights packed, unpacked or compared: `bytes` are read and written in all."""
    if layout.device.kind == "cpu":
        return q["bytes"] / (CORE_PASS_BYTES_S * len(layout.worker.devices))
    return _memory_pass(layout, q)


def _checkpoint(layout: Layout, q: Mapping[str, float]) -> float:
    storage = layout.storage
    return storage.latency + q["bytes"] * _writers(layout) / storage.write_bandwidth


def _checkpoint_read(layout: Layout, q: Mapping[str, float]) -> float:
    return q["bytes"] * _writers(layout) / layout.storage.read_bandwidth


def _writers(layout: Layout) -> int:
    """Ranks of the team on one machine, which share its way to the storage."""
    team = layout.scenario.team(layout.worker.role, layout.worker.work)
    return layout.group([rank.devices[0] for rank in team]).per_machine


def _engine_start(layout: Layout, q: Mapping[str, float]) -> float:
    return ENGINE_START_S[layout.device.kind] + _load(layout, q)


def _engine_stop(layout: Layout, q: Mapping[str, float]) -> float:
    return ENGINE_STOP_S[layout.device.kind]


def _release(layout: Layout, q: Mapping[str, float]) -> float:
    """Memory is given back at once; what a process needs for that was not measured elsewhere than on a CPU."""
    return 0.0


def _engine_switch(layout: Layout, q: Mapping[str, float]) -> float:
    return ENGINE_SWITCH_S + _host_copy(layout, q)


def _engine_reload(layout: Layout, q: Mapping[str, float]) -> float:
    """A sleeping engine that kept no weights reads them from storage."""
    return ENGINE_SWITCH_S + _load(layout, q)


def _load(layout: Layout, q: Mapping[str, float]) -> float:
    """Weights from storage through the host to all devices."""
    return q["bytes"] / layout.storage.read_bandwidth + _host_copy(layout, q)


MOVES: dict[str, Callable[[Layout, Mapping[str, float]], float]] = {
    "host_copy": _host_copy,
    "weight_sync": _weight_sync,
    "reshard": _reshard,
    "convert": _convert,
    "engine_rebuild": _memory_pass,
    "checkpoint": _checkpoint,
    "checkpoint_read": _checkpoint_read,
    "engine_start": _engine_start,
    "engine_sleep": _engine_switch,
    "engine_wake": _engine_switch,
    "engine_reload": _engine_reload,
    "engine_stop": _engine_stop,
    "release": _release,
    "trainer_start": _checkpoint_read,
    "scorer_start": _checkpoint_read,
}
"""by op: its time on a worker; every op moves `bytes` in all"""
