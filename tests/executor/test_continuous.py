"""Runs without a barrier of several engines, with a critic, and in which processes die or hang."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.kills import killed
from executor import records
from executor.run import execute
from lab import runs
from lab.dataflow import conforms
from lab.load import dump
from lab.metrics import summarise
from lab.scenario import Scenario
from lab.strikes import hangs
from lab.timeline import Timeline
from lab.wiring import build

Make = Callable[..., Scenario]
pytestmark = [pytest.mark.real, pytest.mark.full]
PLACE = {
    "actor.generate": [{"pool": "all", "engines": 2, "threads": 1}],
    "actor.train": {"pool": "all", "data_parallel": 1, "zero_stage": 0, "threads": 1},
    "reward.score": {"pool": "all", "kind": "function", "function": "task", "threads": 1},
}
DRIVER = 4
"""seed under which the driver is killed, after two steps and a moment"""
CRITIC = {"critic.train": {"pool": "all", "data_parallel": 1, "zero_stage": 0, "threads": 1}}


@pytest.fixture
def spread(scenario: Make) -> Make:
    """async-tiny on a pool of both cores, with two engines."""

    def make(**changes: Any) -> Scenario:
        original = scenario("async-tiny")
        data = original.model_dump(mode="json", by_alias=True)
        data |= {"pools": {"all": "local[0:2]"}, "sharing": {"all": {"how": "resident"}}}
        for key, value in ({"place": PLACE} | changes).items():
            data[key] = (
                data[key] | value if isinstance(data[key], dict) and key not in ("place", "algorithm") else value
            )
        return original.replace(data)

    return make


def played(chosen: Scenario, folder: Path) -> Timeline:
    """A run that is done: lawful, every sample counted once and none trained twice or left out."""
    timeline = execute(chosen, folder)
    assert (timeline.header.status, timeline.header.error) == ("done", "")
    assert conforms(build(chosen), timeline) == []
    assert_counted(chosen, timeline, folder)
    return timeline


def assert_counted(chosen: Scenario, timeline: Timeline, folder: Path) -> None:
    counts, places = dict(timeline.header.samples), list[tuple[int, int]]()
    assert counts.pop("issued") == sum(counts.values())
    assert counts["trained"] == chosen.num_steps * chosen.workload.samples_per_step
    for step in records.steps_of(folder):
        samples = records.read(records.path_of(folder, step), chosen.digest)
        places += zip(samples.prompts.tolist(), samples.indices.tolist(), strict=True)
    assert len(places) == len(set(places)) == counts["trained"]


@pytest.mark.parametrize("in_flight", ["drain", "interrupt", "mix"])
def test_two_engines_share_the_prompts(local_ray: None, spread: Make, tmp_path: Path, in_flight: str) -> None:
    chosen = spread(num_steps=4, weight_sync={"in_flight": in_flight})
    timeline = played(chosen, tmp_path)
    rollouts = [span for span in timeline.stages() if span.stage == "rollout"]
    for engine in chosen.team("actor", "generate"):
        assert sum(span.attrs["samples"] for span in rollouts if span.worker == engine.name) > 32
    assert sum(span.attrs["issued"] for span in rollouts) == timeline.header.samples["issued"]
    assert summarise(timeline)["lag"]["max"] <= 1
    assert all(row.get("logprob_gap", 0.0) < 1e-3 for row in timeline.header.learning)


def test_ppo_with_a_critic(local_ray: None, spread: Make, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "place": PLACE | CRITIC,
        "models": {"critic": {"like": "actor", "dtype": "float32"}},
        "algorithm": {"name": "ppo", "ppo_epochs": 2, "kl_coef": 0.0, "gamma": 1.0, "lam": 0.95, "clip": 0.2},
    }
    chosen = spread(num_steps=4, **changes)
    timeline = played(chosen, tmp_path)
    assert summarise(timeline)["lag"]["max"] <= 1
    assert {span.stage for span in timeline.stages()} >= {"value", "update_critic", "update_actor"}
    assert all(row["value_loss"] > 0 for row in timeline.header.learning)


TIGHT: dict[str, dict[str, Any]] = {
    "room for one batch": {"buffer": {"capacity_samples": 64, "high_watermark": 1.0}},
    "no sample waits, and fewer and fewer are under way": {
        "schedule": {"staleness": {"bound": 0}},
        "buffer": {"capacity_samples": 64, "high_watermark": 0.01, "low_watermark": 0.0, "at_high": "throttle"},
    },
    "small batches, one prompt more than a batch": {
        "schedule": {"trigger_samples": 32, "staleness": {"unit": "batches", "bound": 1, "at_bound": "drop"}},
        "buffer": {"capacity_samples": 36, "high_watermark": 1.0, "low_watermark": 0.99},
    },
}


@pytest.mark.parametrize("what", TIGHT)
def test_a_run_with_as_little_room_as_possible_ends(local_ray: None, spread: Make, tmp_path: Path, what: str) -> None:
    played(spread(num_steps=3, **TIGHT[what]), tmp_path)


def stops(chosen: Scenario) -> Scenario:
    """With a seed under which the first fault stops its process, and does not end it."""
    data = chosen.model_dump(mode="json", by_alias=True)
    return next(found for seed in range(99) if hangs(found := chosen.replace(data | {"seed": seed}), 0, 0))


def test_a_buffer_that_hangs_is_missed_and_filled_again(local_ray: None, spread: Make, tmp_path: Path) -> None:
    faults = [{"kind": "buffer_lost", "at": 3.0, "detect": 1.0}]
    chosen = stops(spread(num_steps=20, faults=faults))
    timeline = played(chosen, tmp_path)
    (fault,) = timeline.header.faults
    assert (fault["kind"], fault["target"]) == ("buffer_lost", "buffer")
    assert fault["lost_samples"] == timeline.header.samples["lost"]


@pytest.mark.parametrize("way_back", ["reassign", "restart"])
def test_an_engine_that_hangs_holds_no_push_up(local_ray: None, spread: Make, tmp_path: Path, way_back: str) -> None:
    """Weights are pushed several times before it is missed; the others get them, and it comes back."""
    faults = [
        {"kind": "worker_lost", "target": "actor.generate[1]", "at": 4.0, "detect": 3.0, "recovery": way_back}
    ]  # fmt: skip
    chosen = stops(spread(num_steps=40, faults=faults))
    timeline = played(chosen, tmp_path)
    (fault,) = timeline.header.faults
    assert fault["lost_samples"] == timeline.header.samples["lost"]
    rollouts = [span for span in timeline.stages() if span.stage == "rollout" and span.worker == "actor.generate[1]"]
    assert any(span.start_s > fault["at_s"] + 3.0 for span in rollouts), "it generates again"


@pytest.mark.parametrize("sync", [{"trigger": "pull", "every": 0.2}, {"trigger": "event", "transport": "object_store"}])
def test_an_engine_that_dies_fetches_weights_again(
    local_ray: None, spread: Make, tmp_path: Path, sync: dict[str, Any]
) -> None:
    """And the other one goes on with what it had heard of."""
    faults = [
        {"kind": "worker_lost", "target": "actor.generate[0]", "at": 4.0, "detect": 1.0, "recovery": "restart"}
    ]  # fmt: skip
    timeline = played(spread(num_steps=30, weight_sync=sync, faults=faults), tmp_path)
    (fault,) = timeline.header.faults
    loads = [span for span in timeline.stages() if span.stage == "weight_sync" and span.worker == "actor.generate[0]"]
    assert any(span.start_s > fault["at_s"] + 1.0 for span in loads)


def test_the_only_engine_may_hang(local_ray: None, scenario: Make, tmp_path: Path) -> None:
    faults = [{"kind": "worker_lost", "target": "actor.generate[0]", "at": 3.0, "detect": 2.0, "recovery": "restart"}]
    played(stops(scenario("async-tiny", num_steps=16, faults=faults)), tmp_path)


def test_a_run_goes_back_by_itself_when_its_trainer_dies(local_ray: None, spread: Make, tmp_path: Path) -> None:
    faults = [{"kind": "trainer_lost", "target": "actor.train[0]", "at": 5.0, "detect": 1.0}]
    chosen = spread(num_steps=16, checkpoint={"every_steps": 1}, faults=faults)
    timeline = played(chosen, tmp_path)
    (fault,) = timeline.header.faults
    saved = [s.step for s in timeline.stages() if s.stage == "checkpoint" and s.end_s < fault["at_s"]]
    assert (fault["kind"], fault["step"] >= max(saved) > 0) == ("trainer_lost", True), "the last may be half written"
    assert timeline.header.samples["lost"] > 0


FETCHED: dict[str, dict[str, Any]] = {
    "push": {},
    "pull": {"trigger": "pull", "every": 0.2, "in_flight": "drain"},
    "event": {"trigger": "event", "transport": "store"},
}


@pytest.mark.parametrize("trigger", FETCHED)
def test_a_run_whose_driver_is_killed_goes_on(spread: Make, trigger: str) -> None:
    """Whoever trains or generates then, the samples of all attempts add up, and none is trained twice."""
    with tempfile.TemporaryDirectory(prefix="lc-", ignore_cleanup_errors=True) as place:
        out = Path(place) / "runs"
        out.mkdir()
        chosen = spread(num_steps=12, checkpoint={"every_steps": 2}, weight_sync=FETCHED[trigger])
        (file := Path(place) / "scenario.yaml").write_text(dump(chosen))
        folder, (kill,) = killed(file, out, 1, Random(DRIVER), ("training",))
        assert kill.victim == "driver" and kill.done_again <= 1
        timeline = runs.read(folder)
        assert (timeline.header.status, timeline.header.error) == ("done", "")
        assert conforms(build(chosen), timeline) == []
        assert_counted(chosen, timeline, folder)
        assert timeline.header.samples["lost"] > 0
