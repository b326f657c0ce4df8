import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lab.cluster import Cluster, Fabric, Node, Site, Storage, Wan, local_cluster, match_gpu
from lab.library import devices, links


def cluster(count: int, per_node: int) -> Cluster:
    node = Node(name="n", count=count, device="a100-80g-sxm", devices=per_node, intra="nvlink3")
    return Cluster(sites=(Site(nodes=(node,)),))


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_a_slice_names_its_devices_and_their_machines(count: int, per_node: int, data: st.DataObject) -> None:
    hardware, total = cluster(count, per_node), count * per_node
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    assert hardware.select(f"n[{start}:{stop}]") == tuple(f"n[{i}]" for i in range(start, stop))
    assert hardware.select(f"n[{start}]") == (f"n[{start}]",)
    assert hardware.machine_of(f"n[{start}]") == f"n/{start // per_node}"
    assert len(hardware.select("n")) == total


@pytest.mark.parametrize("wrong", ["n[4]", "n[0:5]", "n[2:2]", "n[3:1]", "m[0]", "n[a]", "n[", "", "n[-1]"])
def test_devices_that_are_not_there_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError):
        cluster(2, 2).select(wrong)


def test_this_machine_has_cores() -> None:
    assert len(local_cluster().select("local")) >= 1


NVML = {
    ("NVIDIA H100 80GB HBM3", 79.6): "h100-80g-sxm", ("NVIDIA H100 PCIe", 79.6): "h100-80g-pcie",
    ("NVIDIA A100-SXM4-80GB", 80): "a100-80g-sxm", ("NVIDIA A100-SXM4-40GB", 40): "a100-40g-sxm",
    ("NVIDIA A100 80GB PCIe", 80): "a100-80g-pcie", ("NVIDIA A100-PCIE-40GB", 40): "a100-40g-pcie",
    ("NVIDIA A800-SXM4-80GB", 80): "a800-80g", ("NVIDIA H800", 79.6): "h800-80g", ("NVIDIA H20", 95.6): "h20-96g",
    ("NVIDIA H200", 140.4): "h200-141g-sxm", ("NVIDIA B200", 179.1): "b200-sxm", ("NVIDIA GB200", 185): "gb200",
    ("Tesla T4", 15): "t4", ("NVIDIA A10", 22.5): "a10", ("NVIDIA L40S", 45): "l40s", ("NVIDIA RTX A6000", 48): "a6000",
    ("Tesla V100-SXM2-32GB", 32): "v100-32g-sxm", ("Tesla V100-SXM3-32GB", 32): "v100-32g-sxm",
    ("NVIDIA GeForce RTX 4090", 24): "rtx-4090",
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.6): "rtx-pro-6000",
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95.6): "rtx-pro-6000",
}  # fmt: skip
OTHERS = {
    "Voodoo2": 1, "Tesla V100-SXM2-16GB": 16, "NVIDIA H100 NVL": 93.6, "NVIDIA H200 NVL": 140.4, "NVIDIA A10G": 22.5,
    "NVIDIA GeForce RTX 4090 D": 24, "NVIDIA GeForce RTX 4090 Laptop GPU": 16, "NVIDIA L40": 45,
    "NVIDIA RTX 6000 Ada Generation": 48, "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": 95.6,
}  # fmt: skip


@pytest.mark.parametrize(("name", "gib"), NVML)
def test_nvml_names_find_their_device(name: str, gib: float) -> None:
    assert match_gpu(name, gib * 2**30) == NVML[name, gib]


@pytest.mark.parametrize("name", OTHERS)
def test_a_gpu_is_not_taken_for_a_similar_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"no entry for the GPU '{name}'"):
        match_gpu(name, OTHERS[name] * 2**30)


def test_storage_is_a_tier_or_bandwidths_of_its_own() -> None:
    nvme = Storage(tier="nvme")
    assert (nvme.write_bandwidth, nvme.read_bandwidth, nvme.latency) == pytest.approx((4.1e9, 6.9e9, 80e-6))
    assert Storage(tier="nvme", write=2e9).write_bandwidth == 2e9
    assert Storage(tier="nvme", write=2e9).read_bandwidth == pytest.approx(6.9e9)
    own = Storage.model_validate({"write": "5 GB/s", "read": "10 GB/s"})
    assert (own.write_bandwidth, own.read_bandwidth, own.latency) == (5e9, 10e9, 0)
    assert Storage(write=3e9).read_bandwidth == 3e9
    assert Storage().write_bandwidth == Storage().read_bandwidth == 1e9
    with pytest.raises(ValueError, match="'tape' is not in the storage library; it has"):
        Storage(tier="tape")


def test_storage_has_a_limit_of_all_machines_together_where_one_is_known() -> None:
    assert Storage().total_bandwidth == math.inf
    assert Storage(tier="nfs").total_bandwidth == pytest.approx(1.1e9)
    assert Storage(tier="nfs", total=5e9).total_bandwidth == 5e9
    assert Storage(tier="nvme").in_machine
    assert not Storage(tier="lustre").in_machine
    assert not Storage(write=1e9).in_machine


def sites(names: str, *pairs: str) -> Cluster:
    """Sites of one letter each, joined in pairs."""
    places = [
        Site(name=name, nodes=(Node(name=f"{name}n", device="a100-80g-sxm", devices=2, intra="nvlink3"),))
        for name in names
    ]
    return Cluster(sites=tuple(places), wan=tuple(Wan(between=(a, b), link="wan-10") for a, b in pairs))


def test_the_way_between_sites_is_the_one_of_fewest_connections() -> None:
    ring = sites("abcde", "ab", "bc", "cd", "de", "ea")
    assert ring.route("a", "a") == ("a",)
    assert ring.route("a", "c") == ("a", "b", "c")
    assert ring.route("d", "a") == ("d", "e", "a")
    assert ring.site_of("dn[1]").name == "d"


@given(st.integers(2, 9), st.data())
def test_every_way_leads_over_connections_from_one_end_to_the_other(number: int, data: st.DataObject) -> None:
    names = "abcdefghi"[:number]
    tree = [names[data.draw(st.integers(0, i - 1))] + names[i] for i in range(1, number)]
    cluster = sites(names, *tree)
    for first in names:
        for last in names:
            way = cluster.route(first, last)
            assert way[0] == first
            assert way[-1] == last
            assert all({a, b} in [set(pair) for pair in tree] for a, b in pairwise(way))
            assert len(set(way)) == len(way)


@pytest.mark.parametrize(
    ("names", "pairs", "message"),
    [
        ("ab", [], "nothing leads from site 'a' to 'b'; add a connection"),
        ("abc", ["ab"], "nothing leads from site 'a' to 'c'"),
        ("ab", ["ab", "ba"], "two connections are between the same sites"),
        ("ab", ["ab", "bx"], "there is no site 'x'; there are a, b"),
        ("ab", ["aa", "ab"], "'a' is named twice"),
    ],
)
def test_sites_that_are_not_joined_as_they_should_be_are_refused(names: str, pairs: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sites(names, *pairs)


def test_a_connection_is_a_link_or_numbers_of_its_own() -> None:
    assert Wan(between=("a", "b"), link="wan-1").wire == pytest.approx((125e6, 0.035))
    assert Wan(between=("a", "b"), link="wan-1", latency=0.0).wire == pytest.approx((125e6, 0.0))
    assert Wan.model_validate_json('{"between": ["a", "b"], "bandwidth": "2 GB/s", "latency": "30 ms"}').wire == (
        2e9,
        0.03,
    )
    with pytest.raises(ValueError, match="give link, or bandwidth and latency"):
        Wan(between=("a", "b"), bandwidth=1e9)
    with pytest.raises(ValueError, match="'dsl' is not in the link library"):
        Wan(between=("a", "b"), link="dsl")


def test_every_link_connects_the_devices_of_a_machine_or_machines() -> None:
    """No link but the loopback is both, none is neither; every device's own link is inside a machine."""
    for name, entry in links().items():
        inside, between = accepts(intra=name), accepts(fabric=name)
        assert inside == (entry.transport in ("bus", "memory") or name == "loopback")
        assert between == (entry.transport in ("rdma", "tcp"))
    assert all(accepts(intra=entry.default_link) for entry in devices().values())


def accepts(*, intra: str = "nvlink3", fabric: str = "loopback") -> bool:
    try:
        node = Node(name="n", device="a100-80g-sxm", devices=2, intra=intra)
        return bool(Site(nodes=(node,), fabric=Fabric(link=fabric)))
    except ValidationError as error:
        wrong = error.errors()[0]["ctx"]["error"]
        fits = wrong.remedy.split(";")[0].removeprefix("use one of ").split(", ")
        assert fits and set(fits) <= set(links()) - {intra, fabric} | {"loopback"}
        return False
