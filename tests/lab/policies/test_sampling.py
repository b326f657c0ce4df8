import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.policies.sampling import (
    SCHEDULES,
    Arms,
    EntropyBand,
    Slopes,
    Temperature,
    best_of,
    length_factor,
    mixture,
    shares,
    steered,
    temperature,
    thompson,
    ucb,
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


@given(st.floats(-1, 1), st.floats(0, 4))
def test_the_entropy_watch_acts_outside_its_band_only_and_within_its_limits(offset: float, entropy: float) -> None:
    rule = EntropyBand(low=0.5, high=2.0, change=0.1, most=0.3)
    found = steered(rule, offset, entropy)
    assert abs(found) <= rule.most
    if abs(offset) <= rule.most - rule.change:
        assert found - offset == pytest.approx(0.1 if entropy < 0.5 else -0.1 if entropy > 2 else 0.0)


def test_a_closed_loop_ends_in_the_band() -> None:
    rule, offset = EntropyBand(low=1.0, high=1.2, change=0.05, most=2.0), 0.0
    for _ in range(60):
        offset = steered(rule, offset, entropy=0.3 + 0.9 * offset)
    assert rule.low <= 0.3 + 0.9 * offset <= rule.high


def _played(rule: str, means: list[float], steps: int, seed: int) -> np.ndarray:
    """The shares of the last step of a bandit whose arms pay 1 with these chances, 64 samples a step."""
    arms, rng = Arms.untried(len(means)), np.random.default_rng(seed)
    found = np.empty(0)
    for _ in range(steps):
        found = shares(rule, arms, 0.05, seed, 64)
        chosen = mixture(found.tolist(), 64)
        arms = arms.with_rewards(chosen, rng.random(64) < np.array(means)[chosen], discount=0.9)
    return found


@pytest.mark.parametrize("rule", ["ucb", "thompson"])
@pytest.mark.parametrize("seed", range(3))
def test_a_bandit_finds_the_best_arm_and_keeps_trying_the_others(rule: str, seed: int) -> None:
    found = _played(rule, [0.2, 0.8, 0.4], 30, seed)
    assert found.sum() == pytest.approx(1.0)
    assert found.argmax() == 1
    assert found[1] > 0.6
    assert found.min() >= 0.05 - 1e-12


def test_ucb_is_the_formula_and_tries_every_arm_first() -> None:
    arms = Arms(num_tried=np.array([4.0, 0.0, 9.0]), total_reward=np.array([3.0, 0.0, 6.0]))
    assert ucb(arms) == 1
    arms = Arms(num_tried=np.array([4.0, 16.0]), total_reward=np.array([2.0, 12.0]))
    bounds = [2 / 4 + np.sqrt(2 * np.log(20) / 4), 12 / 16 + np.sqrt(2 * np.log(20) / 16)]
    assert ucb(arms) == int(np.argmax(bounds))


def test_thompson_shares_are_the_chance_to_be_best() -> None:
    """Of two arms with the posteriors Beta(3, 1) and Beta(1, 1): P(first is larger) = 3/4 (E of x under Beta(3, 1))."""
    arms = Arms(num_tried=np.array([2.0, 0.0]), total_reward=np.array([2.0, 0.0]))
    found = thompson(arms, seed=1, num_draws=20000)
    assert found[0] == pytest.approx(0.75, abs=0.01)
    assert np.array_equal(found, thompson(arms, seed=1, num_draws=20000))


def test_older_rewards_fade() -> None:
    arms = Arms.untried(2).with_rewards([0, 0, 1], [1, 0, 1]).with_rewards([1], [0.5], discount=0.5)
    assert arms.num_tried.tolist() == [1.0, 1.5]
    assert arms.total_reward.tolist() == [0.5, 1.0]
