"""Clocks: an estimate is never further off than it says."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.clocks import Clocks, Offset, Ping, identity, offset

SECONDS = st.floats(0, 1e3)
WAYS = st.lists(st.tuples(SECONDS, st.floats(1e-6, 1.0), st.floats(1e-6, 1.0)), min_size=1, max_size=20)


@given(st.floats(-1e6, 1e6), WAYS)
def test_the_true_offset_lies_within_the_error_however_long_each_way_took(
    true: float, ways: list[tuple[float, float, float]]
) -> None:
    pings = [Ping(asked_s=t, said_s=t + there + true, answered_s=t + there + back) for t, there, back in ways]
    found = offset(pings)
    assert abs(found.seconds - true) <= found.error_s + 1e-6
    assert found.error_s == pytest.approx(min(there + back for _, there, back in ways) / 2, abs=1e-6)


def test_errors_add_up_between_two_machines_and_not_within_one() -> None:
    one, two = Offset(seconds=5.0, error_s=0.001), Offset(seconds=-3.0, error_s=0.002)
    clocks = Clocks(offsets={"a": one, "b": one, "c": two})
    assert clocks.residual_s == pytest.approx(0.003)
    assert Clocks(offsets={"a": one, "b": one}).residual_s == pytest.approx(0.001)
    assert (clocks.of("a"), clocks.of("nobody"), Clocks().residual_s) == (5.0, 0.0, 0.0)


def test_drift_until_the_end_counts_as_error() -> None:
    begin = Clocks(offsets={"a": Offset(seconds=1.0, error_s=0.001)})
    end = Clocks(offsets={"a": Offset(seconds=1.01, error_s=0.002)})
    assert begin.drifted(end).of("a") == 1.0
    assert begin.drifted(end).residual_s == pytest.approx(0.012)


def test_a_process_knows_its_clock() -> None:
    assert identity() == identity() and "/" in identity()
    assert time.monotonic() > 0
