"""Collectives as rounds of flows, so that what they share with other traffic slows both down.

Alone they take the closed forms of `profiles.collectives`: a ring sends its shares over all hops at once, a pipelined
chain likewise; a tree sends the whole in rounds, each started when the one before has arrived. Between machines a hop is
spread over all their ports, as NCCL does with one channel for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest

import numpy as np

from profiles.collectives import Group, Wire, times
from simulator.fairness import fair_rates
from simulator.network import Flow, Flows
from simulator.topology import Path, Topology

HALVES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""by collective: passes of a ring around all ranks"""
Hop = tuple[str, str]


def direct(topology: Topology, source: str, target: str, size: float) -> Flows:
    """`size` bytes from one device or machine to another, over the ports nearest to them."""
    return Flows.of([Flow(path=topology.between(source, target), bytes=size)])


def ring(topology: Topology, devices: Sequence[str], size: float, op: str = "all_reduce") -> Flows:
    """One flow for each hop of a ring that visits machine after machine, each with its share of `size` bytes.

    Size as in `profiles.collectives.seconds`. Raises ValueError for an op that a ring does not do.
    """
    if op not in HALVES:
        raise ValueError(f"a ring does not do {op!r}; it does {', '.join(HALVES)}")
    order, n = [device for machine in by_machine(topology, devices) for device in machine], len(devices)
    hops = list(zip(order, order[1:] + order[:1], strict=True)) if n > 1 else []
    return _in_step(topology, hops, HALVES[op] * (n - 1) / n * size, HALVES[op] * (n - 1))


def chain(topology: Topology, devices: Sequence[str], size: float) -> Flows:
    """A broadcast from the first device, in pieces of the best size, through all others one after the other."""
    if len(devices) < 2:
        return Flows.of([])
    order = [device for machine in by_machine(topology, devices) for device in machine]
    flows = _in_step(topology, list(pairwise(order)), size, 1)
    if not len(flows) or size <= 0:
        return flows
    seconds = _slowest(topology, flows)
    wire = Wire(size / seconds, float(flows.latency.max()))
    alone = times("broadcast", size, Group(ranks=len(order), per_machine=len(order), intra=wire, inter=wire))["ring"]
    return Flows(paths=flows.paths, bytes=flows.bytes, latency=np.full(len(flows), alone - seconds))


def flat(topology: Topology, sender: str, receivers: Sequence[str], size: float) -> Flows:
    """A broadcast from one sender to everyone at once."""
    return Flows.of(flow for receiver in receivers for flow in over_ports(topology, (sender, receiver), size))


def tree(topology: Topology, sender: str, receivers: Sequence[str], size: float) -> tuple[Flows, ...]:
    """A broadcast in rounds: everyone who has it sends it to one who has not; first to one of each machine."""
    machines = by_machine(topology, dict.fromkeys([sender, *receivers]))
    between = binomial([machine[0] for machine in machines])
    inside = zip_longest(*(binomial(machine) for machine in machines), fillvalue=())
    rounds = [*between, *([hop for hops in same for hop in hops] for same in inside)]
    return tuple(Flows.of(flow for hop in hops for flow in over_ports(topology, hop, size)) for hops in rounds)


def paced(topology: Topology, flows: Flows, seconds: float) -> Flows:
    """The same flows with so many bytes, and such a latency, that alone they take `seconds`."""
    if not len(flows):
        return flows
    alone = float(flows.latency.max()) + _slowest(topology, flows)
    if alone <= 0:  # from a device to itself
        return Flows(paths=flows.paths, bytes=0 * flows.bytes, latency=np.full(len(flows), seconds))
    factor = seconds / alone
    return Flows(paths=flows.paths, bytes=factor * flows.bytes, latency=factor * flows.latency)


def binomial(ends: Sequence[str]) -> list[list[Hop]]:
    """Rounds of hops that double the number of ends that have what the first had."""
    rounds, have = list[list[Hop]](), 1
    while have < len(ends):
        rounds.append(list(zip(ends[:have], ends[have : 2 * have], strict=False)))
        have *= 2
    return rounds


def by_machine(topology: Topology, devices: Iterable[str]) -> list[list[str]]:
    """Devices of each machine, both in the order in which they are first named."""
    found = dict[str, list[str]]()
    for device in devices:
        found.setdefault(topology.machine(device).name, []).append(device)
    return list(found.values())


def _in_step(topology: Topology, hops: Sequence[Hop], size: float, num_messages: float) -> Flows:
    """Flows of which each piece waits for the slowest hop's."""
    flows = [flow for hop in hops for flow in over_ports(topology, hop, size)]
    latency = max((flow.path.latency for flow in flows), default=0.0)
    paced = [Flow(path=Path(flow.path.links, latency), bytes=flow.bytes, num_messages=num_messages) for flow in flows]
    return Flows.of(paced)


def over_ports(topology: Topology, hop: Hop, size: float) -> Iterator[Flow]:
    """From one end to the other, over every port that both machines have."""
    here, there = (topology.machine(end) for end in hop)
    if here is there:
        yield Flow(path=topology.between(*hop), bytes=size)
        return
    num_ports = min(here.node.nics, there.node.nics)
    for rail in range(num_ports):
        yield Flow(path=topology.between(*hop, rail), bytes=size / num_ports)


def _slowest(topology: Topology, flows: Flows) -> float:
    """Seconds that the slowest flow takes for its bytes when there are no others but these."""
    paths = np.where(flows.paths < 0, len(topology.capacity) - 1, flows.paths)
    return float((flows.bytes / fair_rates(paths, topology.capacity)).max())
