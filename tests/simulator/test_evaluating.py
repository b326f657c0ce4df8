"""Evaluation is a stage of its own: it holds what comes next, and asks the same prompts every time."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from lab.dataflow import conforms
from lab.evaluation import lengths, shares
from lab.load import load
from lab.scenario import Scenario
from lab.timeline import Span, Timeline
from lab.wiring import build
from profiles.profile import datasheet
from simulator.run import simulate

SHEETS = {device: datasheet(device) for device in ("cpu-core", "a100-80g-sxm")}
GREEDY = {"dist": "fixed", "value": 12}


def scenario(name: str, **changes: Any) -> Scenario:
    base = load(f"scenarios/{name}.yaml")
    plain = {"evaluate": {"every_steps": 2, "prompts": 10}, "checkpoint": {"every_steps": None}, "num_steps": 5}
    return base.replace(plain | changes)


def stage(timeline: Timeline, name: str) -> list[Span]:
    return [span for span in timeline.stages() if span.stage == name]


def test_who_has_not_the_weights_of_now_answers_nothing() -> None:
    place = {"actor.generate": [{"pool": "all", "engines": 3}]}
    chosen = scenario("quickstart", place=load("scenarios/quickstart.yaml").model_dump(by_alias=True)["place"] | place)
    found = shares(chosen, 1, absent={1})
    assert found[1] == [] and found[0] and found[2]
    assert sorted(found[0] + found[2]) == sorted(prompt for share in shares(chosen, 1) for prompt in share)


@pytest.mark.parametrize("mode", ["synchronous", "one_step_off"])
def test_engines_evaluate_new_weights_and_hold_the_next_rollout(mode: str) -> None:
    chosen = scenario("quickstart", schedule={"mode": mode})
    timeline = simulate(chosen, SHEETS)
    assert conforms(build(chosen), timeline) == []
    found = stage(timeline, "evaluate")
    assert {span.step for span in found} == {1, 3}
    ahead = 1 if mode == "synchronous" else 2
    for span in found:
        weights = max(s.end_s for s in stage(timeline, "weight_sync") if s.step == span.step)
        following = [s.start_s for s in stage(timeline, "rollout") if s.step == span.step + ahead]
        assert span.start_s >= weights and span.policy_version == span.step + 1
        assert not following or min(following) >= span.end_s


def test_the_prompts_are_the_same_every_time_and_the_tokens_are_counted_apart() -> None:
    chosen = scenario("quickstart", evaluate={"every_steps": 2, "prompts": 10, "response_tokens": GREEDY})
    first, second = (lengths(chosen, step) for step in (1, 3))
    assert np.array_equal(first[0], second[0])
    assert not np.array_equal(first[0][:10], chosen.workload.prompt_lengths(chosen.seed, 0)[:10])
    timeline, without = (simulate(one, SHEETS) for one in (chosen, scenario("quickstart", evaluate={})))
    for step in (1, 3):
        asked = [span for span in stage(timeline, "evaluate") if span.step == step]
        assert sum(span.attrs["response_tokens"] for span in asked) == 10 * 12
        assert sum(span.attrs["prompt_tokens"] for span in asked) == first[0].sum()
    assert timeline.header.samples == without.header.samples


def test_an_evaluation_delays_a_synchronous_run_by_what_it_takes() -> None:
    timeline, without = (
        simulate(scenario("quickstart", num_steps=3, evaluate={"every_steps": every}), SHEETS) for every in (2, None)
    )
    spans = stage(timeline, "evaluate")
    took = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    end, earlier = (max(span.end_s for span in stage(one, "weight_sync")) for one in (timeline, without))
    assert end - earlier == pytest.approx(took, rel=0.05), "its call aside"


def test_trainers_read_held_out_samples_between_two_updates() -> None:
    chosen = scenario("sft-7b", checkpoint={"every_steps": 2})
    timeline = simulate(chosen, SHEETS)
    assert conforms(build(chosen), timeline) == []
    for step in (1, 3):
        mine = [span for span in stage(timeline, "evaluate") if span.step == step]
        prompt, answers = lengths(chosen, step)
        assert sum(span.tokens for span in mine) == prompt.sum() + answers.sum()
        assert max(span.end_s for span in mine) <= min(
            span.start_s for span in stage(timeline, "update_actor") if span.step == step + 1
        )


def test_what_cannot_be_evaluated_is_refused() -> None:
    with pytest.raises(ValidationError, match="reads pairs"):
        scenario("dpo-7b")
    with pytest.raises(ValidationError, match="does not pause"):
        scenario("quickstart", schedule={"mode": "asynchronous"})


@pytest.mark.parametrize("every", [1, 2])
def test_on_a_pool_of_time_slices_nobody_starts_before_the_switch(every: int) -> None:
    """Also after a step without evaluation the engines are loaded before they roll out."""
    chosen = scenario("colocated-8gpu", evaluate={"every_steps": every, "prompts": 10}, num_steps=3)
    timeline = simulate(chosen, SHEETS)
    assert conforms(build(chosen), timeline) == []
    engine = sorted(
        (span for span in timeline.stages() if span.worker == "actor.generate[0]"), key=lambda span: span.start_s
    )
    order = [span.stage for span in engine if span.step == 0 or (span.step == 1 and span.stage == "rollout")]
    evaluated = ["evaluate"] if every == 1 else []
    assert order == ["rollout", "switch", "weight_sync", "switch", *evaluated, "rollout"]
