"""Layout: where a worker's devices stand, and which links its groups of ranks use.

Devices of a worker are numbered pipeline stage, then context or data rank, then tensor rank, so that the groups that
talk most stand closest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from lab.library import Device
from lab.library import device as library_device
from lab.library import link as library_link
from profiles.collectives import Group, Wire

if TYPE_CHECKING:
    from lab.cluster import Cluster, Node, Site, Storage
    from lab.model import ModelSpec
    from lab.placement import Worker
    from lab.scenario import Scenario

LINK_EFFICIENCY = 0.8
"""share of a link's bandwidth that collectives reach on large messages: about 235 of 300 GB/s on eight A100 and
360 of 450 GB/s on eight H100 (bus bandwidth that nccl-tests print)"""


@dataclass(frozen=True, eq=False)
class Layout:
    """A worker in its cluster."""

    scenario: Scenario
    worker: Worker
    first: Layout | None = None
    """of the first rank of a trainer, where this is of another: what the ranks have in common is reckoned once"""

    @cached_property
    def device(self) -> Device:
        """What its devices are."""
        return library_device(self.scenario.hardware.node_of(self.worker.devices[0]).device)

    @property
    def threads(self) -> int:
        """CPU threads of each device's work; they have no meaning on a GPU. They share one memory bandwidth."""
        return self.worker.threads if self.device.kind == "cpu" else 1

    @property
    def spec(self) -> ModelSpec:
        return self.scenario.spec(self.worker.role)

    @property
    def activations(self) -> str:
        """Dtype of what passes between layers: 16 bits where weights have eight."""
        dtype = self.worker.dtype
        return dtype if dtype in ("float32", "bfloat16", "float16") else "bfloat16"

    @property
    def adapter_parameters(self) -> int:
        """Parameters of the adapters that its network passes beside its weights; 0: none."""
        lora = self.scenario.model(self.worker.role).lora
        return lora.parameters(self.spec) if lora else 0

    @property
    def width(self) -> int:
        """Devices that hold one copy of the layers."""
        return self.worker.parallelism.tensor * self.worker.parallelism.pipeline

    @cached_property
    def replicas(self) -> int:
        """Ranks that hold the same weights and average their gradients: data-parallel times context-parallel."""
        return len(self._team) * self.worker.parallelism.context

    @cached_property
    def tensor(self) -> Group:
        return self.group(self.worker.devices[: self.worker.parallelism.tensor])

    @cached_property
    def context(self) -> Group:
        """Context-parallel ranks of one trainer rank, or data-parallel copies inside an engine."""
        return self.group(self.worker.devices[: self._stage : self.worker.parallelism.tensor])

    @cached_property
    def stages(self) -> Group:
        """One device of each pipeline stage."""
        return self.group(self.worker.devices[:: self._stage])

    @cached_property
    def gradients(self) -> Group:
        """The ranks that hold the same weights, with their part of the ports that all such groups of a machine share."""
        if self.first is not None:
            return self.first.gradients
        return _sharing(self.group(self.gradient_devices), self._columns)

    @property
    def _columns(self) -> int:
        """Groups of ranks with the same weights on one machine, each averaging its own: of tensor ranks and stages."""
        machine = self.scenario.hardware.machine_of
        ring = Counter(machine(device) for device in self.gradient_devices)
        team = Counter(machine(device) for rank in self._team for device in rank.devices)
        return max(-(-team[name] // number) for name, number in ring.items())

    @cached_property
    def gradient_devices(self) -> list[str]:
        """One device of every rank that holds the same weights."""
        if self.first is not None:
            return self.first.gradient_devices
        step = self.worker.parallelism.tensor
        return [device for rank in self._team for device in rank.devices[: self._stage : step]]

    @cached_property
    def experts(self) -> Group:
        """Devices that send tokens to each other's experts: of several trainer ranks, or of one engine."""
        wanted = self.worker.parallelism.expert
        if self.worker.work == "generate":
            return self.group(self.worker.devices[:wanted])
        step = self.worker.parallelism.tensor
        ranks = [device for rank in self._team for device in rank.devices[: self._stage : step]]
        return self.group(ranks[:wanted])

    def group(self, devices: Sequence[str]) -> Group:
        """Any devices; where machines hold unequal numbers of them, the largest counts and nothing is staged."""
        machines = Counter(self.scenario.hardware.machine_of(device) for device in devices)
        return Group(
            ranks=len(devices),
            per_machine=max(machines.values()),
            intra=self.intra(devices[0]),
            inter=self.fabric(devices),
        )

    def intra(self, device: str) -> Wire:
        link = library_link(self.scenario.hardware.node_of(device).intra)
        return Wire(link.bandwidth * LINK_EFFICIENCY, link.latency)

    def fabric(self, devices: Sequence[str]) -> Wire:
        """A machine's way to the others: all its ports, or the connection of their sites where that is narrower."""
        hardware = self.scenario.hardware
        ends = {hardware.node_of(device).name: device for device in devices}.values()
        wires = [_ports(hardware.site_of(device), hardware.node_of(device)) for device in ends]
        sites = dict.fromkeys(hardware.site_of(device).name for device in ends)
        wires += [wire for first, last in pairwise(sites) for wire in _connections(hardware, first, last)]
        return Wire(min(wire.bandwidth for wire in wires), max(wire.latency for wire in wires))

    @property
    def storage(self) -> Storage:
        """What its site keeps files on."""
        return self.scenario.hardware.site_of(self.worker.devices[0]).storage

    @cached_property
    def expert_gradients(self) -> Group:
        """The ranks among `gradients` that hold the same routed experts."""
        whole, spread = self.gradients, self.worker.parallelism.expert
        per_machine = max(1, whole.per_machine // spread)
        group = Group(ranks=whole.ranks // spread, per_machine=per_machine, intra=whole.intra, inter=whole.inter)
        return _sharing(group, whole.per_machine // per_machine)

    @property
    def share(self) -> float:
        """Share of the model's parameters that one device holds without any sharding of optimizer or weights."""
        return sum(self.parts(1.0))

    def parts(self, size: float) -> tuple[float, float]:
        """Of `size` bytes of all weights or gradients, those on one device: outside of, and in routed experts."""
        spec = self.spec
        sparse = spec.expert_parameters / spec.parameters
        return size * (1 - sparse) / self.width, size * sparse / self.width / self.worker.parallelism.expert

    @property
    def _stage(self) -> int:
        """Devices of one pipeline stage."""
        return len(self.worker.devices) // self.worker.parallelism.pipeline

    @cached_property
    def devices_of_team(self) -> list[str]:
        """All devices of all ranks of its team."""
        return [device for rank in self._team for device in rank.devices]

    @property
    def _team(self) -> tuple[Worker, ...]:
        return self.scenario.team(self.worker.role, self.worker.work) if self.worker.work == "train" else (self.worker,)


def _sharing(group: Group, number: int) -> Group:
    """One of so many equal groups that use the ports of their machines at once."""
    return replace(group, inter=Wire(group.inter.bandwidth / number, group.inter.latency))


def _ports(site: Site, node: Node) -> Wire:
    link, fabric = library_link(site.fabric.link), site.fabric
    narrowed = 1.0 if fabric.rails else fabric.oversubscription
    return Wire(link.bandwidth * LINK_EFFICIENCY * node.nics / narrowed, link.latency)


def _connections(cluster: Cluster, first: str, last: str) -> list[Wire]:
    """WAN links on the way from one site to another."""
    wires = {frozenset(wan.between): wan.wire for wan in cluster.wan}
    found = [wires[frozenset(pair)] for pair in pairwise(cluster.route(first, last))]
    return [Wire(bandwidth * LINK_EFFICIENCY, latency) for bandwidth, latency in found]
