"""Measuring: repeats collapse to medians, and the real workers yield every op that the quickstart needs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import measure
from lab.load import load
from lab.measurement import OPS, Measurement
from profiles.fit import fit
from profiles.formula import terms
from simulator.run import simulate

NEEDS_TWO_RANKS = {"grad_sync"}


@given(st.lists(st.tuples(st.sampled_from(["forward", "backward"]), st.integers(0, 3), st.floats(0.1, 9)), min_size=1))
def test_repeats_collapse_to_their_median_and_none_is_lost(found: list[tuple[str, int, float]]) -> None:
    points = [Measurement(op=op, quantities={"tokens": float(size)}, seconds=seconds) for op, size, seconds in found]
    collapsed = measure.collapse(points)
    assert sum(point.repeats for point in collapsed) == len(points)
    assert len({(point.op, point.quantities["tokens"]) for point in collapsed}) == len(collapsed)
    for point in collapsed:
        same = sorted(s for op, size, s in found if (op, float(size)) == (point.op, point.quantities["tokens"]))
        assert same[(len(same) - 1) // 2] <= point.seconds <= same[len(same) // 2]


def test_the_sweep_is_not_the_quickstart_s_work() -> None:
    quick = load("scenarios/quickstart.yaml")
    lengths = quick.workload.prompt_tokens.max + quick.workload.response_lengths(quick.seed, 0).ravel()
    assert measure.scenario("tiny-llama").workload != quick.workload
    for number, tokens, *_ in (*measure.SCORED, *measure.TRAINED):
        assert sorted(lengths) != [tokens] * number


@pytest.mark.real
def test_real_workers_yield_every_op_alone_and_beside_a_busy_core(
    local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "ENGINE", ((4, 16, 6), (8, 24, 6)))
    monkeypatch.setattr(measure, "SCORED", ((4, 24), (8, 48)))
    monkeypatch.setattr(measure, "TRAINED", ((16, 24, 24), (16, 48, 48)))
    found = measure.measure("tiny-llama", quick=True)
    assert {point.op for point in found if point.neighbours == 0} == set(OPS) - NEEDS_TWO_RANKS
    assert {point.neighbours for point in found} == {0, 1}
    assert all(point.seconds > 0 for point in found)
    profile = fit(found, name="measured-here", source={})
    for point in found:
        if point.op in ("forward", "engine_step") and point.neighbours == 0:
            ratio = profile.ops[point.op].seconds(terms(point.op, point.quantities)) / point.seconds
            assert 0.1 < ratio < 10
    timeline = simulate(load("scenarios/quickstart.yaml"), {"cpu-core": profile})
    assert timeline.header.profiles["cpu-core"]["unmeasured"] == []
