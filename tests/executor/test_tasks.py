import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.tasks import ECHO_CHARACTERS, TASKS
from executor.tokenizer import IDS, encode

ECHO = TASKS["echo"]
NAMED = [IDS[character] for character in ECHO_CHARACTERS]


@given(seed=st.integers(0, 99), step=st.integers(0, 999), prompt=st.integers(0, 999), n=st.integers(1, 300))
def test_prompts_have_the_asked_length_and_end_with_a_named_character(
    seed: int, step: int, prompt: int, n: int
) -> None:
    ids = ECHO.prompt(seed, step, prompt, n)
    assert len(ids) == n
    assert ids[-1] in NAMED
    assert all(0 <= token < 64 for token in ids)
    assert ids == ECHO.prompt(seed, step, prompt, n)


@given(n=st.integers(1, 64), prompt=st.integers(0, 99))
def test_repeating_the_named_character_is_the_best_response(n: int, prompt: int) -> None:
    ids = ECHO.prompt(0, 0, prompt, 12)
    assert ECHO.reward(ids, [ids[-1]] * n) == 1.0
    assert ECHO.reward(ids, [ids[-1], *encode("?" * n)]) == pytest.approx(1 / (n + 1))


def expected_rewards() -> np.ndarray:
    """Reward of always answering token t, for each of the 64 tokens, as a mean over many prompts."""
    prompts = [ECHO.prompt(0, step, prompt, 12) for step in range(50) for prompt in range(40)]
    return np.asarray([np.mean([ECHO.reward(ids, [token]) for ids in prompts]) for token in range(64)])


def test_no_policy_that_ignores_the_prompt_expects_more_than_a_third() -> None:
    """The reward is a mean over positions, so it is linear in each position's distribution over tokens: the best
    constant policy puts all weight on the best token, and every other one (any mixture, any length) is below it."""
    by_token = expected_rewards()
    assert by_token.max() <= 1 / 3
    mixtures = np.random.default_rng(0).dirichlet(np.full(64, 0.05), size=200)
    assert (mixtures @ by_token).max() <= by_token.max() + 1e-12


def test_linearity_of_the_reward_over_positions() -> None:
    ids = ECHO.prompt(0, 0, 0, 12)
    response = encode("abcdabcd?!")
    assert ECHO.reward(ids, response) == pytest.approx(np.mean([ECHO.reward(ids, [token]) for token in response]))


def test_named_characters_are_equally_likely() -> None:
    drawn = [ECHO.prompt(3, step, prompt, 12)[-1] for step in range(100) for prompt in range(40)]
    shares = np.asarray([drawn.count(token) for token in NAMED]) / len(drawn)
    assert np.abs(shares - 1 / len(NAMED)).max() < 0.03


def test_the_reward_worker_is_light() -> None:
    code = "import sys, executor.scoring, executor.rollout, executor.run; print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
