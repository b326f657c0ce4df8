"""Of several answers one is kept: everybody else is generated, perhaps rewarded, and dropped."""

from typing import Any

import pytest

from lab.dataflow import conforms
from lab.load import load
from lab.metrics import summarise
from lab.scenario import Scenario
from lab.timeline import Timeline
from lab.wiring import build
from profiles.profile import datasheet
from simulator.run import simulate

BASE = load("scenarios/ppo-tiny.yaml")
SHEETS = {"cpu-core": datasheet("cpu-core")}
WANTED = BASE.workload.samples_per_step


def scenario(sampling: dict[str, Any], **changes: Any) -> Scenario:
    return BASE.replace({"sampling": sampling, "num_steps": 3} | changes)


def play(chosen: Scenario) -> Timeline:
    timeline = simulate(chosen, SHEETS)
    assert conforms(build(chosen), timeline) == []
    return timeline


def samples(timeline: Timeline, stage: str) -> int:
    """Of the first step, over all workers."""
    return sum(span.attrs["samples"] for span in timeline.stages() if span.stage == stage and span.step == 0)


@pytest.mark.parametrize("mode", ["synchronous", "one_step_off"])
def test_of_the_best_of_n_all_are_rewarded_and_one_is_trained(mode: str) -> None:
    timeline = play(scenario({"best_of": 3}, schedule={"mode": mode}))
    counts = timeline.header.samples
    assert counts["issued"] == 3 * 3 * WANTED
    assert counts["trained"] == 3 * WANTED and counts["dropped"] == 2 * 3 * WANTED
    assert samples(timeline, "rollout") == samples(timeline, "reward") == 3 * WANTED
    for stage in ("reference", "value", "update_actor", "update_critic"):
        assert samples(timeline, stage) == WANTED, stage


def test_beams_are_chosen_before_anybody_scores_them() -> None:
    timeline = play(scenario({"beams": 4}))
    prompts = BASE.workload.prompts_per_step
    assert samples(timeline, "rollout") == 4 * prompts
    assert samples(timeline, "reward") == samples(timeline, "update_actor") == WANTED
    counts = timeline.header.samples
    assert counts["issued"] == sum(counts.values()) - counts["issued"]
    assert counts["dropped"] == 3 * (4 * prompts - WANTED)


def test_what_is_dropped_counts_as_wasted_tokens() -> None:
    """Of equal lengths, N - 1 of N generated tokens are."""
    fixed = BASE.workload.model_dump(mode="json") | {"response_tokens": {"dist": "fixed", "value": 20}}
    told = summarise(play(scenario({"best_of": 4}, workload=fixed)))
    assert told["tokens"]["wasted"] == 3 * 3 * WANTED * 20
    assert told["tokens"]["response"] == 4 * 3 * WANTED * 20


def test_choosing_looks_at_rewards_not_at_lengths() -> None:
    """Over many prompts the mean length of what is kept is that of what was generated."""
    many = BASE.workload.model_dump(mode="json") | {"prompts_per_step": 400}
    update = BASE.update.model_dump(mode="json") | {"minibatch_samples": 400 * BASE.workload.samples_per_prompt}
    timeline = play(scenario({"best_of": 2}, workload=many, update=update, num_steps=1))
    kept, made = (
        sum(span.tokens for span in timeline.stages() if span.stage == stage) / samples(timeline, stage)
        for stage in ("reference", "reward")
    )
    assert kept == pytest.approx(made, rel=0.03) and kept != made


def test_more_answers_take_longer() -> None:
    ends = [max(span.end_s for span in play(scenario({"best_of": number})).spans) for number in (1, 2, 4)]
    assert ends == sorted(ends) and ends[0] < ends[1]


@pytest.mark.parametrize("rollout", [{"over_issue": 0.25}, {"stealing": True}])
def test_choosing_goes_with_prompts_that_are_issued_beyond_or_stolen(rollout: dict[str, Any]) -> None:
    settings = BASE.rollout.model_dump(mode="json") | rollout
    counts = play(scenario({"best_of": 2}, rollout=settings, schedule={"mode": "synchronous"})).header.samples
    assert counts["trained"] == 3 * WANTED
    assert counts["issued"] == sum(counts.values()) - counts["issued"] >= 2 * counts["trained"]
