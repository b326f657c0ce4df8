"""The graph of links that a cluster's devices, machines and storage hang on, and the paths through it.

Every device has a link to its neighbours (NVLink, PCIe, shared memory) and a GPU one to its host's memory; every machine
its ports, every site a spine that all traffic between its machines shares, and sites are joined by WAN connections.
Links are one way, so that an end sends and receives at once; a spine carries each flow once, whatever its direction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from lab.cluster import Cluster, Node, Site
from lab.library import device as library_device
from lab.library import link as library_link
from profiles.layout import LINK_EFFICIENCY
from profiles.moves import HOST_LINK, HOST_LINK_EFFICIENCY

Kind = Literal["device", "host", "port", "spine", "wan", "storage"]


class Edge(NamedTuple):
    """One link of the graph."""

    kind: Kind
    place: str
    """device, machine (`train/0`), site, or `a>b` of a WAN"""
    name: str
    """`out`, `in`, `out2` (of a machine's port 2), `write`, `read`, `total write`, `total read`"""
    bandwidth: float
    latency: float


class Path(NamedTuple):
    """A way through the graph. Every latency is of a message from end to end, so the largest counts."""

    links: tuple[int, ...]
    latency: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a device or a machine's own memory stands."""

    name: str
    site: Site
    node: Node
    first: int
    """index of its first device in the node"""


class Topology:
    """Links of a cluster, numbered; the last is a link of infinite bandwidth that is part of no path."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._machines: dict[str, Machine] = {}
        self._machine_of: dict[str, Machine] = {}
        for site in cluster.sites:
            for node in site.nodes:
                self._place(site, node)
        self._edges = tuple(self._all_edges())
        self._index = {(edge.kind, edge.place, edge.name): i for i, edge in enumerate(self._edges)}
        self.capacity = np.array([*(edge.bandwidth for edge in self._edges), math.inf])
        """bytes per second by link"""
        self._known: dict[tuple[str, str, int | None], Path] = {}

    @property
    def links(self) -> tuple[Edge, ...]:
        return self._edges

    def select(self, kind: Kind, place: str | None = None) -> list[int]:
        """Numbers of the links of a kind, of one place or of all. Raises ValueError where there are none."""
        found = [i for i, edge in enumerate(self._edges) if edge.kind == kind and place in (None, edge.place)]
        if not found:
            raise ValueError(f"{place or 'the cluster'} has no {kind} link")
        return found

    def between(self, source: str, target: str, rail: int | None = None) -> Path:
        """From a device, or a machine's memory (`train/0`), to another; over port `rail` of both machines.

        Without `rail` a device takes the port nearest to it, a machine its first. Raises ValueError for an end that
        is not in the cluster.
        """
        key = (source, target, rail)
        if key not in self._known:
            self._known[key] = self._path([] if source == target else list(self._way(source, target, rail)))
        return self._known[key]

    def to_storage(self, source: str) -> Path:
        """From a device, through its host, or from a machine's memory, to the storage of its site."""
        return self._path([*self._host(source, "out"), *self._storage(source, "out", "write")])

    def from_storage(self, target: str, site: str | None = None) -> Path:
        """The way back; from another site's storage over the connections between them."""
        here = self.machine(target).site
        if site in (None, here.name):
            return self._path([*self._host(target, "in"), *self._storage(target, "in", "read")])
        there = next(other for other in self._cluster.sites if other.name == site)
        keys = [*self._host(target, "in"), ("port", self.machine(target).name, f"in{self._port(target, None)}")]
        keys += [*self._crossed(there, here, False), ("storage", self.machine(target).name, "read")]
        return self._path([*keys, ("storage", there.name, "total read")])

    def machine(self, end: str) -> Machine:
        """Where a device or a machine's memory is. Raises ValueError for what is not in the cluster."""
        found = self._machine_of.get(end) or self._machines.get(end)
        if found is None:
            raise ValueError(f"there is no device or machine {end!r} in the cluster")
        return found

    def _path(self, keys: list[tuple[Kind, str, str]]) -> Path:
        links = tuple(self._index[key] for key in keys if key in self._index)
        return Path(links, max((self._edges[i].latency for i in links), default=0.0))

    def _place(self, site: Site, node: Node) -> None:
        for number in range(node.count):
            machine = Machine(name=f"{node.name}/{number}", site=site, node=node, first=number * node.devices)
            self._machines[machine.name] = machine
            self._machine_of |= {f"{node.name}[{machine.first + i}]": machine for i in range(node.devices)}

    def _way(self, source: str, target: str, rail: int | None) -> Iterator[tuple[Kind, str, str]]:
        here, there = self.machine(source), self.machine(target)
        if here is there:
            ends = [("device", source, "out"), ("device", target, "in")]
            in_memory = source in self._machines or target in self._machines
            yield from [*self._host(source, "out"), *self._host(target, "in")] if in_memory else ends  # type: ignore[misc]
            return
        leaving, coming = self._port(source, rail), self._port(target, rail)
        yield "device", source, "out"
        yield "port", here.name, f"out{leaving}"
        yield from self._crossed(here.site, there.site, leaving == coming)
        yield "port", there.name, f"in{coming}"
        yield "device", target, "in"

    def _crossed(self, first: Site, last: Site, same_rail: bool) -> Iterator[tuple[Kind, str, str]]:
        """What lies between the ports of two machines."""
        if first is last:
            if not (first.fabric.rails and same_rail):
                yield "spine", first.name, ""
            return
        route = self._cluster.route(first.name, last.name)
        yield "spine", first.name, ""
        for here, there in pairwise(route):
            yield "wan", f"{here}>{there}", ""
        yield "spine", last.name, ""

    def _host(self, end: str, direction: str) -> Iterator[tuple[Kind, str, str]]:
        yield "host", end, direction

    def _storage(self, end: str, direction: str, use: str) -> Iterator[tuple[Kind, str, str]]:
        machine = self.machine(end)
        if not machine.site.storage.in_machine and sum(node.count for node in machine.site.nodes) > 1:
            yield "port", machine.name, f"{direction}{self._port(end, None)}"
            yield "spine", machine.site.name, ""
        yield "storage", machine.name, use
        yield "storage", machine.site.name, f"total {use}"

    def _port(self, end: str, rail: int | None) -> int:
        machine = self.machine(end)
        if rail is not None:
            return rail % machine.node.nics
        if end in self._machines:
            return 0
        return (int(end.split("[")[1][:-1]) - machine.first) * machine.node.nics // machine.node.devices

    def _all_edges(self) -> Iterator[Edge]:
        for site in self._cluster.sites:
            yield from _site_edges(site, [machine for machine in self._machines.values() if machine.site is site])
        for wan in self._cluster.wan:
            (a, b), (bandwidth, latency) = wan.between, wan.wire
            yield Edge("wan", f"{a}>{b}", "", bandwidth * LINK_EFFICIENCY, latency)
            yield Edge("wan", f"{b}>{a}", "", bandwidth * LINK_EFFICIENCY, latency)


def _site_edges(site: Site, machines: list[Machine]) -> Iterator[Edge]:
    wire, storage = library_link(site.fabric.link), site.storage
    port, num_ports = wire.bandwidth * LINK_EFFICIENCY, sum(machine.node.nics for machine in machines)
    yield Edge("spine", site.name, "", port * num_ports / site.fabric.oversubscription, wire.latency)
    if math.isfinite(storage.total_bandwidth):
        for use in ("write", "read"):
            yield Edge("storage", site.name, f"total {use}", storage.total_bandwidth, storage.latency)
    for machine in machines:
        for rail in range(machine.node.nics):
            for way in ("out", "in"):
                yield Edge("port", machine.name, f"{way}{rail}", port, wire.latency)
        yield Edge("storage", machine.name, "write", storage.write_bandwidth, storage.latency)
        yield Edge("storage", machine.name, "read", storage.read_bandwidth, storage.latency)
        for i in range(machine.node.devices):
            yield from _device_edges(f"{machine.node.name}[{machine.first + i}]", machine.node)


def _device_edges(device: str, node: Node) -> Iterator[Edge]:
    intra, host = library_link(node.intra), library_link(HOST_LINK)
    gpu = library_device(node.device).kind == "gpu"
    for way in ("out", "in"):
        yield Edge("device", device, way, intra.bandwidth * LINK_EFFICIENCY, intra.latency)
        if gpu:
            yield Edge("host", device, way, host.bandwidth * HOST_LINK_EFFICIENCY, host.latency)
