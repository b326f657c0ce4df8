import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.policies.sampling import (
    SCHEDULES,
    Arms,
    EntropyBand,
    Temperature,
    best_of,
    mixture,
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


@given(st.floats(0.6, 1.2), st.floats(0, 5))
def test_low_entropy_warms_and_high_entropy_cools_within_limits(current: float, entropy: float) -> None:
    rule = EntropyBand()
    after = steered(rule, current, entropy)
    assert rule.lowest <= after <= rule.highest
    assert (after >= current) if entropy < rule.low else (after <= current)


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=6), st.integers(0, 300))
def test_a_mixture_is_within_one_of_its_shares(shares: list[float], num: int) -> None:
    arms = mixture(shares, num)
    counts = np.bincount(arms, minlength=len(shares))
    assert len(arms) == num
    assert np.abs(counts - np.array(shares) / sum(shares) * num).max() <= 1 + 1e-6


def test_a_mixture_is_interleaved() -> None:
    assert mixture([1, 1], 6).tolist() == [0, 1, 0, 1, 0, 1]


def chosen(rule: str, worth: list[float], num: int, seed: int) -> np.ndarray:
    """How often each arm of these mean rewards is chosen."""
    arms, rng = Arms.untried(len(worth)), np.random.default_rng(seed)
    for _ in range(num):
        arm = ucb(arms) if rule == "ucb" else thompson(arms, seed)
        arms = arms.with_rewards([arm], [float(rng.random() < worth[arm])])
    return arms.num_tried


@pytest.mark.parametrize("rule", ["ucb", "thompson"])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_arm_is_chosen_most_and_every_arm_is_tried(rule: str, seed: int) -> None:
    tried = chosen(rule, [0.2, 0.9, 0.3], 600, seed)
    assert tried.argmax() == 1 and tried[1] > 400 and (tried > 0).all()


def test_a_choice_is_repeatable() -> None:
    arms = Arms(num_tried=np.array([5, 5]), total_reward=np.array([2.0, 3.0]))
    assert len({thompson(arms, 7) for _ in range(5)}) == 1
    assert {thompson(arms, seed) for seed in range(60)} == {0, 1}


@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=8))
def test_the_best_of_n_is_beaten_by_none_and_is_the_first(rewards: list[list[int]]) -> None:
    assert best_of(rewards).tolist() == [row.index(max(row)) for row in rewards]
