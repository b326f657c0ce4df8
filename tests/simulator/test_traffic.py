"""Collectives as flows: alone each takes its closed form; together they share."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.library import link
from profiles.collectives import Group, Wire, times
from profiles.layout import LINK_EFFICIENCY
from simulator.topology import Topology
from simulator.traffic import HALVES, binomial, chain, direct, flat, ring, tree
from tests.networks import ends, nodes, site, topology

shapes = st.tuples(st.integers(1, 9), st.integers(1, 8), st.integers(1, 4))
sizes = st.floats(1, 1e12)
PORT, LATENCY = 0.8 * 25e9, 1.5e-6


def machines(count: int, devices: int, nics: int = 1, over: float = 1.0, intra: str = "nvlink3") -> Topology:
    return topology(
        site(
            nodes(count=count, devices=devices, nics=nics, intra=intra),
            fabric={"link": "ib-hdr200", "oversubscription": over},
        )
    )


def group(count: int, devices: int, nics: int = 1, over: float = 1.0) -> Group:
    """The same machines as the closed forms see them: one port as wide as all of a machine's."""
    intra, inter = link("nvlink3"), link("ib-hdr200")
    return Group(
        ranks=count * devices,
        per_machine=devices,
        intra=Wire(intra.bandwidth * LINK_EFFICIENCY, intra.latency),
        inter=Wire(inter.bandwidth * LINK_EFFICIENCY * nics / over, inter.latency),
    )


@given(shapes, sizes, st.sampled_from(sorted(HALVES)), st.sampled_from([1.0, 2.0, 4.0]), st.randoms())
def test_a_ring_alone_takes_its_closed_form(shape, size: float, op: str, over: float, random) -> None:
    """Over all machines of a site, where a spine that is too narrow is shared by as many hops as its width counts on."""
    graph, whole = machines(*shape, over), group(*shape, over)
    ranks = [f"n[{i}]" for i in range(whole.ranks)]
    random.shuffle(ranks)
    expected = times(op, size, whole)["ring"] if whole.ranks > 1 else 0.0
    assert ends(graph, [(0.0, [ring(graph, ranks, size, op)])]) == pytest.approx([expected], rel=1e-6)


def test_a_ring_over_few_machines_finds_room_in_a_narrow_spine() -> None:
    graph = machines(8, 1, over=4.0)
    few, all_of_them = (ends(graph, [(0.0, [ring(graph, [f"n[{i}]" for i in range(n)], 1e9)])])[0] for n in (2, 8))
    assert few == pytest.approx(times("all_reduce", 1e9, group(2, 1))["ring"], rel=1e-6)
    assert all_of_them == pytest.approx(times("all_reduce", 1e9, group(8, 1, over=4.0))["ring"], rel=1e-6)


@given(shapes, st.floats(1, 1e12))
def test_a_chain_alone_takes_its_closed_form(shape, size: float) -> None:
    graph, whole = machines(*shape), group(*shape)
    expected = times("broadcast", size, whole)["ring"] if whole.ranks > 1 else 0.0
    found = ends(graph, [(0.0, [chain(graph, [f"n[{i}]" for i in range(whole.ranks)], size)])])
    assert found == pytest.approx([expected], rel=1e-6)


@given(st.integers(1, 40), st.integers(1, 4), sizes)
def test_a_tree_alone_takes_its_rounds(count: int, nics: int, size: float) -> None:
    graph = machines(count, 1, nics, intra="nvlink5")
    receivers = [f"n[{i}]" for i in range(1, count)]
    rounds = math.ceil(math.log2(count))
    assert ends(graph, [(0.0, tree(graph, "n[0]", receivers, size))]) == pytest.approx(
        [rounds * (2e-6 + size / (nics * PORT))], rel=1e-6
    )


@given(st.integers(1, 6), st.integers(1, 8), sizes)
def test_a_tree_crosses_the_ports_once_and_then_spreads_inside(count: int, devices: int, size: float) -> None:
    graph = machines(count, devices)
    receivers = [f"n[{i}]" for i in range(1, count * devices)]
    between, inside = math.ceil(math.log2(count)), math.ceil(math.log2(devices))
    expected = between * (2e-6 + size / PORT) + inside * (2e-6 + size / 240e9)
    assert ends(graph, [(0.0, tree(graph, "n[0]", receivers, size))]) == pytest.approx([expected], rel=1e-6)


@given(st.integers(1, 40), sizes)
def test_a_flat_broadcast_alone_pushes_everything_through_one_port(number: int, size: float) -> None:
    graph = machines(number + 1, 1)
    receivers = [f"n[{i}]" for i in range(1, number + 1)]
    found = ends(graph, [(0.0, [flat(graph, "n[0]", receivers, size)])])
    assert found == pytest.approx([2e-6 + number * size / PORT], rel=1e-6)


@given(st.integers(1, 100))
def test_everyone_is_reached_once_by_one_who_was_reached_before(number: int) -> None:
    rounds, have = binomial([str(i) for i in range(number)]), {"0"}
    assert len(rounds) == math.ceil(math.log2(number))
    for hops in rounds:
        assert {here for here, _ in hops} <= have
        assert not {there for _, there in hops} & have
        have |= {there for _, there in hops}
    assert len(have) == number


@given(st.integers(2, 8), st.integers(1, 4), sizes)
def test_a_broadcast_brings_every_receiver_all_bytes(count: int, nics: int, size: float) -> None:
    graph = machines(count, 2, nics)
    receivers = [f"n[{i}]" for i in range(1, 2 * count)]
    for rounds in ((flat(graph, "n[0]", receivers, size),), tree(graph, "n[0]", receivers, size)):
        got = np.zeros(len(graph.capacity))
        for flows in rounds:
            for path, bytes_ in zip(flows.paths, flows.bytes, strict=True):
                got[path[path >= 0]] += bytes_
        assert [got[i] for name in receivers for i in graph.select("device", name)[1:]] == pytest.approx(
            [size] * len(receivers)
        )


def test_a_weight_sync_beside_a_gradient_sync_slows_both_down_and_no_more_than_one_after_the_other() -> None:
    graph = machines(4, 1)
    gradients, weights = ring(graph, [f"n[{i}]" for i in range(3)], 14e9), flat(graph, "n[0]", ["n[3]"], 14e9)
    alone = [ends(graph, [(0.0, [one])])[0] for one in (gradients, weights)]
    both = ends(graph, [(0.0, [gradients]), (0.0, [weights])])
    assert all(shared > single * 1.2 for shared, single in zip(both, alone, strict=True))
    assert max(both) <= sum(alone)


def test_traffic_of_other_machines_slows_nothing_down_unless_the_spine_is_narrow() -> None:
    def slower(over: float) -> float:
        graph = machines(4, 1, over=over)
        one, other = ring(graph, ["n[0]", "n[1]"], 1e9), ring(graph, ["n[2]", "n[3]"], 1e9)
        return ends(graph, [(0.0, [one]), (0.0, [other])])[0] / ends(graph, [(0.0, [one])])[0]

    assert slower(1.0) == pytest.approx(1.0)
    assert slower(4.0) == pytest.approx(2.0, rel=1e-3)


def test_a_ring_does_no_broadcast() -> None:
    with pytest.raises(ValueError, match="a ring does not do 'broadcast'; it does all_reduce"):
        ring(machines(2, 1), ["n[0]", "n[1]"], 1.0, "broadcast")


def test_between_two_devices_a_message_takes_the_closed_form() -> None:
    graph = machines(2, 2)
    assert ends(graph, [(0.0, [direct(graph, "n[0]", "n[3]", 1e9)])]) == pytest.approx([2e-6 + 1e9 / PORT])
