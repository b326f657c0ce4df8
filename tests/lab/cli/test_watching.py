"""What is asked of watching at the command line: wrong questions are refused before anything starts."""

import json
import re
from pathlib import Path

import pytest

from lab.cli import app, told
from lab.cli.dashboard import FILES
from lab.cli.execute import progress
from lab.cli.watching import Asked, watch
from lab.load import load
from lab.runs import begin

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


@pytest.mark.parametrize(
    "target", ["foo", "a:b", "http://x:1", "x:1/metrics", "x:0", "x:65536", ":9464", "a b:1", "", "::1:9464"]
)
def test_a_target_that_prometheus_would_refuse_is_refused(
    tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("dashboard", str(tmp_path / "new"), "--target", "ok-host.example:9464", "--target", target) == 2
    assert f"--target: {target!r} is no address" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("target", ["127.0.0.1:9464", "[::1]:9464", "node_1.lab:1"])
def test_other_targets_are_taken(tmp_path: Path, target: str) -> None:
    assert status("dashboard", str(tmp_path), "--target", target) == 0


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert status("dashboard", str(tmp_path / "file")) == 2
    assert "name a folder that can be written" in capsys.readouterr().err


@pytest.mark.parametrize("columns", ["160", "80"])
def test_a_terminal_shows_steps_stage_time_left_and_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    """All of it, on a narrow one too."""
    monkeypatch.setenv("FORCE_COLOR", "1"), monkeypatch.setenv("COLUMNS", columns)
    numbers = "42.1 samples/s · 3.24e+03 tokens/s · reward 0.00699 · loss -0.13 · KL 0.12 · lag 0.96"
    with progress(100, lambda: numbers) as step:
        step("update_actor", 22)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).replace("\n", "")
    assert all(text in shown for text in ("update_actor", "22/100", "ETA", "-:--:--"))
    assert numbers.replace(" ", "") in shown.replace(" ", "")


def test_what_is_no_terminal_shows_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with progress(8) as step:
        assert step is None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("port", "place"), [("0", "http://127.0.0.1:"), ("[::1]:0", "http://[::1]:")])
def test_a_port_that_the_system_chose_is_told(
    tmp_path: Path, port: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = load(QUICK)
    with watch(chosen, begin(tmp_path, chosen, "measured"), Asked(metrics_port=port, no_metrics=False)) as watched:
        assert watched.address is not None and watched.address[1] > 0
        said = capsys.readouterr().err
        assert f"{place}{watched.address[1]}/metrics" in said
