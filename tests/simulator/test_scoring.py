"""Scoring inside whole simulations: batch by batch or sample by sample, by models, heads, functions and services."""

import heapq
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.dataflow import conforms
from lab.load import load
from lab.metrics import summarise
from lab.scenario import Scenario
from lab.timeline import Span, Timeline
from lab.wiring import build
from profiles.memory import device_bytes, peaks
from profiles.profile import datasheet
from simulator.remote import makespan
from simulator.run import simulate

LOADED = {name: load(f"scenarios/{name}.yaml") for name in ("quickstart", "ppo-tiny", "ppo-7b-16gpu")}
SHEETS = {device: datasheet(device) for device in ("cpu-core", "a100-80g-sxm")}
REMOTE = {"latency": 1.0, "latency_p95": 2.5, "timeout": 3.0, "failure_share": 0.1, "retries": 1, "concurrency": 4}
KINDS: dict[str, dict[str, Any]] = {
    "model": {},
    "replicas": {"place": {"reward.score": {"replicas": 2}, "reference.score": {"replicas": 3}}},
    "function": {"place": {"reward.score": {"kind": "function", "function": "task"}}},
    "remote": {"place": {"reward.score": {"kind": "remote", "function": None, "remote": REMOTE}}},
    "head": {
        "models": {"reward": {"like": "reference", "arch": None, "dtype": "float32"}},
        "place": {"reward.score": {"kind": "model", "function": None, "shares_trunk": True}},
    },
    "cache": {"place": {"reward.score": {"cache": {"hit_share": 0.5, "version_steps": 2}}}},
}


def merged(data: Any, changes: Any) -> Any:
    if not (isinstance(data, Mapping) and isinstance(changes, Mapping)):
        return changes
    return dict(data) | {key: merged(data.get(key), value) for key, value in changes.items()}


def scenario(name: str = "ppo-tiny", *parts: dict[str, Any]) -> Scenario:
    data = LOADED[name].model_dump(mode="json", by_alias=True)
    for changes in ({"num_steps": 3}, *parts):
        data = merged(data, changes)
    return Scenario.model_validate(data, strict=False)


def play(chosen: Scenario) -> Timeline:
    return simulate(chosen, SHEETS)


def stage(timeline: Timeline, name: str, step: int) -> list[Span]:
    return [span for span in timeline.stages() if span.stage == name and span.step == step]


def seconds(timeline: Timeline, name: str, step: int = 1) -> float:
    spans = stage(timeline, name, step)
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)


@pytest.mark.parametrize("mode", ["synchronous", "one_step_off"])
@pytest.mark.parametrize("scoring", ["batch", "sample"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_scored_once_by_everybody(kind: str, scoring: str, mode: str) -> None:
    chosen = scenario("ppo-tiny", KINDS[kind], {"schedule": {"mode": mode, "scoring": scoring}})
    timeline = play(chosen)
    assert conforms(build(chosen), timeline) == [] and timeline.digest() == play(chosen).digest()
    for name in ("reward", "reference", "value"):
        for step in range(3):
            spans = stage(timeline, name, step)
            rollout = stage(timeline, "rollout", step)
            assert sum(span.attrs["samples"] for span in spans) == chosen.workload.samples_per_step
            assert sum(span.tokens for span in spans) == sum(span.tokens for span in rollout)
            assert max(span.end_s for span in spans) >= max(span.end_s for span in rollout) - 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_ops_of_scorers_lie_inside_their_lanes(kind: str) -> None:
    timeline = play(scenario("ppo-tiny", KINDS[kind], {"schedule": {"scoring": "sample"}}))
    lanes = {span.span_id: span for span in timeline.stages()}
    ops = [span for span in timeline.spans if span.op and span.stage in ("reward", "reference", "value")]
    assert {span.op for span in ops} >= {"forward", "sample_wait"}
    for span in ops:
        lane = lanes[span.span_id.split("#")[0]]
        assert lane.start_s <= span.start_s <= span.end_s <= lane.end_s + 1e-9 and lane.worker == span.worker


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_barrier_nothing_is_trained_that_is_not_scored(kind: str) -> None:
    """Up to the making of batch k at least (k + 1) batches are scored, by reward and reference; lanes follow each other."""
    parts = [KINDS[kind], {"schedule": {"mode": "asynchronous", "scoring": "sample"}, "num_steps": 4}]
    chosen = scenario("ppo-tiny", *parts)
    timeline = play(chosen)
    counts = timeline.header.samples
    assert conforms(build(chosen), timeline) == [] and timeline.digest() == play(chosen).digest()
    assert counts["issued"] == sum(counts.values()) - counts["issued"]
    for name in ("reward", "reference"):
        scored, last = 0, 0.0
        for step in range(4):
            spans = stage(timeline, name, step)
            scored += sum(span.attrs.get("samples", 0) for span in spans)
            [advantage] = stage(timeline, "advantage", step)
            assert scored >= (step + 1) * chosen.workload.samples_per_step
            assert min(span.start_s for span in spans) >= last - 1e-9
            last = min(span.end_s for span in spans)
            assert last <= advantage.start_s


def test_with_devices_of_their_own_scorers_hide_behind_the_rollout() -> None:
    """Sample by sample only what ends last is scored after the rollout: the step loses most of its scoring."""
    one = {"num_steps": 1}
    batch, sample = (play(scenario("ppo-7b-16gpu", one, {"schedule": {"scoring": how}})) for how in ("batch", "sample"))
    assert seconds(sample, "rollout", 0) == pytest.approx(seconds(batch, "rollout", 0))
    exposed = [
        max(span.end_s for name in ("reward", "reference", "value") for span in stage(timeline, name, 0))
        - max(span.end_s for span in stage(timeline, "rollout", 0))
        for timeline in (batch, sample)
    ]
    assert exposed[1] < 0.2 * exposed[0]
    ends = [summarise(timeline)["makespan_s"] for timeline in (batch, sample)]
    assert ends[0] - ends[1] == pytest.approx(exposed[0] - exposed[1], rel=0.02)


def test_waiting_for_samples_is_no_computing() -> None:
    timeline = play(scenario("ppo-7b-16gpu", {"schedule": {"scoring": "sample"}}))
    summary = summarise(timeline)
    account = summary["pools"]["reward"]
    spans = [span for span in timeline.spans if span.stage == "reward"]
    lanes, waits = (sum(span.seconds for span in spans if span.op == op) for op in ("", "sample_wait"))
    assert 0 < waits < lanes and sum(account.values()) == pytest.approx(1.0)
    assert account["reward"] * summary["makespan_s"] == pytest.approx(lanes - waits)


def test_replicas_share_the_work() -> None:
    pools = {"pools": {"reference": "train[7:11]", "spare": "train[11]"}}
    times = [
        seconds(play(scenario("ppo-7b-16gpu", pools, {"place": {"reference.score": {"replicas": n}}})), "reference")
        for n in (1, 2, 4)
    ]
    assert times[0] > 1.8 * times[1] > 1.8 * 1.6 * times[2] and times[2] > times[0] / 4


def test_a_head_costs_next_to_nothing_beside_its_trunk() -> None:
    head = {
        "models": {"reward": {"like": "reference", "arch": None}},
        "place": {"reward.score": {"shares_trunk": True, "pool": "reference"}},
    }
    for scoring in ("batch", "sample"):
        timeline = play(scenario("ppo-7b-16gpu", head, {"schedule": {"scoring": scoring}}))
        [trunk], [own] = stage(timeline, "reference", 1), stage(timeline, "reward", 1)
        assert not any(span.op == "forward" and span.stage == "reward" for span in timeline.spans)
        assert trunk.end_s < own.end_s < trunk.end_s + 0.2


def test_a_cache_saves_its_share_and_forgets_with_a_new_version() -> None:
    cache = {"place": {"reward.score": {"cache": {"hit_share": 0.5, "version_steps": 2}}}}
    plain, kept = play(scenario("ppo-7b-16gpu")), play(scenario("ppo-7b-16gpu", cache))
    for step, share in enumerate((0.0, 0.5, 0.0)):
        [span] = stage(kept, "reward", step)
        assert span.attrs["hits"] == pytest.approx(share * 384, abs=30)
        assert span.seconds == pytest.approx((1 - share) * seconds(plain, "reward", step), rel=0.15)


@given(st.lists(st.floats(0.01, 9), min_size=1, max_size=60), st.integers(1, 12))
@settings(max_examples=50)
def test_calls_go_out_as_places_become_free(each: list[float], concurrency: int) -> None:
    """Graham's list scheduling: within the lower bounds of work and longest call, and below their sum."""
    free = [0.0] * concurrency
    for call in each:
        heapq.heappush(free, heapq.heappop(free) + call)
    found = makespan(np.array(each), concurrency)
    assert found == pytest.approx(max(free))
    assert max(max(each), sum(each) / concurrency) <= found + 1e-9 <= sum(each) / concurrency + max(each) + 2e-9


def test_a_remote_reward_takes_its_calls_over_its_concurrency() -> None:
    def remote(**rule: Any) -> dict[str, Any]:
        score = {"kind": "remote", "max_batch_samples": 1, "remote": {"latency": 2.0} | rule}
        return {"place": {"reward.score": score}}

    for concurrency, rounds in ((4, 96), (100, 4), (1000, 1)):
        timeline = play(scenario("ppo-7b-16gpu", remote(concurrency=concurrency)))
        assert seconds(timeline, "reward") == pytest.approx(2.0 * rounds, abs=0.1)
    [span] = stage(play(scenario("ppo-7b-16gpu", remote(failure_share=0.5, retries=1))), "reward", 1)
    assert span.attrs["calls"] == 384 and span.attrs["retries"] == pytest.approx(192, abs=40)
    assert span.attrs["unanswered"] == pytest.approx(96, abs=30)


def test_recomputed_log_probabilities_cost_the_trainer_a_forward_pass() -> None:
    """On the actor's ranks between rollout and advantage, in every schedule."""
    for mode in ("synchronous", "one_step_off"):
        chosen = scenario("ppo-tiny", {"algorithm": {"old_logprob": "recompute"}, "schedule": {"mode": mode}})
        timeline = play(chosen)
        assert conforms(build(chosen), timeline) == []
        assert not any(span.stage == "old_logprob" for span in play(scenario("ppo-tiny")).spans)
        for step in range(3):
            spans = stage(timeline, "old_logprob", step)
            assert {span.worker for span in spans} == {span.worker for span in stage(timeline, "update_actor", step)}
            assert {span.policy_version for span in spans} == {
                span.policy_version for span in stage(timeline, "rollout", step)
            }


def test_a_function_among_gpus_computes_on_the_host() -> None:
    """It does not slow down the model whose pool it names."""
    rule = {"place": {"reward.score": {"kind": "function", "function": "task", "pool": "reference"}}}
    plain, beside = play(scenario("ppo-7b-16gpu")), play(scenario("ppo-7b-16gpu", rule))
    assert seconds(beside, "reference") == pytest.approx(seconds(plain, "reference"))


def test_a_head_holds_only_itself_and_a_service_elsewhere_nothing() -> None:
    plain, head, away = (
        scenario("ppo-7b-16gpu", parts)
        for parts in (
            {},
            {
                "models": {"reward": {"like": "reference", "arch": None}},
                "place": {"reward.score": {"shares_trunk": True, "pool": "reference"}},
            },
            {"place": {"reward.score": {"kind": "remote", "remote": {"latency": 1.0}}}},
        )
    )
    held = [device_bytes(chosen, chosen.team("reward", "score")[0]) for chosen in (plain, head, away)]
    assert held[0] > 10e9 and held[1] == head.spec("reward").hidden * 2 and held[2] == 0
    pools = [peaks(chosen)["reference"]["peak_bytes"] for chosen in (plain, head)]
    assert pools[1] - pools[0] == held[1]
