import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.policies.lengths import LengthHistory

responses = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4000)), min_size=1, max_size=40)


def history(seen: list[tuple[int, int]], weight: float = 1.0) -> LengthHistory:
    index, tokens = zip(*seen, strict=True)
    return LengthHistory.empty(5, 800, weight).with_responses(index, tokens)


@given(responses)
def test_predictions_lie_between_a_prompts_mean_and_the_mean_of_all(seen: list[tuple[int, int]]) -> None:
    overall = np.mean([tokens for _, tokens in seen])
    for prompt, predicted in enumerate(history(seen).predict(range(5))):
        own = np.mean([tokens for index, tokens in seen if index == prompt] or [overall])
        assert min(own, overall) - 1e-6 <= predicted <= max(own, overall) + 1e-6


@given(responses, st.integers(1, 39))
def test_the_order_and_the_number_of_reports_do_not_matter(seen: list[tuple[int, int]], cut: int) -> None:
    whole, parts = history(seen), LengthHistory.empty(5, 800)
    for part in (seen[cut:], seen[:cut]):
        parts = parts.with_responses([i for i, _ in part], [tokens for _, tokens in part])
    assert parts.predict(range(5)) == pytest.approx(whole.predict(range(5)))


def test_without_responses_the_prior_is_expected() -> None:
    assert LengthHistory.empty(3, 800).predict([0, 2]).tolist() == [800, 800]
    assert LengthHistory.empty(3, 800, prior_weight=0).predict([1]).tolist() == [800]


def test_without_weight_the_own_mean_is_expected() -> None:
    assert history([(0, 10), (0, 30), (1, 1000)], weight=0).predict([0, 1]).tolist() == [20, 1000]
