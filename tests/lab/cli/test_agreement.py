"""The scenarios that `lab validate --here` judges predictions by, and its verdicts."""

from pathlib import Path

import msgspec
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from lab.cli import agreement
from lab.cli.agreement import HELD_OUT, Row, Unfinished, cases, judge, page
from lab.load import load
from lab.scenario import Scenario
from lab.timeline import Timeline, header_of
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


def test_a_run_that_does_not_end_costs_no_other_scenario_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def played(path: Path, *_: object) -> tuple[str, list[str]]:
        if path.stem == "grpo":
            raise Unfinished("no engine (runs/x)")
        return path.stem, []

    row = Row(scenario="ppo", quantity="step", predicted=1.0, measured=1.05, spread=0.01, bound=0.1)
    monkeypatch.setattr(agreement, "_played", played)
    monkeypatch.setattr(agreement, "_rows", lambda name, predicted, measured: iter([row]))
    told: list[Row] = []
    rows, failed = judge(["grpo", "ppo"], 1, None, Path("runs"), told.append)
    assert rows == told == [row]
    assert failed == {"grpo": "no engine (runs/x)"}
    said = page(rows, failed, 1)
    assert "1 of 1 within their bounds" in said and "- grpo did not end: no engine" in said


def test_whoever_ends_one_run_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in one of the runs is no failure of it, after which the next one would begin."""
    begun: list[str] = []

    def measured(scenario: Scenario, out: Path) -> tuple[Timeline, dict[str, str]]:
        begun.append(scenario.name)
        header = msgspec.structs.replace(header_of(scenario, "measured"), status="cancelled")
        return Timeline.of(header, []), {"run_dir": str(out / "run")}

    monkeypatch.setattr("lab.cli.execute.measure", measured)
    with pytest.raises(typer.Exit) as left:
        judge(["grpo", "dpo"], 3, None, tmp_path, lambda row: None)
    assert left.value.exit_code == 1
    assert begun == [load(cases()["grpo"]).name]
    assert "the run was cancelled" in capsys.readouterr().err
