import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.policies.learning_rate import SHAPES, learning_rate

schedules = st.sampled_from(sorted(SHAPES))


@given(schedules, st.integers(1, 50), st.integers(0, 60), st.integers(0, 200))
def test_the_rate_never_leaves_its_range_and_is_full_once(schedule: str, total: int, warmup: int, update: int) -> None:
    rate = learning_rate(2.0, schedule, update, total, warmup)
    assert 0 < rate <= 2.0 + 1e-12
    if update < warmup:
        assert rate == pytest.approx(2.0 * (update + 1) / warmup)
    if update == warmup:
        assert rate == pytest.approx(2.0)


@given(schedules, st.integers(2, 50), st.integers(0, 20))
def test_it_does_not_rise_after_the_warm_up(schedule: str, total: int, warmup: int) -> None:
    rates = [
        learning_rate(1.0, schedule, update, warmup + total, warmup) for update in range(warmup, warmup + total + 9)
    ]
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates))
    assert rates[-1] == rates[total - 1], "it stays where it was at the last step"


def test_shapes_against_their_closed_forms() -> None:
    for update in range(10):
        assert learning_rate(3.0, "constant", update, 10) == 3.0
        assert learning_rate(3.0, "linear", update, 10) == pytest.approx(3.0 * (10 - update) / 10)
        assert learning_rate(3.0, "cosine", update, 10) == pytest.approx(1.5 * (1 + math.cos(math.pi * update / 10)))
