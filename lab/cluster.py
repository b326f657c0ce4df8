"""The hardware: devices on nodes, links between them, storage behind them."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator
from pydantic.config import JsonDict

from lab.errors import WrongValue
from lab.library import Tier, device, devices, link, links, tier
from lab.records import Record
from lab.units import BytesPerSecond

RESUMED: JsonDict = {"effect": "resume"}
DEFAULT_WRITE = 1e9
"""bytes per second where a scenario says nothing of its storage: about a 10 GbE file server"""
EITHER = frozenset({"loopback"})
"""links that stand for a machine's own network stack: between processes, or between machines that are not modelled"""


class Node(Record):
    """A group of `count` equal machines."""

    name: str = Field(
        description="label used in pool expressions such as `train[0:6]`", json_schema_extra={"effect": "label"}
    )
    count: int = Field(default=1, ge=1, le=10**5, description="how many machines of this kind")
    device: str = Field(description="an entry of the device library, for example a100-80g-sxm or cpu-core")
    devices: int = Field(ge=1, le=1024, description="devices on each machine; a CPU device is one core")
    intra: str = Field(description="link between the devices of one machine, of the link library: nvlink3, pcie4, …")

    @field_validator("device")
    @classmethod
    def _known(cls, name: str) -> str:
        device(name)
        return name

    @field_validator("intra")
    @classmethod
    def _inside(cls, name: str) -> str:
        if link(name).transport not in ("bus", "memory") and name not in EITHER:
            problem = f"{name} connects machines, not the devices of one"
            raise WrongValue(path=(), problem=problem, remedy=f"use one of {_fitting(inside=True)}")
        return name


class Fabric(Record):
    """The network between machines."""

    link: str = Field(
        default="loopback", description="link between machines, of the link library: ib-ndr400, ethernet-100, …"
    )
    oversubscription: float = Field(default=1.0, ge=1.0, description="divides the bandwidth between machines")

    @field_validator("link")
    @classmethod
    def _between(cls, name: str) -> str:
        if link(name).transport not in ("rdma", "tcp"):
            problem = f"{name} connects the devices of one machine, not machines"
            remedy = f"use one of {_fitting(inside=False)}; machines of one NVLink domain are written as one machine"
            raise WrongValue(path=(), problem=problem, remedy=remedy)
        return name


def _fitting(*, inside: bool) -> str:
    """The links inside a machine, or between machines."""
    fits = {name for name, entry in links().items() if (entry.transport in ("bus", "memory")) == inside}
    return ", ".join(sorted(fits | EITHER))


class Storage(Record):
    """Shared storage as one machine sees it: a tier of the storage library, or bandwidths of its own."""

    tier: str | None = Field(default=None, description="an entry of the storage library, for example nvme or lustre")
    write: BytesPerSecond | None = Field(
        default=None, gt=0, description="write bandwidth, for example 5 GB/s; null: the tier's, or 1 GB/s"
    )
    read: BytesPerSecond | None = Field(
        default=None, gt=0, description="read bandwidth; null: the tier's, or as write", json_schema_extra=RESUMED
    )

    @field_validator("tier")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None:
            tier(name)
        return name

    def _tier(self) -> Tier | None:
        return None if self.tier is None else tier(self.tier)

    @property
    def write_bandwidth(self) -> float:
        """Bytes per second that one machine writes."""
        known = self._tier()
        return self.write or (known.write if known else DEFAULT_WRITE)

    @property
    def read_bandwidth(self) -> float:
        """Bytes per second that one machine reads."""
        known = self._tier()
        return self.read or (known.read if known else self.write_bandwidth)

    @property
    def latency(self) -> float:
        """Seconds until the first byte."""
        known = self._tier()
        return known.latency if known else 0.0


class Site(Record):
    """One place with its machines, network and storage."""

    name: str = Field(default="local", json_schema_extra={"effect": "label"})
    nodes: tuple[Node, ...] = Field(min_length=1)
    fabric: Fabric = Fabric()
    storage: Storage = Storage()


class Cluster(Record):
    """All hardware of a scenario."""

    sites: tuple[Site, ...] = Field(min_length=1, max_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> Cluster:
        names = [node.name for site in self.sites for node in site.nodes]
        if len(set(names)) < len(names):
            raise ValueError(f"node names are not distinct: {', '.join(names)}")
        return self

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for site in self.sites for node in site.nodes)

    def node_of(self, device_id: str) -> Node:
        """The group of machines that a device such as `train[7]` belongs to."""
        name = device_id.split("[")[0]
        return next(node for node in self.nodes if node.name == name)

    def machine_of(self, device_id: str) -> str:
        """The machine a device stands on: `train[7]` on machines of four devices is on `train/1`."""
        name, index = re.fullmatch(r"(.+)\[(\d+)\]", device_id).groups()  # type: ignore[union-attr]
        return f"{name}/{int(index) // self.node_of(device_id).devices}"

    def select(self, expression: str) -> tuple[str, ...]:
        """Device ids named by `node[i]`, `node[i:j]` or `node`. Raises ValueError where there are none such."""
        match = re.fullmatch(r"\s*([^\[\]]+?)\s*(?:\[\s*(\d+)\s*(?:(:)\s*(\d+)\s*)?\])?\s*", expression)
        if match is None:
            raise ValueError(f"{expression!r} is not of the form node[i] or node[i:j]")
        name, first, colon, last = match.groups()
        sizes = {node.name: node.count * node.devices for node in self.nodes}
        if name not in sizes:
            raise ValueError(f"there is no node {name!r} in the cluster; it has {', '.join(sizes)}")
        start = int(first or 0)
        stop = sizes[name] if first is None else int(last) if colon else start + 1
        if not 0 <= start < stop <= sizes[name]:
            raise ValueError(f"{expression!r} is outside {name}[0:{sizes[name]}], the devices that {name} has")
        return tuple(f"{name}[{index}]" for index in range(start, stop))


def local_cluster() -> Cluster:
    """This machine, read without Ray: its usable cores as `local[0:n]`, and its GPUs, if any, as `gpu[0:n]`."""
    cores = Node(name="local", count=1, device="cpu-core", devices=len(os.sched_getaffinity(0)), intra="shared-memory")
    gpus = tuple(local_gpus())
    return Cluster(sites=(Site(name="local", nodes=(cores, *gpus), fabric=Fabric(), storage=Storage()),))


def local_gpus() -> list[Node]:
    """The GPUs of this machine as a node of the library's device that NVML's name matches; none without NVML or a match."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # NVML raises its own error types where there is no driver
        return []
    count = pynvml.nvmlDeviceGetCount()
    if not count:
        return []
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    try:
        name = match_gpu(str(pynvml.nvmlDeviceGetName(handle)), pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except ValueError:
        return []
    return [Node(name="gpu", count=1, device=name, devices=count, intra=device(name).default_link)]


VARIANTS = frozenset({"pcie", "nvl", "laptop", "d", "max", "super", "ti", "ada"})
"""words of a product name that make it another device than the one without them"""
MEMORY_TOLERANCE = 0.1
"""NVML reports up to 7 % less than the nominal size where the memory corrects its errors itself"""


def match_gpu(nvml_name: str, memory_bytes: float) -> str:
    """The library device whose `nvml` words all stand in NVML's product name, closest in memory.

    Raises ValueError naming the product where the library has none.
    """
    words = set(re.split(r"[^a-z0-9]+", nvml_name.lower()))
    fits = [
        (abs(entry.memory_bytes - memory_bytes), name)
        for name, entry in devices().items()
        if entry.nvml
        and all(_stands_in(word, words) for word in entry.nvml)
        and not (words & VARIANTS) - set(entry.nvml)
        and abs(entry.memory_bytes - memory_bytes) <= MEMORY_TOLERANCE * entry.memory_bytes
    ]
    if not fits:
        size = f"{memory_bytes / 2**30:.0f} GiB"
        raise ValueError(f"the device library has no entry for the GPU {nvml_name!r} with {size}")
    return min(fits)[1]


def _stands_in(word: str, words: set[str]) -> bool:
    """Whether a product name has the word; `sxm` stands for every generation of that socket."""
    return word in words or (word == "sxm" and any(re.fullmatch(r"sxm\d", other) for other in words))


def _form(value: Any) -> str:
    return "described" if isinstance(value, dict | Cluster) else "named"


def _local(value: Any) -> Any:
    if value != "local":
        remedy = "write `local` for this machine, or a mapping with `sites`"
        raise WrongValue(path=(), problem="neither `local` nor a mapping with sites", remedy=remedy)
    return value


ClusterChoice = Annotated[
    Annotated[Literal["local"], BeforeValidator(_local), Tag("named")] | Annotated[Cluster, Tag("described")],
    Discriminator(_form),
]
