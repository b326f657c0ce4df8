"""What the command line says of a run that has ended: how, what was not struck, what was idle, where samples went."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from executor.injecting import FILE as STRIKES
from lab.cli.execute import _not_struck
from lab.cli.report import report
from lab.cli.show import unfinished
from lab.load import load
from lab.metrics import about_samples, summarise
from lab.publication import idles
from lab.runs import begin, finish
from lab.scenario import Scenario
from lab.timeline import Span, Timeline, header_of
from tests.strategies import play

ENGINE = "actor.generate[0]"


def scenario(**changes: Any) -> Scenario:
    return load("scenarios/quickstart.yaml").replace({"num_steps": 2} | changes)


@pytest.mark.parametrize(("status", "error", "said"), [
    ("cancelled", "", "the run was cancelled\n"),
    ("failed", "ValueError: x", "the run failed: ValueError: x\n"),
    ("failed", "", "the run failed: failed\n"),
])  # fmt: skip
def test_a_run_that_was_asked_to_end_has_not_failed(
    tmp_path: Path, status: str, error: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished(tmp_path, status, error)
    assert capsys.readouterr().err == f"{said}  what it finished is in {tmp_path}\n"


def stated() -> Scenario:
    faults = [
        {"kind": "worker_lost", "at": at, "target": ENGINE, "recovery": "restart", "detect": 2.0} for at in (1.0, 20.0, 52.0)
    ]  # fmt: skip
    return scenario(faults=faults)


def test_what_was_struck_after_the_last_finished_step_counts_as_struck(tmp_path: Path) -> None:
    chosen = stated()
    timeline = play(chosen, lambda *_: 0.5, "measured")
    end = max(span.end_s for span in timeline.spans)
    assert 1.0 < end < 20.0
    assert [text[:9] for text in _not_struck(chosen, timeline, tmp_path)] == ["faults[1]", "faults[2]"]
    line = {
        "entry": 1,
        "target": ENGINE,
        "stated_s": 20.0,
        "at_s": 20.0,
        "kind": "worker_lost",
        "pid": 1,
        "how": "SIGKILL",
    }
    (tmp_path / STRIKES).write_text(json.dumps(line) + "\n")
    (left,) = _not_struck(chosen, timeline, tmp_path)
    assert left == f"faults[2].at is 52 s, and the run ended at {end:.1f} s: {ENGINE} was not struck"
    assert _not_struck(scenario(), timeline, tmp_path) == []


def test_a_fault_that_came_while_its_target_was_away_is_told(tmp_path: Path) -> None:
    line = {"target": ENGINE, "kind": "worker_lost"}
    lines = [
        line | {"entry": 0, "at_s": 1.0, "stated_s": 1.0, "pid": 7, "how": "SIGKILL"},
        line | {"entry": 1, "at_s": 20.04, "stated_s": 20.0, "pid": None, "how": "nobody there"},
        line | {"entry": 2, "at_s": 52.0, "stated_s": 52.0, "pid": 9, "how": "SIGSTOP"},
    ]
    (tmp_path / STRIKES).write_text("".join(json.dumps(one) + "\n" for one in lines))
    chosen = stated()
    told = _not_struck(chosen, play(chosen, lambda *_: 0.5, "measured"), tmp_path)
    assert told == [f"faults[1] struck nobody at 20.0 s: {ENGINE} was away"]


def test_a_run_that_waits_for_engines_to_look_for_weights_is_told() -> None:
    work = [
        Span(span_id=str(k), resource="a", worker="a", pool="all", step=k, stage="update_actor", start_s=100.0 * k,
             end_s=100.0 * k + 5.0)
        for k in range(3)
    ]  # fmt: skip
    pulls = scenario(weight_sync={"trigger": "pull", "every": "100 s"})
    told = idles(pulls, work)
    assert told is not None
    assert told[0] == "weight_sync.every" and "every 100 s" in told[1] and "in 15 s of the run" in told[1]
    assert idles(scenario(weight_sync={"trigger": "pull", "every": "15 s"}), work) is None
    assert idles(scenario(), work) is None


def test_ages_and_fates_are_told_only_where_there_is_something_to_tell() -> None:
    calm = {"lag": {"mean": 0.0, "max": 0}, "samples": {"issued": 64, "trained": 64, "lost": 0, "dropped": 0}}
    assert about_samples(calm) == []
    assert about_samples({"lag": {"mean": None, "max": None}, "samples": {}}) == []
    late = {
        "lag": {"mean": 1.857, "max": 2},
        "samples": {"issued": 1248, "trained": 1152, "buffered": 80, "in_flight": 16},
    }
    assert about_samples(late) == [
        "lag: samples were 1.86 versions old when trained, at most 2",
        "samples: 1,248 issued, 1,152 trained, 80 left in the buffer, 16 left on the way",
    ]


def test_a_report_of_a_failed_run_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = scenario()
    folder = begin(tmp_path, chosen, "measured")
    header = msgspec.structs.replace(header_of(chosen, "measured"), status="failed", error="RuntimeError: no port")
    played = play(chosen, lambda *_: 1.0, "measured")
    finish(folder, chosen, Timeline.of(header, played.spans))
    report(folder)
    assert "it ended early: RuntimeError: no port" in capsys.readouterr().out
    assert summarise(played)["status"] == "done"


def test_a_page_that_cannot_be_written_does_not_keep_the_summary_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = scenario()
    folder = begin(tmp_path, chosen, "simulated")
    finish(folder, chosen, play(chosen, lambda *_: 1.0))
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    with pytest.raises(typer.Exit) as left:
        report(folder)
    told = capsys.readouterr()
    assert left.value.exit_code == 1
    assert "report.html is not written: Is a directory" in told.err
    assert f"run folder: {folder}" in told.out and "report: " not in told.out
