"""What lies in a device's memory, by consumer, in bytes; the terms that every kind of worker shares.

A worker keeps some consumers as long as it is loaded (`resident`) and needs others only at certain instants of its
work; its peak is the resident part plus the largest instant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lab.model import DTYPE_BYTES, ModelSpec

MIB = float(2**20)
GIB = float(2**30)
CONTEXT_BYTES = 0.5 * GIB
"""CUDA context and loaded kernels of one process. An order of magnitude: drivers of 2023–2025 with lazy module loading
take 0.3–0.6 GiB; Hugging Face's "Model training anatomy" saw 1.3 GiB on a V100 where kernels were loaded eagerly."""
NCCL_BYTES = 2 * 4 * MIB * 32
"""One communicator: a send and a receive buffer of NCCL_BUFFSIZE (4 MiB) on each of at most 32 channels (NCCL manual)."""
FRAGMENTATION = 0.15
"""Share of what comes and goes that the caching allocator holds beside it: 15 % on average, up to 33 %, over eight
language models on A100 (Guo et al., GMLake, ASPLOS 2024, abstract). Not fitted on anything here."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one worker on one of its devices.

    Attributes:
        resident: by consumer, as long as the worker is loaded.
        instants: by name of the instant, what is needed then beside `resident`, by consumer.
    """

    resident: Mapping[str, float]
    instants: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def loaded_bytes(self) -> float:
        return sum(self.resident.values())

    @property
    def instant(self) -> str:
        """The instant of the peak; empty where nothing comes and goes."""
        return max(self.instants, key=lambda name: sum(self.instants[name].values()), default="")

    @property
    def working_bytes(self) -> float:
        """What the largest instant needs beside the resident part."""
        return sum(self.instants.get(self.instant, {}).values())

    @property
    def peak_bytes(self) -> float:
        return self.loaded_bytes + self.working_bytes

    @property
    def consumers(self) -> dict[str, float]:
        """What lies there at the peak, the largest first; consumers of no bytes are left out."""
        found = dict(self.resident)
        for name, size in self.instants.get(self.instant, {}).items():
            found[name] = found.get(name, 0.0) + size
        return dict(sorted(((k, v) for k, v in found.items() if v > 0), key=lambda pair: -pair[1]))


def fragmented(consumers: Mapping[str, float], share: float) -> dict[str, float]:
    """The consumers of one instant with what the allocator holds beside them."""
    return {**consumers, "allocator fragmentation": share * sum(consumers.values())}


def overhead(device_kind: str, communicators: int) -> dict[str, float]:
    """Of one process: nothing on a CPU, whose libraries are shared between processes."""
    if device_kind == "cpu":
        return {}
    return {"CUDA context": CONTEXT_BYTES, "NCCL buffers": communicators * NCCL_BYTES}


def device_parameters(spec: ModelSpec, *, tensor: int = 1, pipeline: int = 1, expert: int = 1) -> float:
    """Parameters on one device: tensor and pipeline parallelism divide all of them, expert parallelism the experts."""
    experts = spec.expert_parameters
    return ((spec.parameters - experts) / tensor + experts / (tensor * expert)) / pipeline


def layer_parameters(spec: ModelSpec) -> float:
    """Parameters of the widest layer."""
    if spec.moe is None:
        return float(spec.layer_matrix_parameters)
    dense = spec.layer_matrix_parameters if spec.moe.dense_layers else 0
    rest = spec.matrix_parameters - spec.moe.dense_layers * spec.layer_matrix_parameters
    return float(max(dense, rest / spec.moe_layers if spec.moe_layers else 0))


def head_parameters(spec: ModelSpec) -> float:
    """Parameters of the LM head (the token table where the two are tied)."""
    return float(spec.vocabulary * spec.hidden)


def expert_adapter_parameters(spec: ModelSpec, rank: int) -> float:
    """Of one LoRA adapter on the routed experts' matrices, which `lab.lora` leaves without: rank × (inputs + outputs)."""
    if spec.moe is None:
        return 0.0
    each = (3 if spec.gated else 2) * (spec.hidden + spec.moe.intermediate)
    return float(rank * spec.moe_layers * spec.moe.num_experts * each)


def size_of(dtype: str) -> float:
    """Bytes of one number."""
    return DTYPE_BYTES[dtype]
