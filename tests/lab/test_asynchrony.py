"""What an asynchronous schedule cannot be is refused with the key to change; what it states becomes the rules' numbers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lab.load import load
from lab.policies.staleness import lag
from lab.scenario import Scenario
from lab.schedule import Buffer, Schedule, Staleness, limits, num_batches, staleness
from lab.wiring import build

BASE = load("scenarios/quickstart.yaml")  # 8 prompts × 4 samples a step, mini-batches of 32


def scenario(schedule: dict[str, Any], **changes: Any) -> Scenario:
    update = BASE.model_dump(mode="json")["update"] | {"minibatch_samples": changes.pop("minibatch", 8)}
    return BASE.replace({"schedule": {"mode": "asynchronous"} | schedule, "update": update} | changes)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "mode": ({"mode": "synchronous", "trigger_samples": 16}, {}, "schedule.trigger_samples"),
    "bound": ({"mode": "one_step_off", "staleness": {"bound": 2}}, {}, "schedule.staleness"),
    "buffer": ({"mode": "synchronous"}, {"buffer": {"capacity_samples": 64}}, "buffer"),
    "step": ({"trigger_samples": 24}, {}, "schedule.trigger_samples"),
    "prompt": ({"trigger_samples": 2}, {"minibatch": 2}, "schedule.trigger_samples"),
    "minibatch": ({"trigger_samples": 8}, {"minibatch": 16}, "schedule.trigger_samples"),
    "fraction": ({"staleness": {"bound": 0.5}}, {}, "schedule.staleness.bound"),
    "deadlock": (
        {"trigger_samples": 8, "staleness": {"unit": "batches", "bound": 2}}, {}, "schedule.staleness.bound",
    ),
    "small": ({}, {"buffer": {"capacity_samples": 31}}, "buffer.capacity_samples"),
    "marks": ({}, {"buffer": {"low_watermark": 0.9}}, "buffer.low_watermark"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_its_key(name: str) -> None:
    schedule, changes, key = REFUSED[name]
    with pytest.raises(ValidationError) as refusal:
        scenario(schedule, **changes)
    cause = refusal.value.errors()[0]["ctx"]["error"]
    assert cause.key == key and cause.remedy


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout.over_issue", 0.3),
        ("rollout.stealing", True),
        ("sampling.best_of", 2),
        ("sampling.beams", 8),
        ("evaluate.every_steps", 2),
    ],
)
def test_what_needs_a_barrier_is_refused(key: str, value: Any) -> None:
    section, name = key.split(".")
    part = {section: BASE.model_dump(mode="json")[section] | {name: value}}
    assert scenario({"mode": "synchronous"}, **part)
    with pytest.raises(ValidationError) as caught:
        scenario({}, **part)
    cause = caught.value.errors()[0]["ctx"]["error"]
    assert cause.key.startswith(section) and cause.remedy


def test_what_is_just_enough_is_accepted() -> None:
    scenario({"trigger_samples": 8, "staleness": {"unit": "batches", "bound": 3}}, buffer={"capacity_samples": 8})
    scenario({"trigger_samples": 8, "staleness": {"unit": "batches", "bound": 0, "at_bound": "down_weight"}})
    scenario({"staleness": {"unit": "extra_samples", "bound": 0.5}}, buffer={"capacity_samples": 32})


@given(st.integers(0, 4), st.sampled_from([1, 2, 4]), st.integers(0, 60), st.integers(0, 20))
def test_a_bound_in_versions_is_the_same_in_batches(bound: int, number: int, batch: int, version: int) -> None:
    schedule = Schedule(mode="asynchronous", trigger_samples=32 // number, staleness=Staleness(bound=bound))
    rule = staleness(schedule, 32)
    within = lag(rule, batch, [version])[0] <= rule.largest_lag
    assert num_batches(schedule, 32) == number and within == (batch // number - version <= bound)


def test_the_buffer_has_room_for_twice_what_the_bound_lets_be_under_way() -> None:
    assert limits(Schedule(mode="asynchronous", staleness=Staleness(bound=2)), Buffer(), 32).capacity_samples == 192
    batches = Schedule(mode="asynchronous", trigger_samples=8, staleness=Staleness(unit="batches", bound=3))
    assert limits(batches, Buffer(), 32).capacity_samples == 64
    assert limits(batches, Buffer(capacity_samples=40), 32).capacity_samples == 40


def test_every_version_has_its_batches() -> None:
    graph = build(scenario({"trigger_samples": 8, "staleness": {"bound": 1}}, num_steps=3))
    assert graph.num_steps == 12 and list(graph.steps("weight_sync")) == [3, 7, 11]
    assert [graph.policy_version("rollout", step) for step in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert graph.policy_version("update_actor", 3) == graph.policy_version("weight_sync", 3) == 1
    assert graph.policy_version("update_actor", 2) == 0 and graph.largest_lag == 1
