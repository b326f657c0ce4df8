import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from executor.algorithms.advantages import ADVANTAGES, generalised, joined, normalised_within, token_rewards
from executor.experience import Samples
from lab.algorithm import Grpo, Ppo

NUMBERS = st.floats(-5, 5, width=32)
ROWS = st.integers(1, 30).flatmap(lambda n: st.tuples(*[arrays(np.float32, n, elements=NUMBERS)] * 2))


def samples(rewards: list[float], per_prompt: int = 2, tokens: int = 4) -> Samples:
    number = len(rewards)
    return Samples(
        step=0, policy_version=0, prompts=np.arange(number) // per_prompt, num_prompt_tokens=np.full(number, 3),
        tokens=[np.arange(3 + tokens) for _ in rewards], logprobs=[np.full(tokens, -1.0, np.float32) for _ in rewards],
        columns={"rewards": np.asarray(rewards)},
    )  # fmt: skip


@given(arrays(np.float64, (5, 4), elements=st.floats(-10, 10)))
def test_grouped_advantages_have_mean_0_and_deviation_at_most_1_within_each_prompt(rewards: np.ndarray) -> None:
    found = normalised_within(rewards.ravel(), np.repeat(np.arange(5), 4)).reshape(5, 4)
    assert np.abs(found.mean(1)).max() < 1e-6
    assert (found.std(1) <= 1 + 1e-9).all()
    assert (found.std(1) > 0.9)[rewards.std(1) > 1e-4].all()


@given(arrays(np.float64, 6, elements=st.floats(0, 1)), st.floats(0.5, 3), st.floats(-5, 5))
def test_grouped_advantages_ignore_scale_and_shift(rewards: np.ndarray, scale: float, shift: float) -> None:
    prompts = np.asarray([0, 0, 0, 1, 1, 1])
    if min(rewards[:3].std(), rewards[3:].std()) > 1e-2:
        one, two = normalised_within(rewards, prompts), normalised_within(scale * rewards + shift, prompts)
        assert one == pytest.approx(two, abs=1e-2)


def test_equal_rewards_teach_nothing() -> None:
    assert not normalised_within(np.asarray([0.5, 0.5, 1.0, 1.0]), np.asarray([0, 0, 1, 1])).any()


@given(ROWS, st.floats(0.5, 1))
def test_with_lambda_1_the_return_is_the_discounted_sum_of_rewards(
    rows: tuple[np.ndarray, np.ndarray], gamma: float
) -> None:
    rewards, values = rows
    advantages, returns = generalised(rewards, values, gamma, 1.0)
    expected = [sum(gamma ** (u - t) * rewards[u] for u in range(t, len(rewards))) for t in range(len(rewards))]
    assert returns == pytest.approx(np.asarray(expected), abs=1e-3)
    assert advantages == pytest.approx(returns - values, abs=1e-4)


@given(ROWS, st.floats(0.5, 1))
def test_with_lambda_0_the_advantage_is_the_temporal_difference(
    rows: tuple[np.ndarray, np.ndarray], gamma: float
) -> None:
    rewards, values = rows
    advantages, _ = generalised(rewards, values, gamma, 0.0)
    assert advantages == pytest.approx(rewards + gamma * np.append(values[1:], 0.0) - values, abs=1e-4)


@given(ROWS, st.floats(-2, 2), st.floats(0, 1))
def test_token_rewards_add_up_to_the_reward_minus_the_divergence(
    rows: tuple[np.ndarray, np.ndarray], reward: float, kl_coef: float
) -> None:
    logprobs, reference = rows
    total = token_rewards(reward, logprobs, reference, kl_coef).sum()
    assert total == pytest.approx(reward - kl_coef * float((logprobs - reference).sum()), abs=1e-2)
    assert token_rewards(reward, logprobs, None, kl_coef).tolist() == [0.0] * (len(logprobs) - 1) + [
        pytest.approx(reward)
    ]


def test_grpo_gives_every_token_its_sample_s_advantage() -> None:
    batch = ADVANTAGES["grpo"](samples([0.0, 1.0, 1.0, 0.0]), Grpo(name="grpo"))
    assert [row.tolist() for row in batch.columns["advantages"]] == [
        [pytest.approx(sign, abs=1e-4)] * 4 for sign in (-1, 1, 1, -1)
    ]


def test_ppo_whitens_over_all_tokens() -> None:
    rng = np.random.default_rng(0)
    given_ = samples([0.1, 0.9, 0.3, 0.5])
    values = [rng.normal(size=4).astype(np.float32) for _ in range(4)]
    references = [row - 0.1 for row in given_.logprobs]
    batch = ADVANTAGES["ppo"](given_.with_columns(values=values, reference_logprobs=references), Ppo(name="ppo"))
    every = np.concatenate(batch.columns["advantages"])
    assert (every.mean(), every.std()) == (pytest.approx(0, abs=1e-5), pytest.approx(1, abs=1e-4))
    assert [len(row) for row in batch.columns["returns"]] == [4] * 4


def test_values_of_several_ranks_are_put_in_the_order_of_samples() -> None:
    columns = [{"values": {1: "b", 3: "d"}}, {"rewards": [1]}, {"values": {0: "a", 2: "c"}}]
    assert joined(columns, 4) == {"rewards": [1], "values": ["a", "b", "c", "d"]}
    assert joined(columns[1:2], 4) == {"rewards": [1]}
