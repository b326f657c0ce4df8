"""Generation without a barrier: lags stay within their bound, nothing gets lost, and the slowest stage sets the pace."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.dataflow import conforms
from lab.errors import RunStuck
from lab.fates import INDEX, STEP
from lab.load import load
from lab.metrics import step_times, summarise
from lab.policies import staleness
from lab.scenario import Scenario
from lab.timeline import Span, Timeline
from lab.wiring import build
from profiles.cost import CostModel
from profiles.profile import datasheet
from simulator import asynchronous, run
from simulator.collecting import Collecting
from simulator.run import simulate
from simulator.world import Process, World

SHEETS = {"a100-80g-sxm": datasheet("a100-80g-sxm")}
BASE = load("scenarios/ppo-7b-16gpu.yaml").model_dump(mode="json", by_alias=True)
GRPO = {"name": "grpo", "ppo_epochs": 1, "kl_coef": 0.0, "clip": 0.2}
SMALL: dict[str, Any] = {
    "algorithm": GRPO,
    "pools": BASE["pools"] | {"rollout": "serve[2:4]"},
    "workload": {
        "prompts_per_step": 16,
        "samples_per_prompt": 4,
        "prompt_tokens": {"dist": "lognormal", "mean": 100, "p95": 200, "max": 256},
        "response_tokens": {"dist": "lognormal", "mean": 120, "p95": 300, "max": 512},
    },
    "rollout": {"max_num_seqs": 16},
    "update": {"minibatch_samples": 16, "microbatch_tokens": 4096},
    "place": {"actor.train": {"pool": "actors", "data_parallel": 2, "tensor_parallel": 2, "zero_stage": 1}},
    "weight_sync": {"in_flight": "mix"},
    "checkpoint": {"every_steps": None},
}
MODE = {"mode": "asynchronous"}
BARRIER: dict[str, Any] = {"schedule": {"mode": "synchronous"}, "weight_sync": {}}
WHOLE = ("algorithm", "schedule", "weight_sync", "buffer")
"""sections that a change replaces as a whole"""


def scenario(*changes: Mapping[str, Any]) -> Scenario:
    data = BASE
    for change in ({"num_steps": 4, "schedule": MODE}, SMALL, *changes):
        merged = {
            key: data[key] | value if isinstance(data.get(key), dict) and key not in WHOLE else value
            for key, value in change.items()
        }
        data = data | merged
    return load_of(data)


def load_of(data: Mapping[str, Any]) -> Scenario:
    return load("scenarios/ppo-7b-16gpu.yaml").replace(dict(data))


def play(chosen: Scenario) -> Timeline:
    return simulate(chosen, SHEETS)


def world_of(chosen: Scenario) -> World:
    return World(chosen, build(chosen), CostModel(chosen, SHEETS))


def spans(timeline: Timeline, stage: str) -> list[Span]:
    return [span for span in timeline.stages() if span.stage == stage]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    batch = draw(st.sampled_from([None, 32]))
    at_bound, unit = draw(st.sampled_from(["block", "drop", "down_weight", "interrupt"])), "versions"
    trigger = draw(st.sampled_from(["push", "pull", "event"]))
    every = {"every": draw(st.sampled_from([0.5, 3.0]))} if trigger == "pull" else {}
    capacity = draw(st.sampled_from([None, 64, 100, 200]))
    return scenario(
        {
            "seed": draw(st.integers(0, 99)),
            "num_steps": draw(st.integers(1, 4)),
            "algorithm": draw(st.sampled_from([GRPO, BASE["algorithm"]])),
            "schedule": MODE
            | {
                "trigger_samples": batch,
                "staleness": {"unit": unit, "bound": draw(st.integers(0, 2)), "at_bound": at_bound},
            },
            "buffer": {"capacity_samples": capacity, "at_high": draw(st.sampled_from(["pause", "throttle"]))},
            "weight_sync": {"trigger": trigger, "in_flight": draw(st.sampled_from(["drain", "interrupt", "mix"]))}
            | every,
            "rollout": {"max_num_seqs": draw(st.sampled_from([2, 8, 64]))},
        }
    )


@given(scenarios())
@settings(max_examples=25, deadline=None)
def test_any_run_conforms_conserves_and_keeps_the_bound(chosen: Scenario) -> None:
    timeline = play(chosen)
    assert conforms(build(chosen), timeline) == []
    counts, summary = timeline.header.samples, summarise(timeline)
    assert counts["issued"] == sum(number for fate, number in counts.items() if fate != "issued")
    assert counts["trained"] == chosen.num_steps * chosen.workload.samples_per_step
    assert summary["steps_done"] == chosen.num_steps
    if chosen.schedule.staleness.at_bound != "down_weight":
        assert summary["lag"]["max"] <= chosen.schedule.staleness.bound
    if chosen.schedule.staleness.at_bound in ("block", "down_weight"):
        assert counts["dropped"] == 0
    if chosen.schedule.staleness.at_bound == "block" and chosen.weight_sync.in_flight != "interrupt":
        assert counts["aborted"] == 0 == timeline.header.wasted_tokens


@given(scenarios(), st.floats(0.0, 60.0))
@settings(max_examples=15, deadline=None)
def test_every_sample_has_one_fate_at_any_time_and_the_buffer_is_never_above_its_capacity(
    chosen: Scenario, stop: float
) -> None:
    world, most = world_of(chosen), 0
    room = Collecting.room

    def watched(buffer: Collecting, num_seats: int, version: int) -> int:
        nonlocal most
        allowed = room(buffer, num_seats, version)
        most = max(most, buffer._held + buffer._pinned + buffer._in_flight + allowed - buffer.limits.capacity_samples)
        return allowed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collecting, "room", watched)
        run._start(world)
        world.env.run(until=world.env.any_of([world.env.timeout(stop), world.env.all_of(world.last())]))
    counts = world.ledger.counts()
    assert counts.pop("issued") == sum(counts.values()) == len(world.ledger)
    assert most <= 0


def test_runs_repeat() -> None:
    assert play(scenario()).digest() == play(scenario()).digest()


def test_a_bound_of_zero_trains_every_step_on_its_own_samples_in_order() -> None:
    chosen = scenario({"schedule": MODE | {"staleness": {"bound": 0}}})
    world = world_of(chosen)
    run._start(world)
    world.env.run(until=world.env.all_of(world.last()))
    for step, batch in world.ledger.batches.items():
        assert set(world.ledger.column(STEP)[batch].tolist()) == {step}
        assert sorted(world.ledger.column(INDEX)[batch].tolist()) == list(range(chosen.workload.samples_per_step))
    timeline = play(chosen)
    assert summarise(timeline)["lag"] == {"mean": 0.0, "max": 0}
    ends = {span.step: span.end_s for span in spans(timeline, "weight_sync")}
    assert all(span.start_s >= ends[span.step - 1] for span in spans(timeline, "rollout") if span.step)
    synchronous = play(scenario(BARRIER))
    assert summarise(timeline)["makespan_s"] == pytest.approx(summarise(synchronous)["makespan_s"], rel=0.05)


FIXED = {
    "num_steps": 8,
    "workload": {
        "prompt_tokens": {"dist": "fixed", "value": 64},
        "response_tokens": {"dist": "fixed", "value": 128},
        "prompts_per_step": 32,
    },
    "update": {"minibatch_samples": 128},
    "weight_sync": {"kv": "keep", "in_flight": "mix"},
}


def test_the_trainer_sets_the_pace_where_it_is_slowest() -> None:
    short = {"workload": {"response_tokens": {"dist": "fixed", "value": 8}}, "rollout": {"max_num_seqs": 256}}
    timeline = play(scenario(FIXED, short, {"schedule": MODE | {"staleness": {"bound": 3}}}))
    chain = ("advantage", "update_actor", "weight_sync")
    steady = step_times(timeline)[3:]
    for step, seconds in enumerate(steady, start=3):
        own = [span for span in timeline.stages() if span.step == step and span.worker == "actor.train[0]"]
        busy = sum(span.seconds for span in own if span.stage in chain)
        assert seconds == pytest.approx(busy, rel=0.02), "nothing but the driver's calls is beside them"
    assert max(steady) == pytest.approx(min(steady), rel=1e-2)


def test_the_engines_set_the_pace_where_they_are_slowest() -> None:
    """A period is the time that engines of always as many running samples take for a batch."""
    slow = {"response_tokens": {"dist": "fixed", "value": 1024}, "prompt_tokens": {"dist": "fixed", "value": 64}}
    chosen = scenario(FIXED, {"workload": slow, "rollout": {"max_num_seqs": 16}, "num_steps": 6})
    timeline = play(chosen)
    summary, engines = summarise(timeline), len(chosen.team("actor", "generate"))
    assert summary["bottleneck"]["stage"] == "rollout"
    waves = chosen.workload.samples_per_step / (engines * chosen.rollout.max_num_seqs)
    once = {"workload": slow | {"prompts_per_step": 8}, "update": {"minibatch_samples": 32}, "num_steps": 1}
    alone = play(scenario(FIXED, BARRIER, once))
    wave = max(span.seconds for span in spans(alone, "rollout"))
    sync = max(span.seconds for span in spans(timeline, "weight_sync"))
    mean = sum(step_times(timeline)[2:]) / len(step_times(timeline)[2:])
    assert waves * wave <= mean * 1.03 and mean <= waves * wave + 2 * sync + 0.05 * wave * waves


def test_without_a_barrier_no_step_is_longer_than_with_one() -> None:
    free = summarise(play(scenario({"num_steps": 6})))["step_s"]["mean"]
    held = summarise(play(scenario(BARRIER, {"num_steps": 6})))["step_s"]["mean"]
    assert free < held


def test_drop_and_interrupt_waste_tokens_and_down_weight_counts_less() -> None:
    slow = {"update": {"minibatch_samples": 16}, "num_steps": 4, "buffer": {"capacity_samples": 400}}
    for at_bound, fate in (("drop", "dropped"), ("interrupt", "aborted")):
        timeline = play(scenario(slow, {"schedule": MODE | {"staleness": {"bound": 0, "at_bound": at_bound}}}))
        assert timeline.header.samples[fate] > 0 and timeline.header.wasted_tokens
    late = play(scenario(slow, {"schedule": MODE | {"staleness": {"bound": 0, "at_bound": "down_weight"}}}))
    assert late.header.samples["dropped"] == late.header.samples["aborted"] == 0
    assert min(span.attrs["weight_mean"] for span in spans(late, "advantage")) < 1
    assert summarise(late)["lag"]["max"] > 0


def test_samples_of_a_prompt_are_trained_together() -> None:
    world = world_of(scenario({"weight_sync": {"in_flight": "interrupt"}, "schedule": MODE | {"trigger_samples": 32}}))
    run._start(world)
    world.env.run(until=world.env.all_of(world.last()))
    assert world.ledger.counts()["aborted"] > 0
    for batch in world.ledger.batches.values():
        prompts = [
            (int(step), int(index) // 4)
            for step, index in zip(world.ledger.column(STEP)[batch], world.ledger.column(INDEX)[batch], strict=True)
        ]
        assert all(prompts.count(prompt) == 4 for prompt in prompts)


def test_a_run_that_cannot_go_on_says_who_waits_for_whom() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staleness, "may_issue", lambda rule, version, issued, now: max(64 - issued, 0))
        with pytest.raises(RunStuck) as stuck:
            play(scenario())
    told = str(stuck.value)
    assert "advantage of step 1 waits for reward of step 1" in told
    assert "reward of step 1 waits for rollout of step 1" in told
    assert "batch 1 waits for 64 samples, 0 are ready and 0 under way" in told


def kept(production: asynchronous.Production, step: int) -> Process:
    """A page that nobody ever gives back."""
    yield production._world.env.event()


def test_a_full_buffer_says_so() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asynchronous.Production, "_release", kept)
        with pytest.raises(RunStuck, match="the buffer pushes back, 64 of 64 places are taken"):
            play(scenario({"buffer": {"capacity_samples": 64}}))


def test_synchronous_runs_say_it_too() -> None:
    chosen = scenario(BARRIER)
    world = world_of(chosen)
    with pytest.MonkeyPatch.context() as patch:
        never = world.env.event()

        def endless(world: World, step: int) -> list[Any]:
            def wait() -> Any:
                yield never if step else world.env.timeout(0.0)

            return [wait()]

        patch.setitem(run.STAGES, "reward", endless)
        with pytest.raises(
            RunStuck, match=r"reward of step 1 is under way and does not end; advantage of step 1 waits"
        ):
            play(chosen)


def test_engines_that_never_hear_of_the_last_versions_are_shown_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "too_rare", lambda *_: None)  # which refuses just that
    never = {
        "weight_sync": {"trigger": "pull", "every": 1e4, "in_flight": "mix"},
        "buffer": {"capacity_samples": 999},
        "schedule": MODE | {"staleness": {"bound": 0, "at_bound": "down_weight"}},
    }
    timeline = play(scenario(never))
    rollouts = spans(timeline, "rollout")
    assert {span.step for span in rollouts} == {0} and len(rollouts) == 2
    counts = timeline.header.samples
    back = sum(span.attrs["samples"] for span in rollouts)
    assert counts["trained"] + counts["buffered"] <= back < counts["issued"], "some of a prompt are back, some are not"
    assert sum(span.attrs["issued"] for span in rollouts) == counts["issued"]
    assert summarise(timeline)["lag"] == {"mean": 1.5, "max": 3}
