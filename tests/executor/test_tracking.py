"""MLflow is told of a run: a data base beside it, or a server; one that does not answer is said, and waited for briefly."""

import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from executor import tracking
from executor.tracking import Tracker, parameters, tags
from lab.scenario import Scenario

Make = Callable[..., Scenario]


def begin(scenario: Scenario, folder: Path, uri: str) -> dict[str, object]:
    about = tags(scenario, folder, {"python": "3.11"})
    return {
        "uri": uri, "experiment": scenario.name, "run": folder.name, "parameters": parameters(scenario), "tags": about,
        "artifacts": folder.parent.as_uri(),
    }  # fmt: skip


def test_settings_versions_and_numbers_are_in_the_data_base(
    scenario: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: a run that is resumed goes on with what it had, and keeps the numbers of both attempts."""
    monkeypatch.delenv(tracking.VARIABLE, raising=False)
    chosen, folder = scenario("quickstart"), tmp_path / "a-run"
    said: list[str] = []
    for attempt, status in enumerate(("cancelled", "done")):
        tracker = Tracker(begin(chosen, folder, tracking.address(folder)), said.append)
        tracker.step(attempt, {"reward": 0.5 + attempt, "distinct_ratio/2": 0.25, "kl": float("nan")}, time.time())
        tracker.close(status)
    assert said == []
    with sqlite3.connect(tmp_path / tracking.FILE) as base:
        assert base.execute("select name, status from runs").fetchall() == [("a-run", "FINISHED")]
        assert base.execute("select name from experiments where name != 'Default'").fetchall() == [(chosen.name,)]
        rows = base.execute("select key, step, value from metrics order by key, step").fetchall()
        assert rows == [
            ("distinct_ratio/2", 0, 0.25),
            ("distinct_ratio/2", 1, 0.25),
            ("reward", 0, 0.5),
            ("reward", 1, 1.5),
        ]
        params = dict(base.execute("select key, value from params").fetchall())
        told = dict(base.execute("select key, value from tags").fetchall())
    assert params["algorithm.name"] == chosen.algorithm.name
    assert float(params["optimizer.lr"]) == chosen.optimizer.lr
    assert params["place.actor.train.pool"] == "all"
    assert told["lab.digest"] == chosen.digest and len(told["lab.revision"]) >= 5
    assert told["lab.weights.actor"].startswith("random:") and told["lab.software.python"] == "3.11"
    assert {path.name for path in tmp_path.iterdir()} == {tracking.FILE}


def test_a_server_that_does_not_answer_is_said_once(scenario: Make, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{closed.getsockname()[1]}"
    said: list[str] = []
    tracker = Tracker(begin(scenario("quickstart"), tmp_path, uri), said.append)
    for step in range(5):
        tracker.step(step, {"reward": 1.0}, time.time())
    tracker.close("done")
    assert len(said) == 1
    assert said[0].startswith(f"MLflow at {uri} is not told of this run: ")


def test_a_server_that_takes_calls_and_says_nothing_holds_nothing_up(
    scenario: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "CLOSE_S", 0.5)
    said: list[str] = []
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        tracker = Tracker(begin(scenario("quickstart"), tmp_path, uri), said.append)
        for step in range(20_000):
            tracker.step(step, {"reward": 1.0}, 0.0)
        assert time.monotonic() - start < 5
        tracker.close("done")
    assert len(said) == 1 and "did not take everything within 0.5 s" in said[0]
    assert tracker._client is not None and tracker._client.returncode != 0


@pytest.mark.parametrize(
    ("content", "why"), [(None, "unable to open database file"), (b"x" * 5000, "file is not a database")]
)
def test_a_data_base_that_cannot_be_written_is_said_at_once(tmp_path: Path, content: bytes | None, why: str) -> None:
    """MLflow itself would go on trying, and the run's end would wait for it."""
    file = tmp_path / "mlflow.db"
    file.mkdir() if content is None else file.write_bytes(content)
    said: list[str] = []
    told = {"uri": f"sqlite:///{file}", "experiment": "x", "run": "r", "parameters": {}, "tags": {"lab.run": "r"}}
    tracker = Tracker(told, said.append)
    began = time.monotonic()
    tracker.close("done")
    assert time.monotonic() - began < tracking.CLOSE_S
    assert len(said) == 1 and why in said[0]


def test_an_address_of_nothing_is_said(scenario: Make, tmp_path: Path) -> None:
    said: list[str] = []
    tracker = Tracker(begin(scenario("quickstart"), tmp_path, "nowhere://x"), said.append)
    tracker.close("done")
    assert len(said) == 1 and "nowhere" in said[0]


def test_the_server_that_is_named_is_the_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(tracking.VARIABLE, raising=False)
    assert tracking.address(tmp_path / "run") == f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv(tracking.VARIABLE, "http://tracking:5000")
    assert tracking.address(tmp_path / "run") == "http://tracking:5000"


def test_every_setting_is_a_parameter(scenario: Make) -> None:
    chosen = scenario("quickstart")
    found = parameters(chosen)
    assert found["name"] == chosen.name and found["seed"] == str(chosen.seed)
    assert all(isinstance(value, str) and "{" not in value for value in found.values())
    assert [name for name in found if name.startswith("place.actor.generate.0.")]
