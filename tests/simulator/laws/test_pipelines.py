"""How long a step takes where its stages overlap: as long as the slowest of them, in closed form with equal lengths."""

from dataclasses import replace
from statistics import fmean
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.dataflow import conforms
from lab.metrics import publications
from lab.scenario import Scenario
from lab.timeline import Span
from lab.wiring import build
from profiles.formula import FORMULAS
from profiles.profile import OpProfile, Profile, Range
from tests.plays import Played, drawn_for, num_batches, play
from tests.strategies import changed, on_cores, on_gpus

CORES = {"name": "local", "device": "cpu-core", "devices": 8, "intra": "shared-memory"}
APART = {
    "cluster": {"sites": [{"nodes": [CORES]}]},
    "pools": {
        "all": "local[7]",
        "engines": "local[0:3]",
        "trainer": "local[3]",
        "judge": "local[4]",
        "frozen": "local[5]",
    },
    "place": {
        "actor.train": {"pool": "trainer"},
        "reference.score": {"pool": "frozen"},
        "reward.score": {"pool": "judge"},
    },
    "checkpoint": {"every_steps": None},
    "algorithm": {"kl_coef": 0.1},
}
"""everybody on cores of their own"""
LENGTH = 10
"""tokens of every response"""


def flat(costs: dict[str, float]) -> Profile:
    """Every op takes as long as it is said to, whatever it does; others take no time."""
    free = Range(low=0, high=1e30)
    ops = {
        op: OpProfile(
            coefficients={"each": costs.get(op, 0.0)}, ranges=dict.fromkeys(names, free), points=1,
            residual_median=0, residual_p90=0,
        )
        for op, names in FORMULAS.items()
    }  # fmt: skip
    return Profile(name="flat", device="cpu-core", kind="measured", models=("tiny-llama",), ops=ops)


def scenario(mode: str, engines: int, waves: int, num_steps: int, **changes: Any) -> Scenario:
    """Engines of four seats each that fill them so often in a step; one batch of the scorers, one pass of the trainer."""
    prompts = 2 * engines * waves
    own = {
        "num_steps": num_steps,
        "place": {"actor.generate": [{"pool": "engines", "engines": engines, "threads": 1}]},
        "workload": {"prompts_per_step": prompts, "samples_per_prompt": 2,
                     "prompt_tokens": {"dist": "fixed", "value": 5}, "response_tokens": {"dist": "fixed", "value": LENGTH}},
        "rollout": {"max_num_seqs": 4},
        "update": {"minibatch_samples": 2 * prompts, "microbatch_tokens": 10**6},
        "schedule": {"mode": mode},
    }  # fmt: skip
    own["workload"]["response_tokens"] = {"dist": "fixed", "value": LENGTH}
    return changed(
        "quickstart", {"sharing": None, "workload": {"response_tokens": None}}, APART | {"sharing": {}}, own, changes
    )


def period(played: Played) -> float:
    """Of a step, once the pipeline is full and before it runs dry; over an even number of them, as a cycle may take two."""
    ends, number = publications(played.timeline)[:-1], played.scenario.num_steps // 4 * 2
    return (ends[-1] - ends[-1 - number]) / number


costs = st.fixed_dictionaries(
    {
        "engine_step": st.floats(0.01, 0.2), "reward": st.floats(0.01, 2.0), "logprob": st.floats(0.01, 2.0),
        "advantage": st.floats(0.0, 0.1), "forward": st.floats(0.01, 1.0), "backward": st.floats(0.01, 1.0),
        "optimizer": st.floats(0.0, 0.2), "weight_sync": st.floats(0.0, 0.1), "dispatch": st.sampled_from([0.0, 0.001]),
    }
)  # fmt: skip


def stages(cost: dict[str, float], waves: int, batches: int) -> dict[str, float]:
    """Seconds of each stage of a step, from its calls to its end."""
    own = {
        "rollout": waves * LENGTH * cost["engine_step"],
        "reward": cost["reward"],
        "reference": batches * cost["logprob"],
        "advantage": cost["advantage"],
        "update": cost["forward"] + cost["backward"] + cost["optimizer"],
        "weight_sync": cost["weight_sync"],
    }
    return {stage: seconds + cost["dispatch"] for stage, seconds in own.items()}


def num_passes(chosen: Scenario) -> int:
    """Batches of the reference in a step."""
    return -(-chosen.workload.samples_per_step // chosen.scored["reference"].max_batch_samples)


@given(costs, st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=12)
def test_a_synchronous_step_is_the_sum_of_its_stages(cost: dict[str, float], engines: int, waves: int) -> None:
    """Reward and reference beside each other, all else one after the other."""
    chosen = scenario("synchronous", engines, waves, 4)
    each = stages(cost, waves, num_passes(chosen))
    whole = sum(each.values()) - min(each["reward"], each["reference"])
    assert period(play(chosen, {"cpu-core": flat(cost)})) == pytest.approx(whole, rel=1e-6)


@given(costs, st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=12)
def test_one_step_off_takes_its_slowest_cycle(cost: dict[str, float], engines: int, waves: int) -> None:
    chosen = scenario("one_step_off", engines, waves, 12)
    each = stages(cost, waves, num_passes(chosen))
    scores, sync = max(each["reward"], each["reference"]), each["weight_sync"]
    training = each["advantage"] + each["update"] + sync
    slowest = max(each["rollout"] + sync, training, (each["rollout"] + scores + training) / 2, scores)
    assert period(play(chosen, {"cpu-core": flat(cost)})) == pytest.approx(slowest, rel=1e-6)


@given(costs, st.integers(1, 3), st.integers(1, 3), st.sampled_from(["event", "push"]))
@settings(max_examples=12)
def test_without_a_barrier_a_step_takes_as_long_as_its_slowest_stage(
    cost: dict[str, float], engines: int, waves: int, trigger: str
) -> None:
    """Engines generate and take weights, scorers score, the trainer trains and publishes: each goes on as fast as it can,
    and the slowest of them never waits."""
    sync = {"weight_sync": {"trigger": trigger, "in_flight": "mix", "kv": "keep"}}
    schedule = {"mode": "asynchronous", "staleness": {"bound": 4}}
    chosen = scenario("asynchronous", engines, waves, 24, **sync, schedule=schedule)
    each, played = stages(cost, waves, num_passes(chosen)), play(chosen, {"cpu-core": flat(cost)})
    spans = played.stages("weight_sync")
    published = min(span.seconds for span in spans if "train" in span.worker)
    taken = [span.seconds for span in spans if "generate" in span.worker]  # with a push, some wait for others
    generating = each["rollout"] - cost["dispatch"] + (fmean(taken) if trigger == "event" else min(taken))
    training = each["advantage"] + each["update"] + cost["dispatch"] + published
    slowest = max(generating, each["reward"], each["reference"], training)
    assert period(played) == pytest.approx(slowest, rel=0.02)


@given(st.one_of(on_gpus(modes=("asynchronous",)), on_cores(modes=("asynchronous",))))
@settings(max_examples=15)
def test_with_a_bound_of_nothing_it_is_the_synchronous_order(chosen: Scenario) -> None:
    """Every batch is that of the step, made by the weights of the step before; nothing of a step starts before the step
    before it is published."""
    data = chosen.model_dump(mode="json", by_alias=True)
    data["schedule"] |= {"staleness": {"bound": 0, "at_bound": "block"}, "trigger_samples": None, "scoring": "batch"}
    played = play(chosen.replace({"schedule": data["schedule"]}))
    number, published = chosen.workload.samples_per_step, publications(played.timeline)
    for step in range(num_batches(played)):
        assert sorted(drawn_for(played.world, step)) == [(step, place) for place in range(number)]
    for span in played.stages("advantage"):
        assert span.attrs["lag_max"] == 0
    for span in played.stages("rollout"):
        if span.attrs["samples"] and 0 < span.step < len(published):
            assert span.start_s >= published[span.step - 1] - 1e-9 and span.end_s <= published[span.step] + 1e-9
    order = build(chosen.replace({"schedule": {"mode": "synchronous"}, "weight_sync": {}, "buffer": {}}))
    barrier = ("update_critic", "rollout")  # samples have no age in versions of the critic
    order = replace(order, edges=tuple(edge for edge in order.edges if (edge.source, edge.target) != barrier))
    own = tuple(span for span in played.timeline.stages() if span.step < chosen.num_steps and not takes_weights(span))
    assert conforms(order, msgspec.structs.replace(played.timeline, spans=own)) == []


def takes_weights(span: Span) -> bool:
    """Engines do it when they can, beside what the trainer goes on with; when they generate again is checked above."""
    return span.stage == "weight_sync" and "generate" in span.worker
