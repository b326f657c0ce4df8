"""How fast flows are re-timed: 1,024 GPUs on 128 machines with eight ports each, alone and all kinds of traffic at once.

Each number is the median of five; the first run, which may compile, is left out.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from random import Random

import simpy

from lab.cluster import Cluster
from simulator.network import Flow, Flows, Network
from simulator.topology import Topology
from simulator.traffic import ring, tree
from simulator.world import Process

REPEATS = 5
NODE = {"name": "n", "count": 128, "device": "h100-80g-sxm", "devices": 8, "intra": "nvlink4", "nics": 8}
SITE = {"nodes": [NODE], "fabric": {"link": "ib-ndr400", "oversubscription": 2.0}, "storage": {"tier": "lustre"}}
Traffic = Callable[[Network], Iterable[Process]]


def main() -> None:
    graph = Topology(Cluster.model_validate_json(json.dumps({"sites": [SITE]})))
    devices, random = [f"n[{i}]" for i in range(1024)], Random(0)
    gradients, weights = ring(graph, devices, 14e9), tree(graph, devices[0], devices[1:], 14e9)
    states = Flows.of(Flow(path=graph.to_storage(device), bytes=2e9) for device in devices)
    samples = [
        (random.uniform(0, 0.2), Flow(path=graph.between(*random.sample(devices, 2)), bytes=random.uniform(1e8, 1e10)))
        for _ in range(1000)
    ]
    small = [(1e-4 * i, Flow(path=graph.between("n[0]", "n[9]"), bytes=1e5)) for i in range(10_000)]
    report("ring all-reduce over 1,024 GPUs", graph, lambda network: [network.send_all(gradients)])
    report("tree broadcast to 1,023 GPUs", graph, lambda network: [network.play(weights)])
    report("1,000 flows at random times", graph, lambda network: [late(network, *one) for one in samples])
    report("10,000 small flows one by one", graph, lambda network: [late(network, *one) for one in small])
    report(
        "all of it and 1,024 checkpoint writers",
        graph,
        lambda network: [
            network.send_all(gradients), network.play(weights), network.send_all(states),
            *(late(network, *one) for one in samples),
        ],
    )  # fmt: skip


def late(network: Network, start: float, flow: Flow) -> Process:
    yield network.env.timeout(start)
    yield from network.send(flow)


def report(name: str, graph: Topology, traffic: Traffic) -> None:
    runs = [play(graph, traffic) for _ in range(REPEATS + 1)][1:]
    wall, retimings = statistics.median(run[0] for run in runs), runs[0][1]
    print(f"{name:40} {wall:8.3f} s, {retimings:6} re-timings, {wall / retimings * 1e6:6.0f} µs each")


def play(graph: Topology, traffic: Traffic) -> tuple[float, int]:
    """Wall seconds and re-timings of some traffic."""
    env = simpy.Environment()
    network = Network(env, graph)
    for process in traffic(network):
        env.process(process)
    start = time.perf_counter()
    env.run()
    return time.perf_counter() - start, network.num_retimings


if __name__ == "__main__":
    main()
