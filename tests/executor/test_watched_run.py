"""A real run that a real Prometheus reads while it goes on: every query of the dashboard returns data, every rule loads."""

import json
import shutil
import socket
import sqlite3
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from executor import tracing, tracking
from executor.journal import FILE as LOG
from executor.run import execute
from executor.watching import Watch, Watched
from lab import devices, iterations, operators
from lab.alerts import Thresholds, prometheus_file, rules, rules_file
from lab.dashboard import queries
from lab.scenario import Scenario
from lab.watched import LABELS

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="no prometheus: apt-get install prometheus (make test does it)"
    ),
]
Make = Callable[..., Scenario]


class Prometheus:
    """One of this machine's own, asked by HTTP."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, path: str, **words: str) -> Any:
        address = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(words)}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            return json.loads(answer.read())["data"]

    def values(self, query: str) -> list[float]:
        return [float(row["value"][1]) for row in self.ask("query", query=query)["result"]]


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """It reads the target four times a second, and has the alert rules."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "alerts.yml").write_text(yaml.safe_dump(rules_file(Thresholds())))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(prometheus_file([target], ["alerts.yml"], 0.25)))
    command = [
        "prometheus",
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            found = Prometheus(port)
            wait_until(lambda: reached(found), f"no answer: {(folder / 'prometheus.log').read_text()[-2000:]}")
            yield found
        finally:
            process.terminate()
            process.wait(30)


def reached(found: Prometheus) -> bool:
    try:
        return bool(found.values("up"))
    except OSError:
        return False


def wait_until(holds: Callable[[], bool], message: str, timeout_s: float = 40) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, message
        time.sleep(0.2)


def test_a_run_is_watched(local_ray: None, scenario: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tracking.VARIABLE, raising=False)
    folder, server = tmp_path / "a-run", tmp_path / "prometheus"
    folder.mkdir(), server.mkdir()
    for name, value in tracing.variables(folder, 1, 1).items():
        monkeypatch.setenv(name, value)
    evaluate = {"every_steps": 2, "prompts": 4}
    chosen = scenario("ppo-tiny", num_steps=4, evaluate=evaluate, checkpoint={"every_steps": None})
    said: list[str] = []
    watched = Watched(metrics=("127.0.0.1", 0), tracking_uri=tracking.address(folder), devices_every_s=0.25)
    watch = Watch(chosen, folder, watched, said.append)
    assert watch.address is not None
    try:
        with prometheus(server, f"127.0.0.1:{watch.address[1]}") as found:
            timeline = execute(chosen, folder, watch=watch)
            assert (timeline.header.status, timeline.header.error) == ("done", "")
            assert_everything_is_shown(found, folder.name)
            assert_labels(found, chosen.num_steps)
    finally:
        watch.close()
    assert said == []
    assert_kept(folder, timeline, chosen)


def assert_everything_is_shown(found: Prometheus, run: str) -> None:
    asked = [query.replace("$experiment", run) for query in queries()]
    empty = set(asked)

    def answered() -> bool:
        empty.difference_update({query for query in empty if found.values(query)})
        return not empty

    wait_until(answered, f"these queries return nothing: {empty}")
    loaded = [rule for group in found.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"]: rule["health"] for rule in loaded} == dict.fromkeys(
        (r.name for r in rules(Thresholds())), "ok"
    )
    calm = ("ReportingStopped", "RunGone", "DeviceIdle")  # which a short pause makes pending at most
    assert "firing" not in {rule["state"] for rule in loaded if rule["name"] in calm}


def assert_labels(found: Prometheus, num_steps: int) -> None:
    """Every series has them; only one step's is there at a time, and the steps before were seen."""
    now = found.ask("query", query='{__name__=~"lab_.+"}')["result"]
    assert now and all(set(LABELS) <= row["metric"].keys() for row in now)
    assert found.values("count(lab_reward)") == [1.0]
    assert found.values("max without (iteration, model_version) (lab_steps_total)") == [float(num_steps)]
    steps = {
        row["metric"]["iteration"] for row in found.ask("query", query="last_over_time(lab_reward[10m])")["result"]
    }
    assert "3" in steps and len(steps) >= 2


def assert_kept(folder: Path, timeline: Any, chosen: Scenario) -> None:
    rows = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    assert [row["iteration"] for row in rows if row["event"] == "step"] == [0, 1, 2, 3]
    assert all(set(LABELS) <= row.keys() for row in rows) and rows[-1]["event"] == "ended"
    table = devices.read(folder)
    assert set(table.column("kind").to_pylist()) == {"device", "worker", "network"}
    assert iterations.write(timeline, folder / iterations.FILE)
    assert pq.read_table(folder / iterations.FILE).num_rows == len(iterations.iterations(timeline)) > 4
    traced = operators.latest(folder)
    assert {"rollout on actor.generate.0", "update_actor on actor.train.0"} <= traced.keys()
    assert operators.of_trace(traced["update_actor on actor.train.0"])[0].self_s > 0
    with sqlite3.connect(folder.parent / tracking.FILE) as base:
        told = base.execute("select step, value from metrics where key = 'reward' order by step").fetchall()
    rewards = [row["reward"] for row in timeline.header.learning]
    assert told == [(step, pytest.approx(reward)) for step, reward in enumerate(rewards)]
