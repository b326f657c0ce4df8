"""Engines and scorers that come and go with the load: never fewer than the least, never more than the most."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from pydantic import ValidationError

from lab.dataflow import conforms
from lab.scenario import Scenario
from lab.timeline import Span, Timeline
from lab.wiring import build
from simulator.run import simulate
from tests.simulator.test_dispatch import SHEETS, scenario

A100 = {"pool": "spare", "engines": 4, "tensor_parallel": 1}
LONG = {"dist": "lognormal", "mean": 600, "p95": 1500, "max": 3000}
QUICK = {"start": "5 s", "look": "1 s", "drain": "10 s", "hold": "10 s"}


def chosen(num_prompts: int = 240, seed: int = 0, num_steps: int = 2, **scale: Any) -> Scenario:
    made = scenario([A100], num_prompts, response=LONG, num_steps=num_steps)
    rules = made.rollout.model_dump(mode="json") | {"max_num_seqs": 8}
    scaling = {"actor.generate": QUICK | scale} if scale else {}
    return made.replace({"seed": seed, "rollout": rules, "scaling": scaling, "checkpoint": {"every_steps": None}})


def play(made: Scenario) -> Timeline:
    timeline = simulate(made, SHEETS)
    assert conforms(build(made), timeline) == []
    return timeline


def spans(timeline: Timeline, stage: str) -> list[Span]:
    return [span for span in timeline.stages() if span.stage == stage]


def rollout_end(timeline: Timeline, step: int = 0) -> float:
    return max(span.end_s for span in spans(timeline, "rollout") if span.step == step)


def decisions(timeline: Timeline) -> list[dict[str, Any]]:
    return [record for span in spans(timeline, "rollout") for record in span.attrs.get("scaling", ())]


def most_at_once(found: list[Span]) -> int:
    """Spans that overlap in time."""
    events = sorted([(span.start_s, 1) for span in found] + [(span.end_s, -1) for span in found])
    return int(np.cumsum([step for _, step in events]).max())


@given(st.integers(0, 20), st.integers(1, 3), st.integers(0, 1))
@effort(deadline=None, max_examples=8)
def test_the_number_stays_within_its_limits(seed: int, least: int, more: int) -> None:
    made = chosen(seed=seed, min=least, max=least + more)
    timeline = play(made)
    found = spans(timeline, "rollout")
    first = {span.worker for span in found if span.step == 0 and span.start_s < 0.1}
    assert len(first) == least
    assert most_at_once(found) <= least + more
    assert timeline.header.samples["trained"] == 2 * 240
    for span in spans(timeline, "setup"):
        assert span.end_s - span.start_s >= 5.0 - 1e-9
        begins = [other.start_s for other in found if other.worker == span.worker and other.start_s >= span.start_s]
        assert all(start >= span.end_s - 1e-9 for start in begins), "nobody works while it starts"


def test_engines_that_come_up_take_waiting_samples_and_shorten_the_step() -> None:
    alone, growing, all_up = (play(chosen(min=least, max=most)) for least, most in ((1, 1), (1, 4), (4, 4)))
    assert rollout_end(all_up) < rollout_end(growing) < rollout_end(alone)
    late = [span for span in spans(growing, "rollout") if span.step == 0 and span.start_s > 5]
    assert late and all(span.attrs["steals"] and span.attrs["samples"] for span in late)
    assert decisions(growing) and decisions(growing)[0]["why"] == "backlog"
    assert not decisions(alone)


def test_what_is_placed_and_up_is_what_steals() -> None:
    """With as many at least as at most, scaling is work stealing among all engines."""
    made = chosen(min=4, max=4)
    stealing = made.replace({"scaling": {}, "rollout": made.rollout.model_dump(mode="json") | {"stealing": True}})
    assert rollout_end(play(made)) == pytest.approx(rollout_end(play(stealing)))


def test_a_start_that_lasts_longer_than_the_work_is_not_worth_it() -> None:
    timeline = play(chosen(24, min=1, max=4, start="1000 s"))
    assert not spans(timeline, "setup") and not decisions(timeline)


def test_engines_without_work_are_stopped() -> None:
    timeline = play(chosen(240, num_steps=3, min=1, max=4, hold="1 s", drain="30 s"))
    assert {record["why"] for record in decisions(timeline)} == {"backlog", "idle"}
    stopped = [record for record in decisions(timeline) if record["target"] < record["ready"]]
    assert stopped
    synced = [span for span in spans(timeline, "weight_sync") if span.worker.startswith("actor.generate")]
    per_step = [len([span for span in synced if span.step == step]) for step in range(3)]
    assert min(per_step) >= 1 and max(per_step) <= 4


def test_the_default_start_is_what_an_engine_takes() -> None:
    made = chosen(min=1, max=2, start=None, drain="5 s")
    starts = spans(play(made), "setup")
    assert starts and starts[0].end_s - starts[0].start_s > 30.0


def unbarred(**scale: Any) -> Scenario:
    """The trainer waits for the engines, which start anew whatever they may."""
    made = chosen(96, num_steps=6, **scale)
    schedule = {"mode": "asynchronous", "staleness": {"bound": 2, "at_bound": "block"}}
    return made.replace({"schedule": schedule})


def test_without_a_barrier_engines_come_as_long_as_more_could_be_issued() -> None:
    one, grows, four = (play(unbarred(min=least, max=most)) for least, most in ((1, 1), (1, 4), (4, 4)))

    def end(timeline: Timeline) -> float:
        return max(span.end_s for span in spans(timeline, "update_actor"))

    assert end(four) < end(grows) < end(one)
    starts = spans(grows, "setup")
    assert starts
    for setup in starts:
        mine = [span for span in spans(grows, "rollout") if span.worker == setup.worker]
        assert all(span.start_s >= setup.end_s - 1e-9 or span.end_s <= setup.start_s + 1e-9 for span in mine)
    begun = {span.worker for span in spans(grows, "rollout") if span.start_s < 1.0}
    assert begun == {"actor.generate[0]"}
    for timeline in (one, grows, four):
        assert timeline.header.samples["trained"] == 6 * 96
        counts = timeline.header.samples
        assert counts["issued"] == sum(number for fate, number in counts.items() if fate != "issued")


def test_without_a_barrier_engines_go_when_the_trainer_is_slow() -> None:
    """Short responses: one engine keeps up, and the others are stopped once they have been tried."""
    made = unbarred(min=1, max=4, hold="2 s", drain="6 s")
    short = made.workload.model_dump(mode="json") | {"response_tokens": {"dist": "fixed", "value": 24}}
    timeline = play(made.replace({"workload": short, "num_steps": 8}))
    least = [record for record in decisions(timeline) if record["target"] < record["ready"] + record["starting"]]
    assert timeline.header.samples["trained"] == 8 * 96
    assert all(record["why"] == "idle" for record in least)


def scored(replicas: int, **scale: Any) -> Scenario:
    made = chosen(96)
    data = made.model_dump(mode="json", by_alias=True)
    data["pools"] = {name: "train[11]" if name == "spare" else place for name, place in data["pools"].items()}
    data["pools"] |= {"judges": "train[7:10]"}
    place = {"pool": "judges", "kind": "model", "max_batch_samples": 4, "replicas": replicas}
    data["place"] |= {"reward.score": place, "actor.generate": [A100 | {"engines": 1}]}
    data["rollout"]["max_num_seqs"] = 96
    data["workload"]["response_tokens"] = {"dist": "fixed", "value": 200}
    scaling = {"reward.score": {"start": "0.2 s", "look": "0.1 s", "hold": "1 s", "drain": "0.5 s"} | scale}
    return made.replace(data | {"schedule": {"scoring": "sample"}, "scaling": scaling if scale else {}})


def test_scorers_that_come_up_shorten_the_scoring_of_a_burst() -> None:
    def end(timeline: Timeline) -> float:
        return max(span.end_s for span in spans(timeline, "reward") if span.step == 0)

    one, grows, three = (play(scored(3, min=least, max=most)) for least, most in ((1, 1), (1, 3), (3, 3)))
    assert end(three) < end(grows) < end(one)
    assert end(three) == pytest.approx(end(play(scored(3))))
    assert {span.worker for span in spans(grows, "setup")} <= {"reward.score[1]", "reward.score[2]"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scaling": {"actor.generate": {"min": 5}}}, "more than the most"),
        ({"scaling": {"actor.generate": {"max": 5}}}, "4 are placed"),
        ({"scaling": {"reward.score": {}}}, "scored at once"),
        ({"scaling": {"actor.generate": {}}, "evaluate": {"every_steps": 1}}, "takes all engines"),
        ({"schedule": {"mode": "asynchronous"}, "rollout": {"stealing": True}}, "when it has room"),
        ({"schedule": {"mode": "asynchronous"}, "rollout": {"over_issue": 0.5}}, "when it has room"),
        (
            {
                "scaling": {"actor.generate": {}},
                "faults": [{"kind": "worker_lost", "at": 1.0, "target": "actor.generate[0]"}],
            },
            "not replaced",
        ),
    ],
)
def test_what_cannot_be_scaled_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValidationError, ValueError), match=message):
        chosen().replace(changes)
