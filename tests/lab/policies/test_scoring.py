"""When batches leave, what a cache knows, and how calls of a remote service end."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.policies.scoring import Batching, Remote, calls, fitting, known, leaving

rules = st.builds(
    Batching, max_samples=st.integers(1, 6), max_tokens=st.one_of(st.none(), st.integers(1, 60)),
    max_wait_s=st.floats(0, 5),
)  # fmt: skip
lengths = st.lists(st.integers(1, 30), max_size=12)
INDEX = np.arange(20_000)
STEP = np.full_like(INDEX, 3)


@given(rules, lengths)
def test_a_batch_is_within_its_limits_and_cannot_be_longer(rule: Batching, waiting: list[int]) -> None:
    number = fitting(rule, waiting)
    assert (number > 0) == bool(waiting) and number <= rule.max_samples

    def padded(count: int) -> int:
        return count * max(waiting[:count])

    if rule.max_tokens is not None and number > 1:
        assert padded(number) <= rule.max_tokens
    if number < min(len(waiting), rule.max_samples):
        assert rule.max_tokens is not None and padded(number + 1) > rule.max_tokens


@given(rules, lengths, st.floats(0, 10))
def test_a_batch_leaves_when_full_or_late_or_last_and_else_waits(
    rule: Batching, waiting: list[int], waited: float
) -> None:
    number = leaving(rule, waiting, waited)
    full = bool(waiting) and (fitting(rule, waiting) < len(waiting) or fitting(rule, waiting) == rule.max_samples)
    assert bool(number) == (bool(waiting) and (full or waited >= rule.max_wait_s))
    assert leaving(rule, waiting, waited, more=False) == fitting(rule, waiting) if waiting else number == 0


def test_a_cache_knows_its_share_and_the_same_samples_every_time() -> None:
    hits = known(0.3, 7, STEP, INDEX)
    assert hits.mean() == pytest.approx(0.3, abs=0.02)
    assert np.array_equal(hits[::5], known(0.3, 7, STEP[::5], INDEX[::5]))
    assert (known(0.5, 7, STEP, INDEX) >= hits).all() and not np.array_equal(hits, known(0.3, 8, STEP, INDEX))
    assert not known(0.0, 7, STEP, INDEX).any() and known(1.0, 7, STEP, INDEX).all()


def test_latencies_have_the_mean_and_the_percentile_that_are_stated() -> None:
    found = calls(Remote(latency_s=2.0, p95_s=5.0), 1, STEP, INDEX).seconds
    assert found.mean() == pytest.approx(2.0, rel=0.03)
    assert np.quantile(found, 0.95) == pytest.approx(5.0, rel=0.05)
    assert (calls(Remote(latency_s=2.0), 1, STEP, INDEX).seconds == 2.0).all()


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_attempts_are_geometric_and_end_with_the_retries(retries: int) -> None:
    """With failures of chance p, q = p^(r+1) stay without an answer; (1 - q) / (1 - p) attempts are made on average."""
    share = 0.4
    found = calls(Remote(latency_s=1.0, failure_share=share, retries=retries), 5, STEP, INDEX)
    missing = share ** (retries + 1)
    assert (~found.answered).mean() == pytest.approx(missing, abs=0.01)
    assert found.attempts.mean() == pytest.approx((1 - missing) / (1 - share), rel=0.02)
    assert found.attempts.min() == 1 and found.attempts.max() == retries + 1
    assert np.allclose(found.seconds, found.attempts)


@given(st.floats(0.5, 4.0), st.integers(0, 3))
def test_no_attempt_takes_longer_than_the_timeout(timeout: float, retries: int) -> None:
    index = np.arange(200)
    rule = Remote(latency_s=1.0, p95_s=3.0, timeout_s=timeout, retries=retries)
    found = calls(rule, 2, np.zeros_like(index), index)
    assert (found.seconds <= found.attempts * timeout + 1e-12).all()
    assert np.allclose(found.seconds[~found.answered], (retries + 1) * timeout)


def test_another_retry_never_loses_an_answer() -> None:
    rules = [Remote(latency_s=1.0, p95_s=3.0, timeout_s=1.5, failure_share=0.2, retries=n) for n in range(4)]
    answered = [calls(rule, 2, STEP, INDEX).answered for rule in rules]
    for fewer, more in pairwise(answered):
        assert (more >= fewer).all() and more.sum() > fewer.sum()
