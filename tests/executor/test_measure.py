"""Measuring: repeats collapse to medians, sweeps go on after interrupts, and real workers yield every op."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import measure
from executor.measure import grids, parts, sweep
from executor.measure.journal import Found, Journal
from executor.measure.launching import LAUNCHED
from executor.measure.parts import Part, run
from lab.load import load
from lab.measurement import HELD_OUT, Measurement
from profiles.fit import fit
from profiles.formula import FORMULAS, terms
from simulator.run import simulate

NEEDS_MORE = {"engine_sleep", "engine_wake"}
"""a platform whose engine can sleep"""
IDENTITY = {"machine": "m", "software": "s"}

repeats = st.lists(
    st.tuples(st.sampled_from(["forward", "backward"]), st.integers(0, 3), st.floats(0.1, 9)), min_size=1
)


@given(repeats)
def test_repeats_collapse_to_their_median_and_none_is_lost(found: list[tuple[str, int, float]]) -> None:
    points = [Measurement(op=op, quantities={"tokens": float(size)}, seconds=seconds) for op, size, seconds in found]
    collapsed = measure.collapse(points)
    assert sum(point.repeats for point in collapsed) == len(points)
    assert len({(point.op, point.quantities["tokens"]) for point in collapsed}) == len(collapsed)
    for point in collapsed:
        same = [s for op, size, s in found if (op, float(size)) == (point.op, point.quantities["tokens"])]
        assert point.seconds == median(same)
        assert 0 <= point.spread <= (max(same) - min(same)) / point.seconds + 1e-9


def test_points_with_a_name_average_their_quantities_and_stay_apart_where_held_out() -> None:
    def decode(context: float, seconds: float, source: str) -> Measurement:
        return Measurement(
            op="engine_step", quantities={"kv_bytes": context}, seconds=seconds, point="d", source=source
        )

    found = measure.collapse(
        [decode(10, 1, "sweep"), decode(12, 3, "sweep"), decode(14, 2, "sweep"), decode(10, 5, HELD_OUT)]
    )
    assert [(p.quantities["kv_bytes"], p.seconds, p.repeats) for p in found] == [(12, 2, 3), (10, 5, 1)]
    assert found[0].spread == pytest.approx(0.5)


def counted(calls: list[str], stops: int | None = None) -> Callable[[], "Iterator[Callable[[str], Found]]"]:
    @contextmanager
    def start() -> Iterator[Callable[[str], Found]]:
        calls.append("start")

        def take(unit: str) -> Found:
            if len(calls) - 1 == stops:
                raise KeyboardInterrupt
            calls.append(unit)
            return Found(unit=unit, points=[Measurement(op="forward", quantities={"tokens": 1.0}, seconds=1.0)])

        yield take

    return start


@given(st.integers(1, 6), st.data())
def test_an_interrupted_sweep_goes_on_and_measures_no_unit_twice(
    tmp_path_factory: pytest.TempPathFactory, number: int, data: st.DataObject
) -> None:
    stops = data.draw(st.integers(0, number - 1))
    path, units = tmp_path_factory.mktemp("j") / "j.jsonl", tuple(f"u{i}" for i in range(number))
    first: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run([Part(name="p", units=units, start=counted(first, stops))], Journal.open(path, IDENTITY), lambda *_: None)
    content = path.read_bytes()
    if torn := data.draw(st.integers(0, 20)):
        path.write_bytes(content + b'{"unit":"u9","points":[]}\n'[:torn])  # killed while it wrote
    second: list[str] = []
    journal = Journal.open(path, IDENTITY)
    run([Part(name="p", units=units, start=counted(second))], journal, lambda *_: None)
    assert [*first[1:], *second[1:]] == list(units) == list(journal.units)
    assert list(Journal.open(path, IDENTITY).units) == list(units)
    third: list[str] = []
    run([Part(name="p", units=units, start=counted(third))], Journal.open(path, IDENTITY), lambda *_: None)
    assert not third  # nothing is missing: no worker starts


def test_another_machine_and_fresh_start_anew(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    Journal.open(path, IDENTITY).add(Found(unit="u"))
    assert Journal.open(path, IDENTITY).units
    assert not Journal.open(path, IDENTITY | {"machine": "other"}).units
    Journal.open(path, IDENTITY).add(Found(unit="u"))
    assert not Journal.open(path, IDENTITY, fresh=True).units


def test_the_sweep_is_not_the_quickstart_s_work_and_no_held_out_point_is_fitted() -> None:
    quick = load("scenarios/quickstart.yaml")
    lengths = quick.workload.prompt_tokens.max + quick.workload.response_lengths(quick.seed, 0).ravel()
    for number, tokens, *_ in (*grids.FITTED.scored, *grids.FITTED.trained):
        assert sorted(lengths) != [tokens] * number
    for kind in ("decode", "mixed", "rollouts"):
        assert not set(getattr(grids.FITTED, kind)) & set(getattr(grids.HELD_OUT, kind))
    for grid in (grids.FITTED, grids.HELD_OUT):
        assert all(context + 6 < grids.LONGEST for _, context in grid.decode)


@pytest.mark.real
def test_real_workers_yield_every_op_alone_and_beside_a_busy_core(
    local_ray: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = replace(
        grids.FITTED, decode=((2, 16), (8, 32)), mixed=grids.FITTED.mixed[1:2], rollouts=((4, 16, 6), (8, 24, 6), (8, 24, 12)),
        scored=((4, 24), (8, 48), (12, 48)), bytes=(1 << 10, 1 << 18),
        trained=((16, 24, 24), (32, 48, 48), (16, 96, 96), (16, 64, 12)), split=((16, 24, 24),), joint=((16, 24, 24), (16, 40, 40)),
    )  # fmt: skip
    monkeypatch.setattr(sweep, "FITTED", small)
    monkeypatch.setattr(parts, "FITTED", small)
    monkeypatch.setattr(sweep, "HELD_OUT", replace(small, decode=((4, 24),), mixed=(), rollouts=()))
    result = measure.measure("tiny-llama", quick=True, journal=tmp_path / "j.jsonl", identity=IDENTITY)
    found = result.points
    assert {point.op for point in found if point.neighbours == 0} == {
        op for op in FORMULAS if not op.endswith("_stage")
    } - NEEDS_MORE
    assert {point.neighbours for point in found} == {0, 1}
    assert {point.op for point in found if point.neighbours} >= set(LAUNCHED)
    assert all(point.seconds > 0 for point in found)
    assert {row["kind"] for row in result.operators} == {"rollout", "logprob", "forward", "backward", "optimizer"}
    assert sum(row["flops"] for row in result.operators if row["kind"] == "forward") > 1e9
    assert any("cannot sleep" in note for note in result.notes)
    assert all(state["free_bytes"] > 0 for state in result.states if state["device"] == "host")
    gathers = [point for point in found if point.quantities.get("gathers")]
    assert {point.quantities["parameters"] for point in gathers if point.op == "optimizer"} == {803968, 4754688}
    assert {"zero1_bytes" in point.quantities for point in found if point.op == "grad_sync"} == {False, True}
    _fits(found)
    again = measure.measure("tiny-llama", quick=True, journal=tmp_path / "j.jsonl", identity=IDENTITY)
    assert json.dumps([str(point) for point in again.points]) == json.dumps([str(point) for point in found])


def _fits(found: list[Measurement]) -> None:
    """The measurements determine a profile, which prices the quickstart without a datasheet."""
    profile = fit(found, name="measured-here", source={})
    for point in found:
        if point.op in ("forward", "engine_step", "grad_sync", "optimizer") and point.neighbours == 0:
            ratio = profile.ops[point.op].seconds(terms(point.op, point.quantities)) / point.seconds
            assert 0.1 < ratio < 10
    assert profile.ops["engine_step"].held_out is not None
    timeline = simulate(load("scenarios/quickstart.yaml"), {"cpu-core": profile})
    assert timeline.header.profiles["cpu-core"]["unmeasured"] == []
