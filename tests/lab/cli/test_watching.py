"""What is asked of watching at the command line: wrong questions are refused before anything starts."""

import json
from pathlib import Path

import pytest

from lab.cli import app, told
from lab.cli.dashboard import FILES
from lab.cli.execute import progress

QUICK = "scenarios/quickstart.yaml"


def status(*arguments: str) -> int:
    return told(lambda: app(args=list(arguments), standalone_mode=False)) or 0


@pytest.mark.parametrize(("command", "words", "message"), [
    ("execute", ["--metrics-port", "seven"], "--metrics-port: seven is no port"),
    ("run", ["--metrics-port", "99999"], "--metrics-port: 99999 is no port"),
    ("execute", ["--metrics-port", "9464", "--no-metrics"], "--metrics-port: a port, and no metrics"),
])  # fmt: skip
def test_a_wrong_port_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    command: str, words: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.delenv("LAB_NO_METRICS", raising=False)
    assert status(command, QUICK, "--out", str(tmp_path / "runs"), *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_files_that_watch_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("dashboard", str(tmp_path / "new"), "--target", "a:1", "--target", "b:2", "--kl-cap", "0.5") == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "new" / name) for name in FILES]
    assert json.loads((tmp_path / "new" / FILES[0]).read_text())["panels"]
    assert "> 0.5" in (tmp_path / "new" / FILES[1]).read_text()
    assert "- a:1" in (tmp_path / "new" / FILES[2]).read_text() and "- b:2" in (tmp_path / "new" / FILES[2]).read_text()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert status("dashboard", str(tmp_path / "file")) == 2
    assert "name a folder that can be written" in capsys.readouterr().err


def test_a_terminal_shows_steps_stage_time_left_and_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1"), monkeypatch.setenv("COLUMNS", "160")
    with progress(8, lambda: "3 samples/s · reward 0.5") as step:
        step("rollout", 2)
    shown = capsys.readouterr().err
    assert all(text in shown for text in ("rollout", "2/8", "ETA", "3 samples/s · reward 0.5"))


def test_what_is_no_terminal_shows_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with progress(8) as step:
        assert step is None
    assert capsys.readouterr().err == ""
