"""`lab validate` as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from lab.cli import told
from lab.cli.validate import validate

LAB = [str(Path(sys.executable).parent / "lab")]


def lab(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    clean = {"PATH": "/usr/bin:/bin", "COLUMNS": "160"}
    return subprocess.run([*LAB, *map(str, arguments)], capture_output=True, text=True, env=clean, timeout=120)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with one log of thirty steps that all cost the same."""
    steps = pd.DataFrame({"log": "a.log", "step": range(1, 31), "timing_s/gen": 2.0})
    steps[["prompt_length/mean", "response_length/mean", "response_length/max"]] = [100.0, 200.0, 400.0]
    steps.to_csv(tmp_path / "verl_log_steps.csv", index=False)
    return tmp_path


def test_without_data_one_message_and_status_2() -> None:
    done = lab("validate", "--set", "verl-logs")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: --data: no folder with validation data is named")
    assert "LAB_VALIDATION_DATA" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "verl"], "there is no validation set 'verl'"),
        (["--half", "both"], "there is no half 'both'"),
        (["--data", "/nowhere"], "/nowhere is no folder"),
        (["--output", "accuracy.html"], "ends in none of .md, .json"),
    ],
)
def test_wrong_options_are_told_in_one_message(options: list[str], message: str) -> None:
    done = lab("validate", *options)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_it_prints_tables_writes_the_page_and_says_what_it_skipped(data: Path) -> None:
    page = data / "kept" / "accuracy.md"
    done = lab("validate", "--data", data, "--set", "verl-logs", "--set", "published-training", "--output", page)
    assert done.returncode == 0, done.stderr
    assert "generation" in done.stdout and "calibrated on steps 2 to 20" in done.stdout
    assert "skipped published-training: published_cases.csv is not in" in done.stderr
    assert "| generation | 10 | +0.0% |" in page.read_text() and "`published-training`" in page.read_text()


def test_json_is_one_object_without_rows_and_the_file_has_them(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = data / "accuracy.json"
    validate(data=data, chosen=["verl-logs"], json=True, output=file)
    printed, written = json.loads(capsys.readouterr().out), json.loads(file.read_text())
    assert printed["sets"]["verl-logs"]["accuracy"]["generation"]["mape"] == pytest.approx(0, abs=1e-9)
    assert "rows" not in printed["sets"]["verl-logs"] and len(written["sets"]["verl-logs"]["rows"]) == 10


def test_a_file_that_is_no_log_is_told_by_column(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data / "verl_log_steps.csv").write_text("a,b\n1,2\n")
    assert told(lambda: validate(data=data, chosen=["verl-logs"])) == 2
    assert "verl_log_steps.csv: log: there is no such column" in capsys.readouterr().err
