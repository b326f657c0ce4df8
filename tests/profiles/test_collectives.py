"""Collectives as laws: closed forms, sums of their halves, growth with bytes, and the worth of staging."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.collectives import ALGORITHMS, Group, Wire, seconds, times

SIZES = st.floats(1.0, 1e12)
FAST, SLOW = Wire(300e9, 2e-6), Wire(25e9, 3e-6)


@st.composite
def groups(draw: st.DrawFn, *, machines: int = 8) -> Group:
    """Any even group over at most so many machines, the inner link never slower than the outer."""
    inter = Wire(draw(st.floats(1e8, 1e11)), draw(st.floats(1e-6, 1e-3)))
    intra = Wire(inter.bandwidth * draw(st.floats(1, 50)), inter.latency * draw(st.floats(0.1, 1)))
    per_machine = draw(st.integers(1, 8))
    return Group(ranks=per_machine * draw(st.integers(1, machines)), per_machine=per_machine, intra=intra, inter=inter)


def one_machine(ranks: int, wire: Wire = FAST) -> Group:
    return Group(ranks=ranks, per_machine=ranks, intra=wire, inter=SLOW)


@given(SIZES, groups())
def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather(size: float, group: Group) -> None:
    if group.ranks > 1:
        halves = [times(op, size, group)["ring"] for op in ("reduce_scatter", "all_gather")]
        assert times("all_reduce", size, group)["ring"] == pytest.approx(sum(halves))


def test_a_ring_sends_its_closed_form_of_bytes() -> None:
    group = one_machine(8)
    assert seconds("all_reduce", 8e9, group, "ring") == pytest.approx(2 * (7 * 2e-6 + 7 / 8 * 8e9 / 300e9))
    assert seconds("all_reduce", 8e9, group, "tree") == pytest.approx(2 * (3 * 2e-6 + 8e9 / 300e9))


def test_small_messages_go_by_tree_and_large_ones_by_ring() -> None:
    group = one_machine(8)
    for size, best in ((1e3, "tree"), (1e10, "ring")):
        offered = times("all_reduce", size, group)
        assert min(offered, key=lambda name: offered[name]) == best


@pytest.mark.parametrize("op", ALGORITHMS)
@given(size=SIZES, factor=st.floats(1, 100), group=groups())
def test_more_bytes_never_take_less_time(op: str, size: float, factor: float, group: Group) -> None:
    if group.ranks > 1:
        small, large = times(op, size, group), times(op, size * factor, group)
        assert all(large[name] >= small[name] * (1 - 1e-12) for name in small)
    assert seconds(op, factor * size, group) >= seconds(op, size, group) * (1 - 1e-12)


@given(SIZES, groups())
def test_staging_is_worth_it_where_the_inner_link_is_faster_by_the_number_of_machines(
    size: float, group: Group
) -> None:
    """2(r-1)/r·S/b + 2(m-1)/m·S/B <= 2(n-1)/n·S/B exactly where b >= m·B; the latencies are never more."""
    if 1 < group.per_machine < group.ranks and group.intra.bandwidth >= group.machines * group.inter.bandwidth:
        offered = times("all_reduce", size, group)
        assert offered["hierarchical"] <= offered["ring"] * (1 + 1e-12)


@given(SIZES, groups())
def test_the_best_is_no_slower_than_the_flat_ring(size: float, group: Group) -> None:
    for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        if group.ranks > 1:
            assert seconds(op, size, group) <= times(op, size, group)["ring"]


@given(SIZES, st.integers(1, 8))
def test_no_time_beats_the_wire(size: float, ranks: int) -> None:
    """A rank must at least receive what it lacks."""
    group = one_machine(ranks)
    least = {"all_gather": (ranks - 1) / ranks, "all_to_all": (ranks - 1) / ranks, "broadcast": float(ranks > 1)}
    for op, share in least.items():
        assert seconds(op, size, group) >= share * size / FAST.bandwidth


@pytest.mark.parametrize("op", ALGORITHMS)
def test_one_rank_and_no_bytes_cost_nothing(op: str) -> None:
    assert seconds(op, 1e9, one_machine(1)) == 0.0
    assert seconds(op, 0.0, one_machine(4)) == 0.0


def test_the_best_chain_of_pieces_is_the_least_over_all_piece_counts() -> None:
    size, group = 1e8, one_machine(6, SLOW)
    counts = [(6 - 2 + k) * (SLOW.latency + size / k / SLOW.bandwidth) for k in range(1, 400)]
    assert seconds("broadcast", size, group, "ring") == pytest.approx(min(counts), rel=1e-4)


def test_what_ranks_of_a_machine_send_out_shares_its_port() -> None:
    group = Group(ranks=16, per_machine=8, intra=FAST, inter=SLOW)
    assert seconds("all_to_all", 1e9, group) >= 8 * 8 / 16 * 1e9 / SLOW.bandwidth


def test_uneven_machines_are_served_by_flat_algorithms() -> None:
    group = Group(ranks=6, per_machine=4, intra=FAST, inter=SLOW)
    assert group.machines == 2 and set(times("all_reduce", 1e6, group)) == {"ring", "tree"}


def test_what_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no collective 'gather'"):
        seconds("gather", 1.0, one_machine(2))
    with pytest.raises(ValueError, match="hierarchical"):
        seconds("all_reduce", 1.0, one_machine(2), "hierarchical")
    with pytest.raises(ValueError, match="0 ranks"):
        Group(ranks=2, per_machine=0, intra=FAST, inter=SLOW)
