from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from executor.algorithms.advantages import (
    ADVANTAGES,
    generalised,
    joined,
    normalised_within,
    padded,
    token_rewards,
    unpadded,
)
from executor.experience import Samples
from lab.algorithm import Dpo, Grpo, Ppo

NUMBERS = st.floats(-5, 5, width=32)
RAGGED = st.lists(st.integers(1, 12), min_size=1, max_size=6).flatmap(
    lambda lengths: st.tuples(*[st.tuples(*[arrays(np.float32, n, elements=NUMBERS) for n in lengths])] * 2)
)
"""two columns of the same samples, each a row per sample"""
Columns = tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]


def samples(rewards: list[float], per_prompt: int = 2, tokens: int = 4) -> Samples:
    number = len(rewards)
    return Samples(
        step=0, policy_version=0, prompts=np.arange(number) // per_prompt, num_prompt_tokens=np.full(number, 3),
        tokens=[np.arange(3 + tokens) for _ in rewards], logprobs=[np.full(tokens, -1.0, np.float32) for _ in rewards],
        columns={"rewards": np.asarray(rewards)},
    )  # fmt: skip


def one_by_one(rewards: Any, values: Any, gamma: float, lam: float) -> list[float]:
    """Equation 16 of Schulman et al. 2016 as a recursion from the last token."""
    found, after, value_after = [], 0.0, 0.0
    for reward, value in zip(reversed(list(map(float, rewards))), reversed(list(map(float, values))), strict=True):
        after = reward + gamma * value_after - value + gamma * lam * after
        value_after = value
        found.append(after)
    return found[::-1]


@given(RAGGED, st.floats(0.5, 1), st.floats(0, 1))
def test_a_batch_has_the_advantages_of_each_response_on_its_own(columns: Columns, gamma: float, lam: float) -> None:
    rewards, values = columns
    advantages, returns = generalised(padded(rewards), padded(values), gamma, lam)
    for i, (ours, value) in enumerate(zip(unpadded(advantages, rewards), values, strict=True)):
        assert ours == pytest.approx(one_by_one(rewards[i], value, gamma, lam), abs=1e-4)
        assert unpadded(returns, rewards)[i] == pytest.approx(ours + value, abs=1e-4)


@given(RAGGED, st.floats(0.5, 1))
def test_with_lambda_1_the_return_is_the_discounted_sum_of_rewards(columns: Columns, gamma: float) -> None:
    rewards, values = columns
    _, returns = generalised(padded(rewards), padded(values), gamma, 1.0)
    for row, found in zip(rewards, unpadded(returns, rewards), strict=True):
        expected = [sum(gamma ** (u - t) * float(row[u]) for u in range(t, len(row))) for t in range(len(row))]
        assert found == pytest.approx(expected, abs=1e-3)


@given(RAGGED)
def test_rows_come_back_from_an_array_as_they_were(columns: Columns) -> None:
    for row, back in zip(columns[0], unpadded(padded(columns[0]), columns[0]), strict=True):
        assert np.array_equal(row, back)


@given(arrays(np.float64, (5, 4), elements=st.floats(-10, 10)))
def test_grouped_advantages_have_mean_0_and_deviation_at_most_1_within_each_prompt(rewards: np.ndarray) -> None:
    found = normalised_within(rewards.ravel(), np.repeat(np.arange(5), 4)).reshape(5, 4)
    assert np.abs(found.mean(1)).max() < 1e-6
    assert (found.std(1) <= 1 + 1e-9).all()
    assert (found.std(1) > 0.9)[rewards.std(1) > 1e-4].all()


@given(arrays(np.float64, 7, elements=st.floats(-10, 10)), st.permutations([0, 0, 1, 1, 1, 4, 4]))
def test_grouped_advantages_do_not_depend_on_where_a_prompt_s_samples_stand(
    rewards: np.ndarray, ids: list[int]
) -> None:
    prompts = np.asarray(ids)
    found = normalised_within(rewards, prompts)
    for prompt in (0, 1, 4):
        mine = rewards[prompts == prompt]
        expected = (mine - mine.mean()) / (mine.std() + 1e-6)
        assert found[prompts == prompt] == pytest.approx(expected, abs=1e-6, rel=1e-4)


@given(arrays(np.float64, 6, elements=st.floats(0, 1)), st.floats(0.5, 3), st.floats(-5, 5))
def test_grouped_advantages_ignore_scale_and_shift(rewards: np.ndarray, scale: float, shift: float) -> None:
    prompts = np.asarray([0, 0, 0, 1, 1, 1])
    if min(rewards[:3].std(), rewards[3:].std()) > 1e-2:
        one, two = normalised_within(rewards, prompts), normalised_within(scale * rewards + shift, prompts)
        assert one == pytest.approx(two, abs=1e-2)


def test_equal_rewards_teach_nothing() -> None:
    assert not normalised_within(np.asarray([0.5, 0.5, 1.0, 1.0]), np.asarray([0, 0, 1, 1])).any()


@given(RAGGED, st.floats(-2, 2), st.floats(0, 1))
def test_token_rewards_add_up_to_the_reward_minus_the_divergence(columns: Columns, reward: float, beta: float) -> None:
    logprobs, reference = columns
    rewards = reward + np.arange(len(logprobs))
    with_reference = unpadded(token_rewards(rewards, logprobs, reference, beta), logprobs)
    alone = unpadded(token_rewards(rewards, logprobs, None, beta), logprobs)
    for i, (policy, other) in enumerate(zip(logprobs, reference, strict=True)):
        assert with_reference[i].sum() == pytest.approx(rewards[i] - beta * float((policy - other).sum()), abs=1e-2)
        assert with_reference[i][:-1] == pytest.approx(-beta * (policy - other)[:-1], abs=1e-5)
        assert alone[i].tolist() == [0.0] * (len(policy) - 1) + [pytest.approx(rewards[i], abs=1e-5)]


def test_grpo_gives_every_token_its_sample_s_advantage() -> None:
    batch = ADVANTAGES["grpo"](samples([0.0, 1.0, 1.0, 0.0]), Grpo(name="grpo"))
    assert [row.tolist() for row in batch.columns["advantages"]] == [
        [pytest.approx(sign, abs=1e-4)] * 4 for sign in (-1, 1, 1, -1)
    ]


def of_ppo(seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    given_ = samples([0.1, 0.9, 0.3, 0.5])
    values = [rng.normal(size=4).astype(np.float32) for _ in range(4)]
    return given_.with_columns(values=values, reference_logprobs=[row - 0.1 for row in given_.logprobs])


def test_ppo_whitens_over_all_tokens() -> None:
    batch = ADVANTAGES["ppo"](of_ppo(), Ppo(name="ppo"))
    every = np.concatenate(batch.columns["advantages"])
    assert (every.mean(), every.std()) == (pytest.approx(0, abs=1e-5), pytest.approx(1, abs=1e-4))
    assert [len(row) for row in batch.columns["returns"]] == [4] * 4


def test_ppo_takes_recomputed_log_probs_for_the_policy_s() -> None:
    algorithm = Ppo(name="ppo", kl_coef=0.5, lam=1.0)
    plain, moved = of_ppo(), [row + 0.3 for row in of_ppo().logprobs]
    found = ADVANTAGES["ppo"](plain.with_columns(old_logprobs=moved), algorithm).columns["returns"]
    before = ADVANTAGES["ppo"](plain, algorithm).columns["returns"]
    for one, two in zip(found, before, strict=True):  # 0.5 × 0.3 less at each of the tokens that are left
        assert two - one == pytest.approx([0.6, 0.45, 0.3, 0.15], abs=1e-5)


def test_a_reward_puts_pairs_in_order_and_ties_weigh_nothing() -> None:
    given_ = samples([0.1, 0.9, 0.7, 0.2, 0.5, 0.5])
    batch = ADVANTAGES["dpo"](given_.with_columns(reference_logprobs=list(given_.logprobs)), Dpo(name="dpo"))
    assert batch.columns["rewards"].tolist() == [0.9, 0.1, 0.7, 0.2, 0.5, 0.5]
    assert batch.columns["weights"].tolist() == [1, 1, 1, 1, 0, 0]
    assert batch.indices.tolist() == [1, 0, 0, 1, 0, 1]
    assert batch.prompts.tolist() == [0, 0, 1, 1, 2, 2]


def test_rows_of_several_ranks_are_put_in_the_order_of_samples() -> None:
    columns = [{"values": {1: "b", 3: "d"}}, {"rewards": [1]}, {"values": {0: "a", 2: "c"}}]
    assert joined(columns, 4) == {"rewards": [1], "values": ["a", "b", "c", "d"]}
    assert joined([*columns, {"old_logprobs": {3: 3, 2: 2, 1: 1, 0: 0}}], 4)["old_logprobs"] == [0, 1, 2, 3]
    assert joined(columns[1:2], 4) == {"rewards": [1]}
