"""Engines without a barrier: each has its share, each hands on all that it makes, and none waits for what will not come."""

from collections import Counter
from typing import Any

import pytest

from lab.dataflow import conforms
from lab.fates import ABORTED, FATE, IN_FLIGHT, RESPONSE
from lab.scenario import Scenario
from lab.timeline import Timeline
from lab.wiring import build
from profiles.cost import CostModel
from profiles.profile import datasheet
from simulator import run
from simulator.ahead import fitting
from simulator.run import simulate
from simulator.world import World
from tests.strategies import PROMPTS, SHORT, TIGHT, changed

SHEETS = {"a100-80g-sxm": datasheet("a100-80g-sxm")}
SMALL: dict[str, Any] = {
    "num_steps": 3,
    "algorithm": {"name": "grpo", "kl_coef": 0.0},
    "workload": {
        "prompts_per_step": 12, "samples_per_prompt": 4, "prompt_tokens": PROMPTS, "response_tokens": SHORT,
    },
    "rollout": {"max_num_seqs": 8},
    "update": {"minibatch_samples": 24, "microbatch_tokens": 4096},
    "schedule": {"mode": "asynchronous"},
    "checkpoint": {"every_steps": None},
}  # fmt: skip


def small(*changes: dict[str, Any]) -> Scenario:
    return changed("ppo-7b-16gpu", {"algorithm": None}, SMALL, *changes)


def play(chosen: Scenario) -> Timeline:
    """A run that follows its dataflow, trains all that it is to train, counts every sample once and names every span."""
    timeline = simulate(chosen, SHEETS)
    assert conforms(build(chosen), timeline) == []
    counts = dict(timeline.header.samples)
    assert counts.pop("issued") == sum(counts.values())
    assert counts["trained"] == chosen.num_steps * chosen.workload.samples_per_step
    names = Counter(span.span_id for span in timeline.spans)
    assert [name for name, number in names.items() if number > 1] == []
    return timeline


@pytest.mark.parametrize("in_flight", ["drain", "interrupt", "mix"])
@pytest.mark.parametrize("trigger", ["push", "event", "pull"])
@pytest.mark.parametrize("bound", [{"unit": "versions", "bound": 0}, {"unit": "batches", "bound": 2}])
def test_an_engine_whose_samples_are_stopped_is_as_empty_as_one_whose_samples_ended(
    bound: dict[str, Any], trigger: str, in_flight: str
) -> None:
    sync = {"trigger": trigger, "in_flight": in_flight} | ({"every": 0.5} if trigger == "pull" else {})
    staleness = bound | {"at_bound": "interrupt"}
    chosen = small(
        {
            "schedule": {"trigger_samples": 24, "staleness": staleness},
            "weight_sync": sync,
            "rollout": {"max_num_seqs": 2},
        }
    )
    assert play(chosen).header.samples["aborted"] > 0


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("kv_bytes", [None, TIGHT])
@pytest.mark.parametrize("in_flight", ["drain", "interrupt", "mix"])
def test_responses_may_end_with_their_prefill(tokens: int, kv_bytes: float | None, in_flight: str) -> None:
    """Played ahead, and block by block."""
    lengths = {"response_tokens": {"dist": "fixed", "value": tokens}}
    chosen = small(
        {
            "workload": lengths,
            "rollout": {"kv_bytes": kv_bytes, "max_num_seqs": 64},
            "weight_sync": {"in_flight": in_flight},
        }
    )
    world = World(chosen, build(chosen), CostModel(chosen, SHEETS))
    assert fitting(world, chosen.team("actor", "generate")[0]) == (kv_bytes is None)
    play(chosen)


@pytest.mark.parametrize("trigger", ["push", "event", "pull"])
@pytest.mark.parametrize("in_flight", ["interrupt", "mix"])
def test_all_that_engines_make_is_told(trigger: str, in_flight: str) -> None:
    """The stretch after the last version as well."""
    chosen = small(
        {"weight_sync": {"trigger": trigger, "in_flight": in_flight} | ({"every": 9.0} if trigger == "pull" else {})}
    )
    world = World(chosen, build(chosen), CostModel(chosen, SHEETS))
    run._play(world)
    for note in world.at_end.values():
        note()
    rollouts = [span for span in world.spans if span.stage == "rollout" and not span.op]
    ledger = world.ledger
    whole = [fate != IN_FLIGHT for fate in ledger.column(FATE)]
    settled = int(ledger.column(RESPONSE)[whole].sum()) - _stopped_tokens(world)
    told = sum(span.attrs["response_tokens"] for span in rollouts)
    assert sum(span.attrs["issued"] for span in rollouts) == len(ledger)
    assert settled <= told <= int(ledger.column(RESPONSE).sum())


def _stopped_tokens(world: World) -> int:
    """Of responses that were stopped before their end."""
    return sum(
        int(world.ledger.column(RESPONSE)[i]) for i, fate in enumerate(world.ledger.column(FATE)) if fate == ABORTED
    )


@pytest.mark.parametrize("engines", [2, 4])
@pytest.mark.parametrize("dispatch", ["round_robin", "least_loaded"])
def test_engines_that_are_dry_together_share_what_there_is(engines: int, dispatch: str) -> None:
    """At the start, and after a push of weights, which all take at one instant."""
    place = {
        "actor.generate": [{"pool": "rollout", "engines": 2}, {"pool": "spare", "engines": engines - 2}][: engines // 2]
    }
    chosen = small(
        {"place": place, "rollout": {"max_num_seqs": 64, "dispatch": dispatch},
         "schedule": {"staleness": {"bound": 0}}, "weight_sync": {"trigger": "push", "in_flight": "mix"}}
    )  # fmt: skip
    rollouts = [span for span in play(chosen).stages() if span.stage == "rollout"]
    for step in range(chosen.num_steps):
        issued = [span.attrs["issued"] for span in rollouts if span.step == step]
        assert issued == [chosen.workload.samples_per_step // engines] * engines


@pytest.mark.parametrize("trigger_samples", [None, 24])
def test_samples_that_are_scored_after_the_last_batch_begin_no_other_part_of_it(trigger_samples: int | None) -> None:
    remote = {"latency": 1.0, "timeout": 4.0, "concurrency": 4}
    chosen = small(
        {"place": {"reward.score": {"kind": "remote", "remote": remote}},
         "workload": {"response_tokens": {"dist": "lognormal", "mean": 200, "p95": 600, "max": 900}},
         "rollout": {"max_num_seqs": 16},
         "schedule": {"scoring": "sample", "trigger_samples": trigger_samples,
                      "staleness": {"bound": 8, "at_bound": "down_weight"}},
         "experience": {"transport": "rpc", "batch_samples": 5, "prefetch": True},
         "weight_sync": {"in_flight": "interrupt"}}
    )  # fmt: skip
    play(chosen)


def test_engines_that_look_all_the_time_have_news_when_engines_that_are_told_do() -> None:
    """However short the period: only the looks that find something are played."""
    found = {}
    for trigger, more in (("event", {}), ("pull", {"every": 1e-6})):
        timeline = play(small({"weight_sync": {"trigger": trigger, "in_flight": "mix"} | more}))
        found[trigger] = max(span.end_s for span in timeline.stages())
    assert found["pull"] == pytest.approx(found["event"], rel=0.02)
