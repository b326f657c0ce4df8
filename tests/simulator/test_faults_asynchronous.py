"""Faults without a barrier: every sample is counted once, whatever fails, and the run goes on as it is told to."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.dataflow import conforms
from lab.load import load
from lab.metrics import publications, summarise
from lab.scenario import Scenario
from lab.timeline import Timeline
from lab.wiring import build
from profiles.profile import datasheet
from simulator.run import simulate

BIG = load("scenarios/ppo-7b-16gpu.yaml")
SHEETS = {"a100-80g-sxm": datasheet("a100-80g-sxm")}
FREE = {"schedule": {"mode": "asynchronous"}, "checkpoint": {"every_steps": 2}, "num_steps": 5}
QUICKLY = {"detect": 5.0, "start": 10.0}


def scenario(*faults: dict[str, Any], **changes: Any) -> Scenario:
    return BIG.replace(FREE | {"faults": faults} | changes)


def play(*faults: dict[str, Any], **changes: Any) -> Timeline:
    """A run that follows its dataflow and counts every sample once."""
    chosen = scenario(*faults, **changes)
    timeline = simulate(chosen, SHEETS)
    assert conforms(build(chosen), timeline) == []
    counts = dict(timeline.header.samples)
    assert counts.pop("issued") == sum(counts.values())
    assert counts["trained"] == chosen.num_steps * chosen.workload.samples_per_step
    assert len(publications(timeline)) == chosen.num_steps
    assert len({span.span_id for span in timeline.spans}) == len(timeline.spans)
    return timeline


CALM = play()
LENGTH = max(span.end_s for span in CALM.stages())
kinds = st.sampled_from(
    [
        {"kind": "worker_lost", "target": "actor.generate[0]"} | QUICKLY,
        {"kind": "worker_lost", "target": "actor.generate[1]", "recovery": "restart"} | QUICKLY,
        {"kind": "trainer_lost", "target": "critic.train[0]"} | QUICKLY,
        {"kind": "node_lost", "target": "serve/0"} | QUICKLY,
        {"kind": "buffer_lost"},
        {"kind": "straggler", "target": "actor.generate[0]", "duration": 50.0},
        {"kind": "link_degraded", "target": "port serve/0", "factor": 0.1, "duration": 90.0},
        {"kind": "preempted", "target": "actor.generate[0]", "duration": 60.0, "notice": 5.0},
    ]
)
faults = st.lists(
    st.builds(lambda fault, at: fault | {"at": at}, kinds, st.floats(1, 0.9 * LENGTH)), min_size=1, max_size=3
)


@settings(max_examples=15)
@given(faults, st.sampled_from(["drain", "interrupt", "mix"]), st.sampled_from(["batch", "sample"]))
def test_whatever_fails_every_sample_has_one_fate(chosen: list[dict[str, Any]], in_flight: str, scoring: str) -> None:
    timeline = play(
        *chosen, weight_sync={"in_flight": in_flight}, schedule={"mode": "asynchronous", "scoring": scoring}
    )
    assert len(timeline.header.faults) == len(chosen)
    lost = timeline.header.samples["lost"]
    assert (timeline.header.lost_tokens > 0) <= (lost > 0)
    assert timeline.header.wasted_tokens >= timeline.header.lost_tokens


def test_a_lost_engine_is_back_with_the_weights_of_then() -> None:
    timeline = play({"kind": "worker_lost", "target": "actor.generate[0]", "at": 30.0} | QUICKLY)
    mine = sorted(
        (s for s in timeline.stages() if s.stage == "rollout" and s.worker == "actor.generate[0]"),
        key=lambda s: s.start_s,
    )
    first, second = mine[:2]
    assert first.end_s < 31 and second.start_s >= 45 and second.span_id == "rollout/0/actor.generate[0]~2"
    assert timeline.header.samples["lost"] > 0


def test_an_empty_buffer_loses_nothing_and_a_full_one_what_is_in_it() -> None:
    """Engines that are far ahead: the next batch waits in the buffer while the trainer is at work."""
    update = max((s for s in CALM.stages() if s.stage == "update_critic" and s.step == 2), key=lambda s: s.end_s)
    timeline = play({"kind": "buffer_lost", "at": update.start_s + 0.9 * update.seconds})
    (fault,) = timeline.header.faults
    assert timeline.header.samples["lost"] % BIG.workload.samples_per_prompt == 0
    assert (timeline.header.samples["lost"] > 0) == (fault["lost_tokens"] > 0)


def test_no_batch_is_made_before_another_buffer_stands_there() -> None:
    """It is missed, and started; what ends until then is lost with it."""
    made = sorted(span.start_s for span in CALM.stages() if span.stage == "reward" and span.step == 2)[0]
    at, away = made - 1.0, 15.0
    timeline = play({"kind": "buffer_lost", "at": at} | QUICKLY)
    scored = [span.start_s for span in timeline.stages() if span.stage == "reward"]
    assert any(start < at for start in scored) and not any(at < start < at + away for start in scored)
    assert min(start for start in scored if start > at) > at + away
    waiting = play({"kind": "buffer_lost", "at": at, "detect": 0.0, "start": 0.0})
    assert timeline.header.samples["lost"] > waiting.header.samples["lost"] > 0


def test_a_lost_trainer_takes_the_run_back_and_its_samples_with_it() -> None:
    saved = max(span.end_s for span in CALM.stages() if span.stage == "checkpoint" and span.step == 1)
    timeline = play({"kind": "trainer_lost", "target": "actor.train[0]", "at": saved + 60.0} | QUICKLY)
    (fault,) = timeline.header.faults
    assert fault["step"] == 2 and publications(timeline)[:2] == pytest.approx(publications(CALM)[:2])
    assert fault["lost_tokens"] == timeline.header.lost_tokens > 0
    assert summarise(timeline)["goodput"] < summarise(CALM)["goodput"]
    assert {span.attrs["lag_max"] for span in timeline.stages() if span.stage == "advantage"} <= {0, 1}


@pytest.mark.parametrize("mode", ["synchronous", "one_step_off", "asynchronous"])
@pytest.mark.parametrize("sync", [{"trigger": "pull", "every": 7.0}, {"trigger": "event"}, {"trigger": "push"}])
@pytest.mark.parametrize("share", [0.2, 0.8, 0.999])
def test_engines_never_have_a_version_before_it_is_published(share: float, sync: dict[str, Any], mode: str) -> None:
    """Whatever takes a run back while weights are under way: they are published again, and engines fetch them then."""
    changes = {"schedule": {"mode": mode}, "weight_sync": sync, "num_steps": 3, "checkpoint": {"every_steps": None}}
    calm = simulate(scenario(**changes), SHEETS)
    under_way = max((s for s in calm.stages() if s.stage == "weight_sync" and s.step == 0), key=lambda s: s.end_s)
    at = under_way.start_s + share * under_way.seconds
    timeline = play({"kind": "buffer_lost", "at": at}, **changes)
    made = dict(enumerate(publications(timeline), start=1))
    for span in timeline.stages():
        assert span.stage != "rollout" or made.get(span.policy_version, 0.0) <= span.start_s + 1e-9


@pytest.mark.parametrize("trigger", ["push", "event"])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.95, 1.2])
def test_an_engine_that_fails_while_it_takes_weights_does_nothing_until_it_is_back(share: float, trigger: str) -> None:
    sync = {"trigger": trigger, "in_flight": "mix"}
    calm = simulate(scenario(weight_sync=sync, num_steps=3), SHEETS)
    mine = [s for s in calm.stages() if s.stage == "weight_sync" and s.worker == "actor.generate[0]" and s.step == 0]
    at = mine[0].start_s + share * mine[0].seconds
    timeline = play(
        {"kind": "worker_lost", "target": "actor.generate[0]", "at": at} | QUICKLY, weight_sync=sync, num_steps=3
    )
    spans = [s for s in timeline.spans if s.worker == "actor.generate[0]" and not s.op]
    (back,) = [s for s in spans if s.stage == "restore"]
    assert (back.start_s, back.end_s) == pytest.approx((at, at + 15.0))
    others = [s for s in spans if s is not back]
    assert all(s.end_s <= back.start_s + 1e-9 or s.start_s >= back.end_s - 1e-9 for s in others)


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "worker_lost", "mtbf": 30.0, "detect": 0.1, "start": 0.1},
        {"kind": "scorer_lost", "mtbf": 20.0, "detect": 1.0, "start": 2.0},
        {"kind": "scorer_lost", "target": "reward.score[0]", "at": 0.0} | QUICKLY,
    ],
)
def test_many_losses_break_no_bound_and_nobody_works_while_it_is_away(fault: dict[str, Any]) -> None:
    """What is issued anew in a group's place is no older than the group; a scorer stops where it fails."""
    timeline = play(fault, schedule={"mode": "asynchronous", "scoring": "sample"}, num_steps=3)
    assert timeline.header.faults
    assert max(span.attrs["lag_max"] for span in timeline.stages() if span.stage == "advantage") <= 1
