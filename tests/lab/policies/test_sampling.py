import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.policies.sampling import (
    SCHEDULES,
    Slopes,
    Temperature,
    best_of,
    length_factor,
    mixture,
    temperature,
)


@pytest.mark.parametrize("name", SCHEDULES)
@given(st.floats(0.1, 2), st.floats(0.1, 2), st.integers(1, 200))
def test_temperature_is_monotone_between_its_ends(name: str, start: float, end: float, steps: int) -> None:
    rule = Temperature(start=start, end=end, schedule=name)
    found = np.array([temperature(rule, step, steps) for step in range(steps)])
    assert found[0] == start
    assert (np.diff(found) * np.sign(end - start) >= -1e-12).all()
    assert steps == 1 or found[-1] == pytest.approx(start if name == "constant" else end)


def test_halfway_down_is_halfway() -> None:
    for name in ("linear", "cosine"):
        assert temperature(Temperature(start=1.0, end=0.7, schedule=name), 10, 21) == pytest.approx(0.85)
    assert temperature(Temperature(start=1.0, end=0.7, schedule="cosine"), 2, 21) > 0.99


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=6), st.integers(0, 300))
def test_a_mixture_is_within_one_of_its_shares(shares: list[float], num: int) -> None:
    arms = mixture(shares, num)
    counts = np.bincount(arms, minlength=len(shares))
    assert len(arms) == num
    assert np.abs(counts - np.array(shares) / sum(shares) * num).max() <= 1 + 1e-6


@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=8))
def test_the_best_of_n_is_beaten_by_none_and_is_the_first(rewards: list[list[int]]) -> None:
    assert best_of(rewards).tolist() == [row.index(max(row)) for row in rewards]


@given(st.floats(-2, 2), st.floats(0.1, 3), st.floats(0.1, 3))
def test_the_length_factor_is_one_at_one_and_multiplies_along_its_slope(
    slope: float, first: float, second: float
) -> None:
    slopes = Slopes(temperature=slope)
    assert length_factor(slopes, 1.0) == pytest.approx(1.0)
    both = length_factor(slopes, [first, second, first + second - 1])
    assert both[0] * both[1] == pytest.approx(both[2])


def test_settings_multiply_and_measured_points_replace_the_slope() -> None:
    slopes = Slopes(temperature=9.0, top_p=1.0, repetition_penalty=-2.0, temperatures=(0.5, 1.5), factors=(1.0, 3.0))
    found = length_factor(slopes, [0.1, 1.0, 2.0], top_p=0.8, repetition_penalty=1.1)
    assert found == pytest.approx(np.array([1.0, 2.0, 3.0]) * np.exp(-0.2 - 0.2))
