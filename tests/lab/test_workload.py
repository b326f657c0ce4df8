"""Drawn lengths: determined by their coordinates alone, and distributed as stated."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import stats

from lab.workload import Empirical, Fixed, Lognormal, Workload, uniform


def workload(prompts: int, samples: int) -> Workload:
    length = Lognormal(dist="lognormal", mean=100, p95=250, max=10**6)
    return Workload(prompts_per_step=prompts, samples_per_prompt=samples, prompt_tokens=length, response_tokens=length)


@given(st.integers(0, 2**32), st.integers(0, 1000), st.integers(1, 9), st.integers(1, 9))
def test_a_length_does_not_depend_on_how_many_others_there_are(
    seed: int, step: int, prompts: int, samples: int
) -> None:
    few, many = workload(prompts, samples), workload(prompts + 3, samples + 2)
    np.testing.assert_array_equal(
        few.response_lengths(seed, step), many.response_lengths(seed, step)[:prompts, :samples]
    )
    np.testing.assert_array_equal(few.prompt_lengths(seed, step), many.prompt_lengths(seed, step)[:prompts])


def test_seed_and_step_change_the_lengths() -> None:
    base = workload(64, 4).response_lengths(1, 1)
    assert (base != workload(64, 4).response_lengths(2, 1)).any()
    assert (base != workload(64, 4).response_lengths(1, 2)).any()


def test_the_numbers_are_uniform_and_streams_are_independent() -> None:
    index = np.arange(20_000)
    first, second = uniform(3, 1, 0, index, 0), uniform(3, 2, 0, index, 0)
    assert ((first > 0) & (first < 1)).all()
    assert stats.kstest(first, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.03


def test_lognormal_lengths_have_the_stated_mean_and_percentile() -> None:
    lengths = workload(5000, 10).response_lengths(0, 0).ravel()
    assert lengths.mean() == pytest.approx(100, rel=0.02)
    assert np.percentile(lengths, 95) == pytest.approx(250, rel=0.03)


@given(st.floats(1, 1e4), st.floats(1.0, math.exp(1.6448536269514722**2 / 2)))
def test_sigma_solves_the_equation_of_mean_and_percentile(mean: float, ratio: float) -> None:
    length = Lognormal(dist="lognormal", mean=mean, p95=min(mean * ratio, mean * 3.8), max=10**7)
    mu = math.log(length.mean) - length.sigma**2 / 2
    assert stats.lognorm(s=max(length.sigma, 1e-12), scale=math.exp(mu)).ppf(0.95) == pytest.approx(
        length.p95, rel=1e-6
    )


def test_a_percentile_that_no_lognormal_has_is_refused() -> None:
    with pytest.raises(ValidationError, match="p95"):
        Lognormal(dist="lognormal", mean=100, p95=400, max=1000)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=5))
def test_empirical_lengths_are_the_given_ones(values: list[int]) -> None:
    drawn = Empirical(dist="empirical", values=tuple(values)).draw(uniform(0, 1, 0, np.arange(500), 0), np.zeros(500))
    assert set(drawn) == set(values)
    assert (Fixed(dist="fixed", value=7).draw(np.zeros(3), np.zeros(3)) == 7).all()
