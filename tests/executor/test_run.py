"""Whole runs of real workers: Ray, vLLM and DeepSpeed."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from executor import checkpoint
from executor.run import execute
from lab import runs
from lab.dataflow import conforms
from lab.load import dump
from lab.scenario import Scenario
from lab.timeline import Timeline
from lab.wiring import build
from profiles.profile import datasheet
from simulator.run import simulate

pytestmark = pytest.mark.real
Make = Callable[..., Scenario]
CLOSE = 1e-3


def assert_complete(scenario: Scenario, timeline: Timeline, folder: Path) -> None:
    """A run that is done: lawful, whole on disk, every step trained on every sample."""
    header, dataflow = timeline.header, build(scenario)
    assert (header.status, header.error) == ("done", "")
    assert conforms(dataflow, timeline) == []
    expected = {
        f"{stage}/{step}/{worker}"
        for stage, node in dataflow.nodes.items()
        for step in dataflow.steps(stage)
        for worker in node.workers
    }
    assert {span.span_id for span in timeline.stages()} == expected
    ids = {span.span_id for span in timeline.spans}
    assert len(ids) == len(timeline.spans)
    assert all(set(span.cause_ids) <= ids for span in timeline.spans)
    assert sorted(span.span_id for span in runs.finished_spans(folder)) == sorted(ids)
    total = scenario.workload.samples_per_step * scenario.num_steps
    assert header.samples["issued"] == header.samples["trained"] == total == sum(header.samples.values()) - total


def assert_ops_inside_their_stage(timeline: Timeline) -> None:
    stages = {span.span_id: span for span in timeline.spans if not span.op}
    for span in timeline.spans:
        if span.op and span.resource == span.worker:
            outer = stages[span.span_id.split("#")[0]]
            assert outer.start_s <= span.start_s <= span.end_s <= outer.end_s
            assert (outer.worker, outer.step) == (span.worker, span.step)


def test_a_synchronous_run(local_ray: None, scenario: Make, tmp_path: Path) -> None:
    saving = {"every_steps": 1, "blocking": False, "keep": {"latest": 1, "best": 1}}
    chosen, seen = scenario("quickstart", num_steps=3, checkpoint=saving), list[tuple[str, int]]()
    timeline = execute(chosen, tmp_path, lambda stage, finished: seen.append((stage, finished)))
    assert_complete(chosen, timeline, tmp_path)
    assert_ops_inside_their_stage(timeline)
    setup = [span for span in timeline.spans if span.stage == "setup"]
    assert {span.worker for span in setup} == set(chosen.workers)
    assert all(span.step == -1 and span.end_s <= 0 for span in setup)
    assert timeline.header.startup_s >= -min(span.start_s for span in setup)
    assert [(row["step"], row["logprob_gap"] < CLOSE) for row in timeline.header.learning] == [
        (step, True) for step in range(3)
    ]
    assert all(0 <= row["reward"] <= 1 for row in timeline.header.learning)
    assert seen[0] == ("setup", 0)
    assert seen[-1][1] == 3
    assert_saved_beside(timeline, tmp_path)


def assert_saved_beside(timeline: Timeline, folder: Path) -> None:
    """A checkpoint after each of three steps, written beside the run; the last and the best one are left."""
    writes = [span for span in timeline.spans if (span.stage, span.op) == ("checkpoint", "write")]
    assert [(span.step, span.resource) for span in writes] == [(step, "actor.train[0].write") for step in range(3)]
    rewards = [row["reward"] for row in timeline.header.learning]
    kept = sorted({2, rewards.index(max(rewards))})
    assert checkpoint.steps(folder / "checkpoints") == kept == timeline.header.storage["steps"]
    ranks = [checkpoint.Rank(role="actor", rank=0, world=1)]
    sizes = [checkpoint.verify(checkpoint.folder_of(folder / "checkpoints", step), ranks)["files"] for step in kept]
    held = sum(entry["bytes"] for files in sizes for entry in files.values())
    assert timeline.header.storage["bytes"] == held < timeline.header.storage["written_bytes"]
    observed = [decision["observed"] for decision in timeline.header.storage["decisions"]]
    assert [row["score"] for row in observed[-1]] == [rewards[row["step"]] for row in observed[-1]]


@pytest.mark.full
def test_a_run_one_step_off_with_two_engines_and_a_critic(local_ray: None, scenario: Make, tmp_path: Path) -> None:
    """They differ in speed, so that what each gets of a step is a decision; a simulation decides the same."""
    changes = {
        "place": {"actor.generate": [{"pool": "all"}, {"pool": "all", "speed": 2.0}]},
        "rollout": {"dispatch": "length_buckets"},
    }
    chosen = scenario("ppo-tiny", num_steps=3, checkpoint={"every_steps": None}, **changes)
    timeline = execute(chosen, tmp_path)
    simulated = simulate(chosen, {"cpu-core": datasheet("cpu-core")})
    assert decisions(timeline) == decisions(simulated)
    assert len({str(prompts) for _, _, prompts, *_ in decisions(timeline)}) > 2, "it learns from what came back"
    assert_complete(chosen, timeline, tmp_path)
    rollouts = [span for span in timeline.stages() if span.stage == "rollout"]
    assert {(span.step, span.policy_version) for span in rollouts} == {(0, 0), (1, 0), (2, 1)}
    assert all(row["logprob_gap"] < CLOSE for row in timeline.header.learning)
    spans = {span.span_id: span for span in timeline.stages()}
    ahead, training = spans["rollout/1/actor.generate[0]"], spans["weight_sync/0/actor.train[0]"]
    assert ahead.start_s < training.start_s


def decisions(timeline: Timeline) -> list[tuple[Any, ...]]:
    """Of every rollout of a step on an engine: what it was given, by which rule, which saw what."""
    rollouts = [span for span in timeline.stages() if span.stage == "rollout"]
    keys = ("prompts", "speed", "predicted_tokens")
    return sorted((span.span_id, span.attrs["dispatch"], *(span.attrs[key] for key in keys)) for span in rollouts)


FAILURES = {"raises": "raise ArithmeticError('reward went wrong')", "dies": "os.kill(os.getpid(), 9)"}
JUDGE = """
import os
CALLS = []
def judge(prompt, response):
    CALLS.append(1)
    if len(CALLS) > 32:
        {}
    return 0.0
"""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raises", "reward went wrong"),
        pytest.param("dies", "process of reward.score[0] died", marks=pytest.mark.full),
    ],
)
def test_a_worker_that_fails_ends_the_run_and_keeps_finished_steps(
    local_ray: None, scenario: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, message: str
) -> None:
    (tmp_path / f"judge_that_{kind}.py").write_text(JUDGE.format(FAILURES[kind]))
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = {"pool": "all", "kind": "function", "function": f"judge_that_{kind}:judge"}
    chosen = scenario("quickstart", num_steps=3, place={"reward.score": reward})
    timeline = execute(chosen, tmp_path)
    assert timeline.header.status == "failed"
    assert message in timeline.header.error
    assert {span.step for span in timeline.stages()} == {0}
    assert conforms(build(chosen), timeline) == []
    assert timeline.header.samples["trained"] == 32
    assert timeline.header.samples["issued"] - timeline.header.samples["aborted"] == 32


def test_an_interrupt_leaves_no_process_and_a_readable_run(scenario: Make, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    file = tmp_path / "long.yaml"
    file.write_text(dump(scenario("quickstart", num_steps=10_000)))
    command = [
        sys.executable,
        "-c",
        "from lab.cli import app; app()",
        "execute",
        str(file),
        "--out",
        str(tmp_path / "runs"),
    ]
    root = Path(__file__).resolve().parents[2]
    variables = os.environ | {"LAB_TEST_MARK": mark, "PYTHONPATH": str(root)}
    process = subprocess.Popen(command, env=variables, cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE)
    wait_until(lambda: process.poll() is not None or finished_steps(tmp_path) >= 2, timeout_s=120)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors.decode()
    wait_until(lambda: not marked(mark), timeout_s=20)
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "run.json").read_bytes())["header"]["status"] == "cancelled"
    timeline = runs.read(folder)
    steps = {span.step for span in timeline.stages()}
    assert len(steps) >= 2
    assert steps == set(range(len(steps)))
    assert conforms(build(runs.read_scenario(folder)), timeline) == []


def finished_steps(folder: Path) -> int:
    return sum(file.read_text().count('"span_id":"weight_sync/') for file in folder.glob("runs/*/spans.jsonl")) // 4


def marked(mark: str) -> list[psutil.Process]:
    """Processes that carry the mark in their environment: a run's process and everything that it started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("LAB_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(holds: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.1)


@pytest.mark.full
def test_grpo_learns_the_task(local_ray: None, scenario: Make, tmp_path: Path) -> None:
    begun = time.monotonic()
    timeline = execute(scenario("grpo-learns"), tmp_path)
    rewards = [row["reward"] for row in timeline.header.learning]
    assert rewards[0] < 0.2
    assert min(rewards[-5:]) >= 0.8
    assert max(row["logprob_gap"] for row in timeline.header.learning) < CLOSE
    assert time.monotonic() - begun < 240
