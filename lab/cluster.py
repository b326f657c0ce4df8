"""The hardware: devices on nodes, links between them, storage behind them."""

from __future__ import annotations

import math
import os
import re
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator
from pydantic.config import JsonDict

from lab.errors import WrongValue
from lab.library import Tier, device, devices, link, links, tier
from lab.records import Record
from lab.units import BytesPerSecond, Seconds

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
    nics: int = Field(
        default=1, ge=1, le=1024, description="network ports of each machine, each as fast as the fabric's link"
    )

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
    """The network between the machines of a site."""

    link: str = Field(
        default="loopback", description="link between machines, of the link library: ib-ndr400, ethernet-100, …"
    )
    oversubscription: float = Field(default=1.0, ge=1.0, description="divides the bandwidth between machines")
    rails: bool = Field(
        default=False,
        description="equal-numbered ports of all machines meet in one switch: such traffic is not oversubscribed",
    )

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

    total: BytesPerSecond | None = Field(
        default=None, gt=0, description="what all machines of the site read, or write, together; null: the tier's"
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
    def total_bandwidth(self) -> float:
        """Bytes per second that all machines together read, or write; infinite where nothing is said."""
        known = self._tier()
        return self.total or (known.total if known else None) or math.inf

    @property
    def in_machine(self) -> bool:
        """Whether every machine has it in itself, so that no byte crosses the network."""
        known = self._tier()
        return known is not None and known.in_machine

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


class Wan(Record):
    """The connection of two sites: a link of the library, or a bandwidth and a latency of its own, each way."""

    between: tuple[str, str] = Field(description="names of the two sites")
    link: str | None = Field(default=None, description="an entry of the link library, for example wan-10")
    bandwidth: BytesPerSecond | None = Field(
        default=None, gt=0, description="one direction, for example 10 Gbit/s; null: the link's"
    )
    latency: Seconds | None = Field(default=None, description="one way, for example 30 ms; null: the link's")

    @model_validator(mode="after")
    def _known(self) -> Wan:
        if self.between[0] == self.between[1]:
            raise ValueError(f"between: {self.between[0]!r} is named twice; name two sites")
        if self.link is not None:
            link(self.link)
        elif self.bandwidth is None or self.latency is None:
            raise ValueError("give link, or bandwidth and latency")
        return self

    @property
    def wire(self) -> tuple[float, float]:
        """Bytes per second one direction, and seconds one way."""
        known = None if self.link is None else link(self.link)
        bandwidth = self.bandwidth if known is None or self.bandwidth else known.bandwidth
        latency = self.latency if known is None or self.latency is not None else known.latency
        assert bandwidth is not None and latency is not None
        return bandwidth, latency


class Cluster(Record):
    """All hardware of a scenario."""

    sites: tuple[Site, ...] = Field(min_length=1, max_length=64)
    wan: tuple[Wan, ...] = Field(default=(), description="connections of the sites; traffic takes the fewest of them")

    @model_validator(mode="after")
    def _distinct(self) -> Cluster:
        for what, names in (
            ("site", [site.name for site in self.sites]),
            ("node", [node.name for site in self.sites for node in site.nodes]),
        ):
            if len(set(names)) < len(names):
                raise ValueError(f"{what} names are not distinct: {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _connected(self) -> Cluster:
        names, pairs = [site.name for site in self.sites], [frozenset(wan.between) for wan in self.wan]
        for wan in self.wan:
            for name in set(wan.between) - set(names):
                raise ValueError(f"there is no site {name!r}; there are {', '.join(names)}")
        if len(set(pairs)) < len(pairs):
            raise ValueError("wan: two connections are between the same sites; add their bandwidths in one")
        for name in names[1:]:
            if not self.route(names[0], name):
                raise ValueError(f"wan: nothing leads from site {names[0]!r} to {name!r}; add a connection")
        return self

    def route(self, first: str, last: str) -> tuple[str, ...]:
        """Sites on the way between two, both included, over the fewest connections; empty where none leads there."""
        ways: list[tuple[str, ...]] = [(first,)]
        seen = {first}
        while ways:
            for way in ways:
                if way[-1] == last:
                    return way
            further = [
                (*way, other)
                for way in ways
                for wan in self.wan
                if way[-1] in wan.between
                for other in wan.between
                if other not in seen
            ]
            ways = list({way[-1]: way for way in reversed(further)}.values())
            seen.update(way[-1] for way in ways)
        return ()

    def site_of(self, device_id: str) -> Site:
        """The site that a device such as `train[7]` stands in."""
        return self._homes[device_id.split("[")[0]][0]

    @cached_property
    def _homes(self) -> dict[str, tuple[Site, Node]]:
        """By name of a group of machines."""
        return {node.name: (site, node) for site in reversed(self.sites) for node in reversed(site.nodes)}

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for site in self.sites for node in site.nodes)

    def node_of(self, device_id: str) -> Node:
        """The group of machines that a device such as `train[7]` belongs to."""
        return self._homes[device_id.split("[")[0]][1]

    def machine_of(self, device_id: str) -> str:
        """The machine a device stands on: `train[7]` on machines of four devices is on `train/1`."""
        name, index = device_id[:-1].split("[")
        return f"{name}/{int(index) // self._homes[name][1].devices}"

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
