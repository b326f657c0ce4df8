"""What lies on the way between two ends."""

import math

import pytest

from simulator.topology import Path, Topology
from tests.networks import nodes, site, topology

THREE = [
    site(nodes(name), name=place, storage={"tier": "lustre"}) for name, place in (("n", "a"), ("m", "b"), ("k", "c"))
]
WAN = [{"between": ["a", "b"], "link": "wan-10"}, {"between": ["c", "b"], "bandwidth": "1 Gbit/s", "latency": "30 ms"}]


def way(graph: Topology, path: Path) -> list[str]:
    edges = [graph.links[i] for i in path.links]
    return [f"{edge.kind} {edge.place} {edge.name}".strip() for edge in edges]


def test_inside_a_machine_and_between_machines() -> None:
    graph = topology(site(nodes(nics=2)))
    assert way(graph, graph.between("n[0]", "n[1]")) == ["device n[0] out", "device n[1] in"]
    assert way(graph, graph.between("n[0]", "n[3]")) == [
        "device n[0] out", "port n/0 out0", "spine a", "port n/1 in1", "device n[3] in",
    ]  # fmt: skip
    assert way(graph, graph.between("n[0]", "n[3]", rail=1))[1::2] == ["port n/0 out1", "port n/1 in1"]
    assert way(graph, graph.between("n/0", "n/1")) == ["port n/0 out0", "spine a", "port n/1 in0"]
    assert way(graph, graph.between("n/0", "n[1]")) == ["host n[1] in"]
    assert graph.between("n/0", "n/0") == Path((), 0.0)


def test_equal_rails_do_not_cross_the_spine() -> None:
    fabric = {"link": "ib-hdr200", "rails": True, "oversubscription": 4.0}
    graph = topology(site(nodes(nics=2), fabric=fabric))
    assert "spine a" not in way(graph, graph.between("n[0]", "n[2]"))
    assert "spine a" in way(graph, graph.between("n[0]", "n[3]"))


def test_sites_are_joined_by_the_fewest_connections() -> None:
    graph = topology(*THREE, wan=WAN)
    path = graph.between("n[0]", "k[0]")
    assert way(graph, path)[2:-2] == ["spine a", "wan a>b", "wan b>c", "spine c"]
    assert path.latency == 0.035
    assert min(graph.capacity[i] for i in path.links) == 0.8 * 1e9 / 8
    near = topology(*THREE, wan=[*WAN, {"between": ["a", "c"], "link": "wan-1"}])
    assert way(near, near.between("k[0]", "n[0]"))[2:-2] == ["spine c", "wan c>a", "spine a"]


def test_storage_is_behind_the_host_and_the_port_unless_it_is_in_the_machine() -> None:
    graph = topology(*THREE, wan=WAN)
    assert way(graph, graph.to_storage("m[3]")) == [
        "host m[3] out", "port m/1 out0", "spine b", "storage m/1 write", "storage b total write",
    ]  # fmt: skip
    assert way(graph, graph.from_storage("m/1")) == [
        "port m/1 in0", "spine b", "storage m/1 read", "storage b total read",
    ]  # fmt: skip
    assert graph.to_storage("m[3]").latency == 1e-3
    own = topology(site(nodes(), storage={"tier": "nvme"}))
    assert way(own, own.to_storage("n[3]")) == ["host n[3] out", "storage n/1 write"]
    alone = topology(site(nodes(count=1), storage={"write": "5 GB/s"}))
    assert way(alone, alone.to_storage("n[1]")) == ["host n[1] out", "storage n/0 write"]


def test_cpu_cores_have_no_link_to_their_own_memory() -> None:
    graph = topology(site(nodes(count=1, device="cpu-core", intra="shared-memory")))
    assert way(graph, graph.to_storage("n[0]")) == ["storage n/0 write"]
    assert way(graph, graph.between("n[0]", "n[1]")) == ["device n[0] out", "device n[1] in"]


def test_a_spine_is_as_wide_as_all_ports_over_the_oversubscription() -> None:
    fabric = {"link": "ib-hdr200", "oversubscription": 3.0}
    graph = topology(site(nodes(count=4, nics=2), nodes("m", 1), fabric=fabric))
    assert graph.capacity[graph.select("spine")] == pytest.approx([9 * 0.8 * 25e9 / 3])
    assert math.isinf(graph.capacity[-1])


def test_links_are_selected_by_kind_and_place() -> None:
    graph = topology(site(nodes(nics=2)))
    assert len(graph.select("port")) == 4 * 2 * 2
    assert {graph.links[i].name for i in graph.select("port", "n/3")} == {"out0", "in0", "out1", "in1"}
    with pytest.raises(ValueError, match="n/4 has no port link"):
        graph.select("port", "n/4")
    with pytest.raises(ValueError, match="the cluster has no wan link"):
        graph.select("wan")
