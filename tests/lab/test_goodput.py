"""Young's and Daly's intervals against the expected time that they are to make least."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.goodput import daly, expected_seconds, system_mtbf, young

shares = st.floats(1e-5, 0.3)
"""of a write in the mean time between failures"""


def cost(interval: float, write: float, mtbf: float = 1.0) -> float:
    return expected_seconds(1.0, interval, write, mtbf, restart_s=0.1)


@given(shares)
def test_dalys_interval_costs_within_a_thousandth_of_the_best(write: float) -> None:
    sweep = young(write, 1.0) * np.geomspace(0.1, 10, 400)
    assert cost(daly(write, 1.0), write) <= 1.001 * min(cost(interval, write) for interval in sweep)


@given(st.floats(1e-5, 0.1))
def test_youngs_interval_costs_within_a_fiftieth_of_the_best(write: float) -> None:
    sweep = young(write, 1.0) * np.geomspace(0.1, 10, 400)
    assert cost(young(write, 1.0), write) <= 1.02 * min(cost(interval, write) for interval in sweep)


@given(st.floats(1e-6, 10), st.floats(1e-2, 1e6))
def test_the_interval_scales_with_its_unit(write: float, unit: float) -> None:
    assert daly(write * unit, unit) == pytest.approx(unit * daly(write, 1.0))
    assert daly(write, 1.0) <= max(young(write, 1.0), 1.0)


def test_the_expected_time_is_that_of_a_simulated_renewal() -> None:
    """Segments of work and write under failures drawn one by one."""
    interval, write, mtbf, restart, rng = 3.0, 0.5, 8.0, 0.7, np.random.default_rng(5)
    took = []
    for _ in range(20_000):
        clock = 0.0
        needed = interval + write
        while (failure := rng.exponential(mtbf)) < needed:
            clock += failure
            while (again := rng.exponential(mtbf)) < restart:
                clock += again
            clock += restart
        took.append(clock + needed)
    expected = expected_seconds(interval, interval, write, mtbf, restart)
    assert np.mean(took) == pytest.approx(expected, rel=4 * np.std(took) / np.mean(took) / math.sqrt(len(took)))


def test_parts_that_fail_on_their_own_fail_together_more_often() -> None:
    assert system_mtbf({100.0: 4, 50.0: 2}) == pytest.approx(12.5)
    assert system_mtbf({100.0: 0}) is None
