import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.algorithms.mismatch import mismatched, partners
from executor.experience import Samples


def samples(num_prompts: int, each: int) -> Samples:
    """Prompt p is p + 1 tokens of 100 + p, its responses are of 1000 + their place."""
    prompts = np.repeat(np.arange(num_prompts), each)
    return Samples(
        step=3, policy_version=3, prompts=prompts, num_prompt_tokens=prompts + 1,
        tokens=[np.r_[np.full(p + 1, 100 + p), np.full(2 + i, 1000 + i)] for i, p in enumerate(prompts)],
        logprobs=[np.empty(0, np.float32)] * len(prompts), columns={"labels": np.ones(len(prompts))},
    )  # fmt: skip


@given(st.integers(2, 7), st.integers(1, 4), st.integers(1, 3))
def test_every_prompt_is_read_with_another_prompt_s_response(num_prompts: int, each: int, num_minibatches: int) -> None:
    given_ = samples(num_prompts * num_minibatches, each)
    size = num_prompts * each
    found = mismatched(given_, size)
    for first in range(0, len(given_), size):
        used = []
        for i in range(first, first + size):
            start = given_.num_prompt_tokens[i]
            assert np.array_equal(found.tokens[i][:start], given_.tokens[i][:start])
            [response] = set(found.tokens[i][start:].tolist())
            assert given_.prompts[response - 1000] != given_.prompts[i]
            assert len(found.tokens[i]) - start == 2 + response - 1000
            used.append(response - 1000)
        assert sorted(used) == list(range(first, first + size))  # of its own mini-batch, each response once


@pytest.mark.parametrize(("prompts", "expected"), [([0, 1, 2], [1, 2, 0]), ([5, 5, 7, 7], [2, 3, 0, 1]), ([4], [0])])
def test_partners_are_as_few_places_on_as_reach_another_prompt(prompts: list[int], expected: list[int]) -> None:
    assert partners(np.asarray(prompts)).tolist() == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12).map(sorted))
def test_no_response_goes_with_its_own_prompt_where_there_is_another(prompts: list[int]) -> None:
    """A mini-batch may cut the samples of a prompt, so that one has most of it."""
    found = partners(np.asarray(prompts))
    several = len(set(prompts)) > 1
    assert all((prompts[partner] != prompts[i]) == several for i, partner in enumerate(found))
