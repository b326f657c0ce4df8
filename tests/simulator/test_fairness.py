"""Max–min fairness: textbook examples, its defining property, and the fill-up-together definition itself."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.fairness import Floats, fair_rates

Case = tuple[list[list[int]], list[float]]


def rates(paths: list[list[int]], capacity: list[float]) -> list[float]:
    """Of flows given as lists of links."""
    width = max((len(path) for path in paths), default=0)
    padded = np.array([path + [len(capacity)] * (width - len(path)) for path in paths], np.int32)
    return fair_rates(padded.reshape(len(paths), width), np.array([*capacity, np.inf])).tolist()


def filled(paths: list[list[int]], capacity: list[float]) -> list[float]:
    """The textbook: all rise together; who meets a full link stops."""
    level, found = 0.0, [0.0] * len(paths)
    rising = set(range(len(paths)))
    while rising:
        users = {link: [flow for flow in rising if link in paths[flow]] for link in range(len(capacity))}
        stopped = {link: sum(f for i, f in enumerate(found) if link in paths[i] and i not in rising) for link in users}
        room = {link: (capacity[link] - stopped[link]) / len(flows) for link, flows in users.items() if flows}
        level = min(room.values())
        full = {link for link, at in room.items() if at <= level * (1 + 1e-9) + 1e-15}
        for flow in [flow for flow in rising if set(paths[flow]) & full]:
            found[flow] = level
            rising.remove(flow)
    return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Flows over up to six links, of which some have equal capacity."""
    capacity = draw(st.lists(st.sampled_from([1.0, 2.0, 3.0, 7.5]) | st.floats(0.01, 100), min_size=1, max_size=6))
    one = st.lists(st.integers(0, len(capacity) - 1), min_size=1, max_size=4, unique=True)
    return draw(st.lists(one, min_size=1, max_size=12)), capacity


def used(paths: list[list[int]], found: list[float], link: int) -> float:
    return sum(rate for path, rate in zip(paths, found, strict=True) if link in path)


@pytest.mark.parametrize(
    ("paths", "capacity", "expected"),
    [
        # Bertsekas and Gallager's linear network: the long flow gets as much as each short one.
        ([[0, 1, 2], [0], [1], [2]], [1, 1, 1], [0.5, 0.5, 0.5, 0.5]),
        # A parking lot: flows that enter at each link and all leave at the last.
        ([[0, 1, 2], [1, 2], [2]], [1, 1, 1], [1 / 3, 1 / 3, 1 / 3]),
        # Three share the first link, and a fourth takes what one of them leaves of the second.
        ([[0], [0], [0, 1], [1]], [1, 1], [1 / 3, 1 / 3, 1 / 3, 2 / 3]),
        # Two levels: the second link binds first, and leaves room on the first.
        ([[0], [0, 1], [1]], [10, 4], [8, 2, 2]),
        # Three levels, one after the other.
        ([[0], [0, 1], [1, 2], [2]], [10, 5, 2], [6, 4, 1, 1]),
        ([[0]], [3], [3]),
        ([[0], [0]], [0], [0, 0]),
        ([], [1], []),
    ],
)
def test_known_graphs(paths: list[list[int]], capacity: list[float], expected: list[float]) -> None:
    assert rates(paths, capacity) == pytest.approx(expected)


@given(cases())
def test_it_is_what_filling_up_together_gives(case: Case) -> None:
    assert rates(*case) == pytest.approx(filled(*case), rel=1e-9)


@given(cases())
def test_no_link_is_above_its_capacity_and_every_flow_has_a_full_one_where_none_is_faster(case: Case) -> None:
    """The second half is the definition of max–min fairness by bottlenecks, and says that no capacity is wasted."""
    paths, capacity = case
    found = rates(*case)
    load = [used(paths, found, link) for link in range(len(capacity))]
    assert all(load[link] <= capacity[link] * (1 + 1e-9) for link in range(len(capacity)))
    for path, rate in zip(paths, found, strict=True):
        assert any(
            load[link] >= capacity[link] * (1 - 1e-9)
            and all(other <= rate * (1 + 1e-9) for way, other in zip(paths, found, strict=True) if link in way)
            for link in path
        )


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_flows_does_not_matter(case: Case, random: Random) -> None:
    paths, capacity = case
    order = list(range(len(paths)))
    random.shuffle(order)
    assert rates([paths[i] for i in order], capacity) == pytest.approx([rates(*case)[i] for i in order], rel=1e-12)


@given(cases(), st.floats(0.1, 10))
def test_rates_scale_with_the_capacities(case: Case, scale: float) -> None:
    paths, capacity = case
    assert rates(paths, [scale * each for each in capacity]) == pytest.approx([scale * each for each in rates(*case)])


@given(cases())
def test_one_more_flow_never_makes_the_others_better_off(case: Case) -> None:
    """In the order that max–min fairness maximises: rates from the least up, compared at the first that differs."""
    paths, capacity = case
    before, after = sorted(rates(paths[:-1], capacity)), sorted(rates(paths, capacity)[:-1])
    first = next(((a, b) for a, b in zip(after, before, strict=True) if abs(a - b) > 1e-9 * b), (0.0, 0.0))
    assert first[0] <= first[1]


def test_a_single_flow_may_gain_from_one_more() -> None:
    """What slows another flow down leaves it more; so the law above cannot be one of each flow alone."""
    assert rates([[0, 1], [1]], [6, 10]) == [5, 5]
    assert rates([[0, 1], [1], [0]], [6, 10]) == [3, 7, 3]


@given(st.floats(0.1, 9), st.integers(1, 9))
def test_on_one_link_all_get_the_same_and_everybody_loses_by_one_more(capacity: float, number: int) -> None:
    assert rates([[0]] * number, [capacity]) == pytest.approx([capacity / number] * number)


def test_flows_on_no_finite_link_are_infinitely_fast() -> None:
    assert rates([[], [0]], [2.0]) == [np.inf, 2.0]


@given(cases())
def test_compiled_and_plain_agree(case: Case) -> None:
    paths, capacity = case
    width = max(map(len, paths))
    padded = np.array([path + [len(capacity)] * (width - len(path)) for path in paths], np.int32)
    whole: Floats = np.array([*capacity, np.inf])
    assert fair_rates.py_func(padded, whole).tolist() == fair_rates(padded, whole).tolist()
