"""Curves: exact at their knots, bounded between them, and refused where they cannot be."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from profiles.compact_fit import fit_curve
from profiles.curve import Curve, Range

PARTS = {
    "axes": {"m": (1.0, 10.0, 100.0), "n": (2.0, 4.0)},
    "values": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
    "unit": "x roofline",
    "points": 6,
    "residual_median": 0.0,
    "residual_p90": 0.0,
    "ranges": {"m": Range(low=1, high=100), "n": Range(low=2, high=4)},
}


def test_knots_are_exact_and_the_last_axis_varies_fastest() -> None:
    curve = Curve(**PARTS)
    m, n = np.meshgrid([1.0, 10.0, 100.0], [2.0, 4.0], indexing="ij")
    assert np.allclose(curve.at(m=m, n=n).ravel(), PARTS["values"], rtol=1e-12)


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6))
def test_between_and_beyond_the_knots_values_stay_within_them(m: float, n: float) -> None:
    assert 1 - 1e-9 <= float(Curve(**PARTS).at(m=m, n=n)) <= 6 + 1e-9


def test_halfway_in_the_logarithm_is_the_geometric_mean() -> None:
    assert float(Curve(**PARTS).at(m=math.sqrt(10), n=2)) == pytest.approx(math.sqrt(1 * 3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"values": (1.0, 2.0, 3.0, 4.0, 5.0)}, "5 values where the axes make 6"),
        ({"values": (1.0, 2.0, 3.0, 4.0, 5.0, -6.0)}, "-6.0 is no time"),
        ({"values": "1 2 3 4 5 nan"}, "finite number"),
        ({"values": "1 2 3 4 5 six"}, "'six' is no finite number"),
        ({"axes": {"m": (1.0, 100.0, 10.0), "n": (2.0, 4.0)}}, "axis m does not rise"),
        ({"axes": {"m": (0.0, 10.0, 100.0), "n": (2.0, 4.0)}}, "axis m must hold sizes above 0"),
        ({"ranges": {"m": Range(low=1, high=100)}}, "the range of n is missing"),
        ({"ranges": {"m": Range(low=100, high=1), "n": Range(low=2, high=4)}}, "the range of m is empty"),
        ({"unit": "hours"}, "x roofline"),
        ({"unit": None}, "unit"),
        ({"points": 0}, "points"),
    ],
)
def test_a_curve_that_cannot_be_is_refused(change: dict, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Curve(**PARTS | change)


def test_a_unit_must_be_stated() -> None:
    with pytest.raises(ValidationError, match="unit"):
        Curve(**{name: value for name, value in PARTS.items() if name != "unit"})


def test_a_fit_recovers_what_made_the_points_and_outliers_move_it_little() -> None:
    draw = np.random.default_rng(1)
    sizes = {"m": np.exp(draw.uniform(0, np.log(1000), 2000)), "n": np.exp(draw.uniform(0, np.log(100), 2000))}
    truth = sizes["m"] ** 0.3 * sizes["n"] ** -0.2
    noisy = np.where(np.arange(2000) % 50 == 0, 10 * truth, truth)
    knots = {"m": np.logspace(0, 3, 4), "n": np.logspace(0, 2, 3)}
    curve = fit_curve(sizes, noisy, knots, source={}, unit="x roofline")
    assert curve.points + curve.held_out == 2000 and curve.held_out == 400
    assert np.max(np.abs(curve.at(**sizes) / truth - 1)) < 0.05
    assert curve.residual_median < 0.01


def test_held_out_points_have_no_pull_on_the_fit() -> None:
    draw = np.random.default_rng(2)
    sizes = {"m": np.exp(draw.uniform(0, 5, 500))}
    kept = np.random.default_rng(0).permutation(500) % 5 > 0
    ratios = np.where(kept, 1.0, 7.0)
    curve = fit_curve(sizes, ratios, {"m": np.array([1.0, 200.0])}, source={}, unit="s")
    assert np.allclose(curve.values, 1.0, rtol=1e-6)
    assert curve.residual_median == pytest.approx(6 / 7, abs=1e-3)


@given(st.lists(st.tuples(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6)), min_size=2, max_size=9))
def test_one_size_alone_and_among_others_is_the_same(sizes: list[tuple[float, float]]) -> None:
    curve = Curve(**PARTS)
    together = curve.at(m=[m for m, _ in sizes], n=[n for _, n in sizes])
    alone = [float(curve.at(m=m, n=n)) for m, n in sizes]
    assert np.allclose(together, alone, rtol=1e-12)
    assert curve.at(m=np.array([sizes[0][0]]), n=sizes[0][1]).shape == (1,)
