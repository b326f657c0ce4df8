"""The scenarios that `lab validate --here` judges predictions by, and its verdicts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.cli.agreement import HELD_OUT, Row, cases
from lab.load import load
from lab.wiring import build

SHIPPED = Path(__file__).parents[3] / "scenarios"


@pytest.mark.parametrize("name", cases())
def test_a_held_out_scenario_is_whole_and_like_no_shipped_one(name: str) -> None:
    scenario = load(cases()[name])
    assert build(scenario).num_steps >= 4
    work = scenario.model_dump(include={"workload", "update", "place"})
    shipped = [load(path).model_dump(include={"workload", "update", "place"}) for path in SHIPPED.glob("*.yaml")]
    assert work not in shipped


def test_every_kind_of_run_is_among_them() -> None:
    found = {name: load(path) for name, path in cases().items()}
    assert {scenario.algorithm.name for scenario in found.values()} >= {"ppo", "grpo", "dpo"}
    assert {scenario.schedule.mode for scenario in found.values()} >= {"synchronous", "asynchronous"}
    assert any(scenario.faults for scenario in found.values())
    assert any(len(scenario.team("actor", "train")) == 2 for scenario in found.values())
    assert {path.parent for path in cases().values()} == {HELD_OUT}


@given(st.floats(0.01, 10), st.floats(-0.5, 0.5), st.floats(0, 0.5), st.floats(0.05, 0.5))
def test_a_row_is_met_within_its_bound(measured: float, error: float, spread: float, bound: float) -> None:
    row = Row(
        scenario="a", quantity="step", predicted=measured * (1 + error), measured=measured, spread=spread, bound=bound
    )
    if abs(abs(error) - bound) > 1e-9:
        assert row.met == (abs(error) < bound)
    verdict = row.cells()[-1]
    assert verdict.startswith("yes" if row.met else "no")
    assert ("spread" in verdict) == (spread > 0.15)
