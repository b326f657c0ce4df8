"""Dispatch in whole simulations: what it is worth, and what the spans of rollouts say about it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.load import load
from lab.policies.dispatch import DISPATCH
from lab.scenario import Scenario
from lab.timeline import Timeline
from profiles.profile import datasheet
from simulator.run import simulate

SHIPPED = load("scenarios/ppo-7b-16gpu.yaml")
BIG = SHIPPED.model_dump(mode="json", by_alias=True)
SLOW = "l40s"
SHEETS = {device: datasheet(device) for device in ("a100-80g-sxm", SLOW)}
FIXED = {"dist": "fixed", "value": 64}


def scenario(
    engines: list[dict[str, Any]],
    num_prompts: int,
    dispatch: str = "round_robin",
    response: dict[str, Any] = FIXED,
    num_steps: int = 1,
) -> Scenario:
    """The sixteen-GPU scenario with engines on the devices that have no work, and on as many of a slower kind."""
    data = BIG | {"num_steps": num_steps}
    cluster = BIG["cluster"]["sites"][0]
    node = {"name": "slow", "count": 1, "device": SLOW, "devices": 4, "intra": "pcie4"}
    data["cluster"] = {"sites": [cluster | {"nodes": [*cluster["nodes"], node]}]}
    data["pools"] = BIG["pools"] | {"slow": "slow[0:4]"}
    trainer = BIG["place"]["actor.train"] | {"data_parallel": 1}
    data["place"] = BIG["place"] | {"actor.generate": engines, "actor.train": trainer}
    data["rollout"] = BIG["rollout"] | {"dispatch": dispatch}
    data["workload"] = {
        "prompts_per_step": num_prompts, "samples_per_prompt": 1, "prompt_tokens": FIXED, "response_tokens": response,
    }  # fmt: skip
    data["update"] = BIG["update"] | {"minibatch_samples": num_prompts}
    return SHIPPED.replace(data)


def rollouts(timeline: Timeline) -> dict[str, float]:
    """Seconds of each engine in step 0."""
    spans = [span for span in timeline.stages() if span.stage == "rollout" and span.step == 0]
    return {span.worker: span.end_s - span.start_s for span in spans}


def longest(chosen: Scenario) -> float:
    return max(rollouts(simulate(chosen, SHEETS)).values())


@settings(max_examples=15)
@given(st.sampled_from(["round_robin", "weighted", "least_loaded"]), st.integers(1, 4), st.integers(1, 60))
def test_with_equal_lengths_one_more_equal_engine_never_lengthens_rollout(
    dispatch: str, num_engines: int, num_prompts: int
) -> None:
    few, more = (
        longest(scenario([{"pool": "spare", "engines": engines}], num_prompts, dispatch))
        for engines in (num_engines, num_engines + 1)
    )
    assert more <= few * (1 + 1e-12)


@settings(max_examples=15)
@given(st.integers(1, 3), st.integers(2, 60), st.integers(8, 400))
def test_least_loaded_is_never_longer_than_in_turn_where_one_engine_is_slow(
    num_fast: int, num_prompts: int, tokens: int
) -> None:
    """Speeds are those that both show when each has one prompt."""
    response = {"dist": "fixed", "value": tokens}
    fast, slow = {"pool": "spare", "engines": num_fast}, {"pool": "slow", "engines": 1}
    alone = [longest(scenario([kind | {"engines": 1}], 1, response=response)) for kind in (fast, slow)]
    assert alone[0] < alone[1], "the slow one is slow"
    engines = [slow, fast | {"speed": alone[1] / alone[0]}]
    one, other = (
        longest(scenario(engines, num_prompts, dispatch, response)) for dispatch in ("least_loaded", "round_robin")
    )
    assert one <= other * (1 + 1e-12)


def test_a_slow_engine_holds_up_prompts_that_go_in_turn_and_not_the_others() -> None:
    engines = [{"pool": "slow"}, {"pool": "spare", "speed": 2.4}]
    seconds = {rule: longest(scenario(engines, 64, rule)) for rule in ("round_robin", "weighted", "least_loaded")}
    assert seconds["weighted"] < 0.99 * seconds["round_robin"]
    assert seconds["least_loaded"] < 0.99 * seconds["round_robin"]


@pytest.mark.parametrize("dispatch", DISPATCH)
def test_the_spans_say_who_got_what_and_by_which_rule(dispatch: str) -> None:
    engines = [{"pool": "slow"}, {"pool": "spare", "speed": 2.4, "engines": 2}]
    response = {"dist": "lognormal", "mean": 40, "p95": 100, "max": 200}
    chosen = scenario(engines, 24, dispatch, response, num_steps=2)
    spans = [span for span in simulate(chosen, SHEETS).stages() if span.stage == "rollout"]
    for step in (0, 1):
        lengths = chosen.workload.response_lengths(chosen.seed, step)
        own = [span.attrs for span in spans if span.step == step]
        assert sorted(prompt for attrs in own for prompt in attrs["prompts"]) == list(range(24))
        for attrs in own:
            assert attrs["dispatch"] == dispatch and attrs["speed"] in (1.0, 2.4)
            assert attrs["response_tokens"] == lengths[attrs["prompts"]].sum()
            assert attrs["samples"] == len(attrs["prompts"])
            assert ("predicted_tokens" in attrs) == (dispatch == "length_buckets")


def test_predictions_of_a_step_come_from_the_steps_before() -> None:
    response = {"dist": "lognormal", "mean": 40, "p95": 100, "max": 200}
    chosen = scenario([{"pool": "slow"}, {"pool": "spare", "speed": 2.4}], 24, "length_buckets", response, num_steps=3)
    spans = [span for span in simulate(chosen, SHEETS).stages() if span.stage == "rollout"]
    told = {
        (span.step, prompt): tokens
        for span in spans
        for prompt, tokens in zip(span.attrs["prompts"], span.attrs["predicted_tokens"], strict=True)
    }
    seen = np.array([chosen.workload.response_lengths(chosen.seed, step)[:, 0] for step in range(3)])
    assert {told[0, prompt] for prompt in range(24)} == {64 + 40.0}
    for step in (1, 2):
        overall = seen[:step].mean()
        expected = 64 + (seen[:step].sum(axis=0) + overall) / (step + 1)
        assert [told[step, prompt] for prompt in range(24)] == pytest.approx(expected.tolist())
