import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.cluster import Cluster, Node, Site, local_cluster, match_gpu
from lab.library import device, devices, link, links, model, models


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


def test_every_entry_of_the_library_cites_its_source_and_is_plausible() -> None:
    for entry in [*devices().values(), *links().values(), *models().values()]:
        assert len(entry.source) > 10
    for entry in devices().values():
        assert entry.default_link in links()
        assert 1e9 <= entry.memory_bandwidth <= 2e13 and all(1e9 <= flops <= 1e17 for flops in entry.flops.values())


@pytest.mark.parametrize("look", [device, link, model])
def test_an_unknown_entry_is_refused_with_those_there_are(look) -> None:
    with pytest.raises(ValueError, match="it has"):
        look("no-such-thing")


def test_nvml_names_find_their_device() -> None:
    assert match_gpu("NVIDIA H100 80GB HBM3", 80 * 2**30) == "h100-80g-sxm"
    assert match_gpu("NVIDIA A100-SXM4-80GB", 80 * 2**30) == "a100-80g-sxm"
    with pytest.raises(ValueError, match="no entry"):
        match_gpu("Voodoo2", 1)
