"""A watch over a run: what it answers Prometheus, logs and keeps; and that nothing that fails there fails the run."""

import json
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from executor.exposing import address_of
from executor.journal import FILE as LOG
from executor.observed import Distribution
from executor.watching import Watch, Watched
from lab import devices
from lab.errors import InputError
from lab.scenario import Scenario
from lab.timeline import Span
from lab.watched import BY_NAME, LABELS, METRICS

Make = Callable[..., Scenario]
HERE = ("127.0.0.1", 0)


def span(stage: str, step: int, start: float, end: float, version: int, **attrs: Any) -> Span:
    worker = "actor.generate[0]" if stage == "rollout" else "actor.train[0]"
    return Span(
        span_id=f"{stage}/{step}/{worker}", resource=worker, step=step, stage=stage, pool="all", worker=worker,
        start_s=start, end_s=end, policy_version=version, attrs=attrs,
    )  # fmt: skip


def two_steps(watch: Watch) -> None:
    """What a ledger would tell."""
    watch.begin(0.0)
    for step in range(2):
        at = 10.0 * step
        watch.observe(
            "rollout", step, [{"spans": [span("rollout", step, at, at + 4, step, samples=8, response_tokens=80)]}]
        )
        edges = BY_NAME["reward_distribution"].edges
        spread = Distribution(counts=(0,) * len(edges) + (8,), total=24.0)
        lengths = Distribution(counts=(0, 0, 0, 8) + (0,) * (len(BY_NAME["response_tokens"].edges) - 3), total=64.0)
        rewards = {"distributions": {"reward_distribution": spread, "response_tokens": lengths}}
        watch.observe("advantage", step, [{"spans": [span("advantage", step, at + 4, at + 5, step)]} | rewards])
        watch.observe(
            "update_actor", step, [{"spans": [span("update_actor", step, at + 5, at + 9, step + 1, samples=8)]}]
        )
        watch.observe("weight_sync", step, [{"spans": [span("weight_sync", step, at + 9, at + 10, step + 1)]}])
        watch.row(step, {"step": step, "reward": 3.0, "kl": 0.5}, step + 1)


@pytest.fixture
def watched(scenario: Make, tmp_path: Path) -> Iterator[Watch]:
    folder = tmp_path / "a-run"
    folder.mkdir()
    watch = Watch(scenario("quickstart"), folder, Watched(metrics=HERE, devices_every_s=0.02), pytest.fail)
    yield watch
    watch.close()


def settled(watch: Watch) -> None:
    """Everything that was told has been seen."""
    import threading

    done = threading.Event()
    watch._put(done.set)
    assert done.wait(30)


def scraped(watch: Watch) -> dict[str, list[Any]]:
    assert watch.address is not None
    with urllib.request.urlopen(f"http://{watch.address[0]}:{watch.address[1]}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {family.name: family.samples for family in families}


def test_every_series_has_the_labels_of_the_latest_step_and_none_stays_behind(watched: Watch) -> None:
    two_steps(watched)
    settled(watched)
    found = scraped(watched)
    assert {name.removeprefix("lab_") for name in found} <= {metric.name.removesuffix("_total") for metric in METRICS}
    for name, samples in found.items():
        assert all(set(LABELS) <= sample.labels.keys() for sample in samples), name
        assert all(sample.labels["experiment_id"] == "a-run" for sample in samples)
        assert len({sample.labels["iteration"] for sample in samples} - {"-1"}) == 1
    assert [(s.labels["iteration"], s.labels["model_version"], s.value) for s in found["lab_reward"]] == [
        ("1", "2", 3.0)
    ]
    assert [(s.labels["model_version"], s.value) for s in found["lab_generated_tokens_per_second"]] == [("1", 20.0)]
    assert [s.value for s in found["lab_step_seconds"]] == [10.0]
    assert {s.labels["fate"]: s.value for s in found["lab_samples"]} == {"generated": 16.0, "trained": 16.0}


def test_a_histogram_is_of_the_latest_step_and_adds_up(watched: Watch) -> None:
    two_steps(watched)
    settled(watched)
    samples = scraped(watched)["lab_reward_distribution"]
    buckets = [(s.labels["le"], s.value) for s in samples if s.name.endswith("_bucket")]
    assert buckets[-1] == ("+Inf", 8.0) and {value for _, value in buckets[:-1]} == {0.0}
    lengths = scraped(watched)["lab_response_tokens"]
    assert {s.name.rpartition("_")[2]: s.value for s in lengths if "le" not in s.labels} == {"count": 8.0, "sum": 64.0}
    assert [s.value for s in lengths if s.labels.get("le") in ("4.0", "8.0")] == [0.0, 8.0]


def test_every_line_of_the_log_has_the_labels(watched: Watch) -> None:
    two_steps(watched)
    watched.note("fault", level="warning", kind="worker_lost", samples=3)
    watched.close("failed", "it broke")
    rows = [json.loads(line) for line in (watched.folder / LOG).read_text().splitlines()]
    assert all({"at", "level", "event", *LABELS} <= row.keys() for row in rows)
    assert {row["experiment_id"] for row in rows} == {"a-run"}
    assert [row["event"] for row in rows].count("stage") == 8
    assert [(row["iteration"], row["reward"]) for row in rows if row["event"] == "step"] == [(0, 3.0), (1, 3.0)]
    assert [row["kind"] for row in rows if row["event"] == "fault"] == ["worker_lost"]
    assert (rows[-1]["event"], rows[-1]["level"], rows[-1]["status"], rows[-1]["error"]) == (
        "ended", "error", "failed", "it broke",
    )  # fmt: skip


def test_devices_and_this_process_are_read(watched: Watch) -> None:
    watched.begin(0.0)
    while watched._readings.num_moments < 3:
        settled(watched)
    found = scraped(watched)
    assert [s.labels["worker"] for s in found["lab_worker_memory_bytes"]] == ["driver"]
    assert all(0 <= s.value <= 1 for s in found["lab_device_use_ratio"]) and found["lab_device_use_ratio"]
    watched.close()
    table = devices.read(watched.folder)
    assert {"device", "worker"} <= set(table.column("kind").to_pylist())
    assert min(row["memory_bytes"] for row in table.to_pylist() if row["kind"] == "worker") > 1e6


def test_what_was_read_before_time_zero_lies_before_it(scenario: Make, tmp_path: Path) -> None:
    start = time.monotonic()
    watch = Watch(scenario("quickstart"), tmp_path, Watched(devices_every_s=0.01), pytest.fail)
    while watch._readings.num_moments < 3:
        settled(watch)
    watch.begin(time.monotonic())
    settled(watch)
    before = watch._readings.num_moments
    while watch._readings.num_moments < before + 3:
        settled(watch)
    watch.close()
    moments = sorted(set(devices.read(tmp_path).column("at_s").to_pylist()))
    assert start - time.monotonic() < moments[0] < moments[2] <= 0 < moments[-2] < moments[-1] < 60


def test_the_line_for_the_terminal(watched: Watch) -> None:
    assert watched.told() == ""
    two_steps(watched)
    settled(watched)
    assert watched.told() == "3.2 samples/s · 20 tokens/s · reward 3 · KL 0.5 · lag 0"


def test_nothing_answers_and_nothing_runs_after_the_end(watched: Watch) -> None:
    address = watched.address
    watched.close()
    watched.close()
    with socket.socket() as again:
        again.bind(address)
    assert not watched._thread.is_alive()


def test_a_port_that_is_taken_is_said_once_and_the_run_goes_on(scenario: Make, tmp_path: Path) -> None:
    said: list[str] = []
    with socket.socket() as taken:
        taken.bind(HERE)
        taken.listen()
        watch = Watch(scenario("quickstart"), tmp_path, Watched(metrics=taken.getsockname()), said.append)
        two_steps(watch)
        watch.close()
    assert len(said) == 1 and "Address already in use" in said[0] and str(taken) not in said[0]
    events = [json.loads(line)["event"] for line in (tmp_path / LOG).read_text().splitlines()]
    assert events.count("warning") == 1 and events[-1] == "ended"


def test_an_address_of_another_machine_is_said_and_the_run_goes_on(scenario: Make, tmp_path: Path) -> None:
    said: list[str] = []
    watch = Watch(scenario("quickstart"), tmp_path, Watched(metrics=("192.0.2.1", 9464)), said.append)
    two_steps(watch)
    watch.close()
    assert len(said) == 1 and "192.0.2.1:9464" in said[0]


def test_a_disk_that_refuses_and_a_report_that_is_wrong_are_said_once(scenario: Make, tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / LOG).mkdir()
    watch = Watch(scenario("quickstart"), tmp_path, Watched(), said.append)
    for _ in range(3):
        watch.observe("rollout", 0, [{"spans": None}])
    two_steps(watch)
    watch.close()
    assert sorted("reports" in text for text in said) == [False, True]
    assert watch._observed.number("step_seconds") == 10.0


@pytest.mark.parametrize(("text", "expected"), [
    (None, ("127.0.0.1", 9464)), ("0", ("127.0.0.1", 0)), ("0.0.0.0:80", ("0.0.0.0", 80)), ("[::1]:80", ("::1", 80)),
])  # fmt: skip
def test_an_address(text: str | None, expected: tuple[str, int]) -> None:
    assert address_of(text) == expected


@pytest.mark.parametrize("text", ["", "x", "host:", "70000", "host:-1", "1.5"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no port"):
        address_of(text or " ")
