"""Laws of the statistics: what must hold for any predictions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.studies.accuracy import Row, Rule, ValidationSet, errors, quantile, table

positive = st.floats(min_value=1e-6, max_value=1e9)
pairs = st.lists(st.tuples(positive, positive), min_size=1, max_size=40)


def rows_of(values: list[tuple[float, float]], **more: str) -> tuple[Row, ...]:
    return tuple(
        Row(case=f"case {i}", quantity="TPOT", predicted=predicted, measured=measured, unit="s", **more)
        for i, (predicted, measured) in enumerate(values)
    )


@given(st.lists(positive, min_size=1, max_size=40))
def test_equal_predictions_have_no_error(values: list[float]) -> None:
    line = errors(rows_of([(value, value) for value in values]))
    assert line is not None
    assert line[1:] == (0, 0, 0, 0, 0, 0)


@given(pairs)
def test_the_mean_error_is_at_least_the_bias_and_the_percentiles_are_in_order(
    values: list[tuple[float, float]],
) -> None:
    line = errors(rows_of(values))
    assert line is not None and line.num == len(values)
    assert line.mape >= abs(line.bias) * (1 - 1e-12)
    assert 0 <= line.p50 <= line.p90 <= max(abs(p / m - 1) for p, m in values)


@given(pairs, st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(values: list[tuple[float, float]], random: st.DataObject) -> None:
    rows = list(rows_of(values))
    before, worst = errors(rows), ValidationSet(name="a", title="b", rows=tuple(rows)).worst
    random.shuffle(rows)
    assert errors(rows) == before
    assert ValidationSet(name="a", title="b", rows=tuple(rows)).worst == worst


@given(pairs, st.floats(min_value=0.01, max_value=100))
def test_the_unit_does_not_matter(values: list[tuple[float, float]], scale: float) -> None:
    line, scaled = errors(rows_of(values)), errors(rows_of([(p * scale, m * scale) for p, m in values]))
    assert line is not None and scaled is not None
    assert scaled[1:5] == pytest.approx(line[1:5], rel=1e-9, abs=1e-12)


@given(st.lists(positive, min_size=1, max_size=50), st.floats(min_value=0, max_value=1))
def test_quantiles_are_those_of_numpy(values: list[float], share: float) -> None:
    assert quantile(sorted(values), share) == pytest.approx(float(np.quantile(values, share)), rel=1e-9)


@given(st.floats(min_value=-0.99, max_value=5))
def test_one_common_error_is_bias_and_percentile_at_once(error: float) -> None:
    line = errors(rows_of([(value * (1 + error), value) for value in (0.5, 2.0, 7.0)]))
    assert line is not None
    assert (line.bias, line.mape, line.p50, line.p90) == pytest.approx((error, *[abs(error)] * 3), abs=1e-12)


@given(pairs, pairs, st.booleans())
def test_excluded_rows_count_but_do_not_judge(kept: list, left_out: list, comparison: bool) -> None:
    rows = rows_of(kept) + rows_of(left_out, excluded="doubtful")
    rule = Rule(id="doubtful", sentence="not sure", comparison=comparison)
    part = ValidationSet(name="a", title="b", rows=rows, rules=(rule,))
    assert part.excluded == {"doubtful": len(left_out)}
    lines = table(part)
    assert lines["TPOT"] == errors(rows_of(kept))
    assert lines["left out: doubtful"] == errors(rows_of(left_out))
    assert ("with what is left out" in lines) is not comparison
    assert comparison or lines["with what is left out"].num == len(kept) + len(left_out)


def test_every_quantity_has_its_own_line() -> None:
    one = Row(case="a", quantity="TPOT", predicted=2.0, measured=1.0, unit="s", assumed=("dtype",))
    two = Row(case="a", quantity="TTFT", predicted=1.0, measured=2.0, unit="s", assumed=("dtype", "arrival"))
    part = ValidationSet(name="a", title="b", rows=(one, two))
    lines = table(part)
    assert [lines[name].bias for name in ("TPOT", "TTFT", "all quantities")] == [1.0, -0.5, 0.25]
    assert part.assumed == {"dtype": 2, "arrival": 1}


def test_large_misses_are_counted_with_and_without_a_reason() -> None:
    rows = (*rows_of([(2, 1), (1.31, 1), (1.29, 1)]), *rows_of([(3, 1)], reason="swapping"))
    line = errors(rows)
    assert line is not None and (line.num_large, line.num_unexplained) == (3, 2)


def test_nothing_to_judge_gives_no_statistics() -> None:
    assert errors([]) is None
    assert table(ValidationSet(name="a", title="b", rows=())) == {}


@pytest.mark.parametrize(("predicted", "measured"), [(None, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.nan)])
def test_what_cannot_be_judged_is_refused(predicted: float | None, measured: float) -> None:
    with pytest.raises(ValueError, match="TPOT"):
        Row(case="a", quantity="TPOT", predicted=predicted, measured=measured, unit="s")


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="no rule of the set"):
        ValidationSet(name="a", title="b", rows=rows_of([(1, 1)], excluded="whim"))
