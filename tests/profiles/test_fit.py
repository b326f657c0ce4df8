"""Fitting recovers what was planted, whatever the noise does within reason."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from lab.errors import InputError
from lab.measurement import Measurement, grad_sync_quantities, optimizer_quantities, update_quantities
from profiles.fit import fit
from profiles.formula import FORMULAS, terms

SHAPES = [(tokens, tokens * context) for tokens in (1, 4, 16, 64, 256, 1024) for context in (8, 32, 128)]


def points(
    coefficients: tuple[float, float, float], noise: float = 0.0, seed: int = 0, neighbours: int = 0, slow: float = 1.0
):
    rng = np.random.default_rng(seed)
    each, linear, attention = coefficients
    return [
        Measurement(
            op="forward",
            quantities={"passes": 1, "tokens": tokens, "linear_flops": 1e6 * tokens, "attention_flops": 1e3 * squares},
            seconds=slow
            * (each + linear * 1e6 * tokens + attention * 1e3 * squares)
            * (1 + noise * rng.standard_normal()),
            model="tiny-llama",
            neighbours=neighbours,
        )
        for tokens, squares in SHAPES
    ]


planted = st.tuples(st.floats(1e-4, 1e-1), st.floats(1e-12, 1e-9), st.floats(1e-12, 1e-9))


@given(planted)
def test_planted_coefficients_are_recovered(coefficients: tuple[float, float, float]) -> None:
    found = fit(points(coefficients), name="p", source={}).ops["forward"]
    for point in points(coefficients):
        assert found.seconds(terms("forward", point.quantities)) == pytest.approx(point.seconds, rel=1e-6)
    assert found.residual_p90 < 1e-6
    assert found.points == len(SHAPES)


@given(planted, st.integers(0, 100))
def test_noise_of_five_percent_moves_predictions_by_less_than_that(coefficients, seed: int) -> None:
    found = fit(points(coefficients, 0.05, seed), name="p", source={}).ops["forward"]
    errors = [found.seconds(terms("forward", p.quantities)) / p.seconds - 1 for p in points(coefficients)]
    assert np.median(np.abs(errors)) < 0.05
    assert all(value >= 0 for value in found.coefficients.values())


def test_one_wild_point_moves_little() -> None:
    clean = points((1e-2, 1e-10, 1e-10))
    wild = [*clean[:-1], Measurement(op="forward", quantities=clean[-1].quantities, seconds=50 * clean[-1].seconds)]
    found = fit(wild, name="p", source={}).ops["forward"]
    for point in clean[:-3]:
        assert found.seconds(terms("forward", point.quantities)) == pytest.approx(point.seconds, rel=0.1)


@given(st.floats(1.0, 3.0), st.floats(1.0, 2.0))
def test_slowdown_beside_busy_cores_is_recovered_and_never_falls(first: float, more: float) -> None:
    base = (1e-2, 1e-10, 1e-10)
    beside = points(base, neighbours=1, slow=first) + points(base, neighbours=3, slow=first * more)
    found = fit(points(base) + beside, name="p", source={}).ops["forward"].interference
    assert found == pytest.approx((first, first, first * more), rel=1e-6)


def test_every_op_that_was_not_measured_is_absent() -> None:
    profile = fit(points((1e-2, 1e-10, 1e-10)), name="p", source={})
    assert set(profile.ops) == {"forward"} and profile.models == ("tiny-llama",)
    assert set(FORMULAS) > {"forward"}


def test_nothing_and_two_device_kinds_and_unknown_ops_are_refused() -> None:
    one = Measurement(op="forward", quantities={}, seconds=1)
    other = Measurement(op="forward", quantities={}, seconds=1, device="h100-80g-sxm")
    strange = Measurement(op="lunch", quantities={}, seconds=1)
    for wrong in ([], [one, other], [strange]):
        with pytest.raises(InputError):
            fit(wrong, name="p", source={})


@given(planted, st.floats(1.0, 2.0))
def test_the_speed_of_two_threads_is_that_of_what_they_divide(
    coefficients: tuple[float, float, float], speed: float
) -> None:
    each, linear, attention = coefficients
    threaded = [
        structs.replace(point, threads=2, seconds=each + (point.seconds - each) / speed)
        for point in points(coefficients)
    ]
    found = fit([*points(coefficients), *threaded], name="p", source={}).ops["forward"]
    alone = fit(points(coefficients), name="p", source={}).ops["forward"]
    assert found.coefficients == alone.coefficients
    if any(
        linear * p.quantities["linear_flops"] + attention * p.quantities["attention_flops"] > each for p in threaded
    ):
        assert found.threads == pytest.approx((speed,), rel=1e-4)
        assert found.speedup(4) == pytest.approx(2 * speed, rel=1e-4)
    assert found.speedup(1) == 1.0
    assert alone.speedup(3) == 3.0


def test_a_hole_in_the_numbers_of_threads_ends_what_is_known() -> None:
    whole = points((1e-4, 1e-10, 1e-10))
    three = [structs.replace(point, threads=3, seconds=point.seconds / 2) for point in whole]
    assert fit([*whole, *three], name="p", source={}).ops["forward"].threads == ()


PAIR = {
    "optimizer": lambda size, stage: optimizer_quantities(size // 4, float(size), stage, 2),
    "grad_sync": lambda size, stage: grad_sync_quantities(float(size), stage, 2),
}


@pytest.mark.parametrize("op", PAIR)
@given(coefficients=st.lists(st.floats(1e-10, 1e-8), min_size=7, max_size=7))
def test_two_sizes_without_zero_and_with_its_first_stage_tell_what_two_ranks_cost(
    op: str, coefficients: list[float]
) -> None:
    """What a short sweep has of two ranks; with one size alone it cannot be told."""
    each = dict(zip(FORMULAS[op], coefficients, strict=False))
    each |= {name: 1e6 * value for name, value in each.items() if name in ("each", "gathers")}

    def point(size: int, stage: int) -> Measurement:
        quantities = PAIR[op](size, stage)
        seconds = sum(each[name] * value for name, value in terms(op, quantities).items())
        return Measurement(op=op, quantities=quantities, seconds=seconds)

    whole = [point(size, stage) for size in (3_215_872, 19_018_752) for stage in (0, 1)]
    found = fit(whole, name="p", source={}).ops[op]
    for one in [*whole, point(10_000_000, 1)]:
        assert found.seconds(terms(op, one.quantities)) == pytest.approx(one.seconds, rel=1e-6)
    with pytest.raises(InputError, match="measure"):
        fit(whole[:2], name="p", source={})


def test_runs_of_one_trainer_with_two_ranks_leave_no_op_undetermined() -> None:
    """What its ranks tell each other is the same in every update; with what was measured of one rank it is told apart."""
    alone = [
        Measurement(op="optimizer", quantities=optimizer_quantities(size, 4.0 * size, 0, 1), seconds=1e-9 * size + 1e-3)
        for size in (803_968, 4_754_688)
    ]
    together = Measurement(op="optimizer", quantities=PAIR["optimizer"](3_215_872, 1), seconds=6e-3)
    found = fit([*alone, together], name="p", source={}).ops["optimizer"]
    for point in (*alone, together):
        assert found.seconds(terms("optimizer", point.quantities)) == pytest.approx(point.seconds, rel=1e-6)
    hosts = [
        Measurement(op="update_host", quantities=update_quantities(n, 50 * n + k, m, 2), seconds=1e-3 * m + 1e-4 * n)
        for n, m, k in ((8, 1, 0), (16, 2, 90), (32, 2, 7), (64, 4, 400), (24, 1, 33), (12, 3, 5))
    ]
    found = fit(hosts, name="p", source={}).ops["update_host"]
    for point in hosts:
        assert found.seconds(terms("update_host", point.quantities)) == pytest.approx(point.seconds, rel=1e-3)
