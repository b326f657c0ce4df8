"""Clusters to send through, and when what is sent arrives."""

import json
from collections.abc import Sequence
from typing import Any

import simpy

from lab.cluster import Cluster
from simulator.network import Flows, Network
from simulator.topology import Topology


def nodes(name: str = "n", count: int = 4, devices: int = 2, **more: Any) -> dict[str, Any]:
    return {"name": name, "count": count, "device": "a100-80g-sxm", "devices": devices, "intra": "nvlink3"} | more


def site(*groups: dict[str, Any], name: str = "a", **more: Any) -> dict[str, Any]:
    return {"name": name, "nodes": list(groups), "fabric": {"link": "ib-hdr200"}} | more


def topology(*sites: dict[str, Any], wan: Sequence[dict[str, Any]] = ()) -> Topology:
    return Topology(Cluster.model_validate_json(json.dumps({"sites": list(sites), "wan": list(wan)})))


def ends(graph: Topology, sent: Sequence[tuple[float, Sequence[Flows]]]) -> list[float]:
    """When traffic of (start, rounds) has arrived."""
    env = simpy.Environment()
    network, found = Network(env, graph), [0.0] * len(sent)

    def run(i: int, start: float, rounds: Sequence[Flows]):
        yield env.timeout(start)
        yield from network.play(rounds)
        found[i] = env.now

    for i, (start, rounds) in enumerate(sent):
        env.process(run(i, start, rounds))
    env.run()
    assert network.num_flows == 0
    return found
