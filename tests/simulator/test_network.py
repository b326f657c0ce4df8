"""Flows in time: what one takes alone, how several slow each other down, and that no byte is lost."""

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from simulator.network import Flow, Flows, Network
from simulator.traffic import direct, ring
from tests.networks import ends, nodes, site, topology

GRAPH = topology(site(nodes(), nodes("m", 2, 2)))
DEVICES = [f"n[{i}]" for i in range(8)] + [f"m[{i}]" for i in range(4)]
PORT = 0.8 * 25e9
LATENCY = 2e-6
"""of NVLink, more than the port has"""
transfers = st.lists(
    st.tuples(st.floats(0, 2), st.sampled_from(DEVICES), st.sampled_from(DEVICES), st.floats(1e6, 1e11)),
    min_size=1,
    max_size=10,
)
Transfers = list[tuple[float, str, str, float]]


def arrivals(sent: Transfers) -> list[float]:
    return ends(GRAPH, [(start, [direct(GRAPH, a, b, size)]) for start, a, b, size in sent])


@given(st.sampled_from(DEVICES), st.sampled_from(DEVICES), st.floats(0, 1e13), st.floats(0, 1e6))
def test_alone_a_flow_takes_its_latency_and_its_bytes_at_the_narrowest_link(
    a: str, b: str, size: float, start: float
) -> None:
    path = GRAPH.between(a, b)
    narrowest = min((GRAPH.capacity[link] for link in path.links), default=np.inf)
    assert arrivals([(start, a, b, size)]) == pytest.approx([start + path.latency + size / narrowest], rel=1e-9)


def test_by_hand() -> None:
    """Two flows share a port for a second each has half of; then the longer goes on alone."""
    sent = [(0.0, "n[0]", "n[2]", PORT / 2), (0.0, "n[1]", "n[4]", PORT)]
    assert arrivals(sent) == pytest.approx([1 + LATENCY, 1.5 + LATENCY])


def test_one_that_starts_later_takes_half_from_then_on() -> None:
    sent = [(0.0, "n[0]", "n[2]", PORT), (0.5, "n[1]", "n[4]", PORT)]
    assert arrivals(sent) == pytest.approx([1.5 + LATENCY, 2.0 + LATENCY])


def test_opposite_directions_do_not_meet() -> None:
    sent = [(0.0, "n[0]", "n[2]", PORT), (0.0, "n[2]", "n[0]", PORT)]
    assert arrivals(sent) == pytest.approx([1 + LATENCY] * 2)


@given(transfers)
def test_nobody_is_faster_than_alone_and_every_link_needs_its_time(sent: Transfers) -> None:
    found = arrivals(sent)
    need, first = np.zeros(len(GRAPH.capacity)), min(start for start, *_ in sent)
    for end, one in zip(found, sent, strict=True):
        assert end >= arrivals([one])[0] * (1 - 1e-9)
        need[list(GRAPH.between(one[1], one[2]).links)] += one[3]
    assert max(found) >= first + (need / GRAPH.capacity).max() - 1e-6


@given(transfers)
def test_bytes_are_conserved_and_no_link_is_ever_above_its_capacity(sent: Transfers) -> None:
    env, expected = simpy.Environment(), np.zeros(len(GRAPH.links))
    network = Network(env, GRAPH)

    def run(start: float, a: str, b: str, size: float):
        yield env.timeout(start)
        yield from network.send_all(direct(GRAPH, a, b, size))

    for start, a, b, size in sent:
        env.process(run(start, a, b, size))
        expected[list(GRAPH.between(a, b).links)] += size
    while env.peek() < np.inf:
        env.step()
        assert (network.load() <= GRAPH.capacity[:-1] * (1 + 1e-9)).all()
    assert network.carried() == pytest.approx(expected, rel=1e-6, abs=1)


@given(st.lists(st.floats(1e6, 1e11), min_size=1, max_size=8))
def test_flows_over_one_port_end_at_the_closed_form_and_one_more_speeds_up_none(sizes: list[float]) -> None:
    """Egalitarian sharing: the k-th smallest of n ends after the smaller ones and (n - k + 1) times its rest."""
    expected, done, before = {}, 0.0, 0.0
    for rank, i in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        done += (sizes[i] - before) * (len(sizes) - rank) / PORT
        expected[i], before = done + LATENCY, sizes[i]
    found = arrivals([(0.0, "n[0]", "n[2]", size) for size in sizes])
    assert found == pytest.approx([expected[i] for i in range(len(sizes))])
    more = arrivals([(0.0, "n[0]", "n[2]", size) for size in [*sizes, 1e9]])
    assert all(late >= soon * (1 - 1e-9) for late, soon in zip(more, found, strict=False))


def test_a_checkpoint_and_a_gradient_sync_slow_each_other_down_at_the_port_they_share() -> None:
    graph = topology(site(nodes(count=2, devices=1), storage={"write": "15 GB/s"}))
    gradients = ring(graph, ["n[0]", "n[1]"], PORT)
    state = Flows.of([Flow(path=graph.to_storage("n[0]"), bytes=PORT / 2)])
    alone = [ends(graph, [(0.0, [one])])[0] for one in (gradients, state)]
    assert alone == pytest.approx([1.0 + 2 * LATENCY, PORT / 2 / 15e9], rel=1e-5)
    assert ends(graph, [(0.0, [gradients]), (0.0, [state])]) == pytest.approx([1.5, 1.0], rel=1e-4)


@given(st.floats(0.1, 1), st.floats(0, 1), st.floats(0, 3))
def test_a_degraded_link_is_slow_for_as_long_as_it_is(factor: float, start: float, lasting: float) -> None:
    env, found = simpy.Environment(), list[float]()
    network = Network(env, GRAPH)

    def fault():
        yield env.timeout(start)
        network.degrade(GRAPH.select("port", "n/0"), factor)
        yield env.timeout(lasting)
        network.degrade(GRAPH.select("port", "n/0"), 1)

    def run():
        yield from network.send(Flow(path=GRAPH.between("n[0]", "n[2]"), bytes=PORT))
        found.append(env.now - LATENCY)

    env.process(run())
    env.process(fault())
    env.run()
    missed = min(lasting * (1 - factor), (1 - start) * (1 / factor - 1))
    assert found == pytest.approx([1 + missed], abs=1e-5)


def test_a_cut_link_holds_its_flows_until_it_is_repaired() -> None:
    env = simpy.Environment()
    network = Network(env, GRAPH)
    network.degrade(GRAPH.select("spine"), 0)
    sending = env.process(network.send(Flow(path=GRAPH.between("n[0]", "n[2]"), bytes=1.0)))
    env.run(until=100)
    assert network.num_flows == 1
    assert sending.is_alive
    network.degrade(GRAPH.select("spine"), 1)
    env.run()
    assert not sending.is_alive


@pytest.mark.parametrize("factor", [-0.1, 1.1])
def test_a_link_is_not_degraded_to_less_than_nothing_or_more_than_itself(factor: float) -> None:
    with pytest.raises(ValueError, match="give a factor from 0 to 1"):
        Network(simpy.Environment(), GRAPH).degrade([0], factor)


def test_who_is_interrupted_takes_its_flows_away() -> None:
    env, found = simpy.Environment(), list[float]()
    network = Network(env, GRAPH)

    def lost():
        try:
            yield from network.send_all(direct(GRAPH, "n[0]", "n[2]", 1e15))
        except simpy.Interrupt:
            found.append(env.now)

    def other():
        yield from network.send_all(direct(GRAPH, "n[1]", "n[4]", PORT))
        found.append(env.now)

    victim = env.process(lost())
    env.process(other())
    env.run(until=1.0)
    victim.interrupt()
    env.run()
    assert found == pytest.approx([1.0, 1.5 + LATENCY], rel=1e-5)


@pytest.mark.parametrize("late", [1e4, 1e6, 1e8])
def test_flows_end_however_late_the_clock(late: float) -> None:
    found = arrivals([(late + 0.0007 * i, "n[0]", "n[2]", PORT * 0.0011 * (1 + 0.01 * i)) for i in range(50)])
    total = sum(0.0011 * (1 + 0.01 * i) for i in range(50))
    assert max(found) == pytest.approx(late + total, abs=1e-4)


def test_nothing_to_send_takes_no_time_and_nobody_is_nowhere() -> None:
    assert ends(GRAPH, [(1.0, []), (2.0, [Flows.of([])]), (3.0, [direct(GRAPH, "n[0]", "n[0]", 1e9)])]) == [1, 2, 3]
    with pytest.raises(ValueError, match="no device or machine 'x\\[0\\]'"):
        GRAPH.between("n[0]", "x[0]")
