"""Engines that help each other within a step: who steals, who stops early, and what is kept."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from lab.dataflow import conforms
from lab.scenario import Scenario
from lab.timeline import Span, Timeline
from lab.wiring import build
from simulator import generating
from simulator.run import simulate
from tests.simulator.test_dispatch import SHEETS, SLOW, scenario

A100 = {"pool": "spare", "engines": 3, "tensor_parallel": 1}
L40S = {"pool": "slow", "engines": 1, "tensor_parallel": 1}
TAIL = {"dist": "lognormal", "mean": 80, "p95": 300, "max": 2000}


def chosen(
    num_prompts: int = 48, seed: int = 0, samples: int = 1, response: dict[str, Any] = TAIL, **rollout: Any
) -> Scenario:
    made = scenario([A100, L40S], num_prompts, response=response)
    work = made.workload.model_dump(mode="json") | {"samples_per_prompt": samples}
    rules = made.rollout.model_dump(mode="json") | {"max_num_seqs": 4} | rollout
    update = made.update.model_dump(mode="json") | {"minibatch_samples": num_prompts * samples}
    return made.replace({"seed": seed, "workload": work, "rollout": rules, "update": update})


def play(made: Scenario) -> Timeline:
    timeline = simulate(made, SHEETS)
    assert conforms(build(made), timeline) == []
    return timeline


def rollouts(timeline: Timeline) -> dict[str, Span]:
    return {span.worker: span for span in timeline.stages() if span.stage == "rollout"}


def end(timeline: Timeline) -> float:
    return max(span.end_s for span in rollouts(timeline).values())


def test_the_devices_of_the_engines_differ() -> None:
    devices = {chosen().hardware.node_of(worker.devices[0]).device for worker in chosen().team("actor", "generate")}
    assert devices == {"a100-80g-sxm", SLOW}


@pytest.mark.parametrize("samples", [1, 4])
def test_engines_that_have_nothing_to_share_do_what_they_do_alone(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = play(chosen(24, samples=samples))
    monkeypatch.setattr(generating, "joint", lambda _: True)
    together = play(chosen(24, samples=samples))
    assert end(together) == pytest.approx(end(alone), rel=1e-9)
    for name, span in rollouts(alone).items():
        other = rollouts(together)[name]
        assert (other.tokens, other.attrs["samples"]) == (span.tokens, span.attrs["samples"])
        assert other.attrs["iterations"] == span.attrs["iterations"]


@given(st.integers(0, 50), st.sampled_from(["round_robin", "least_loaded"]))
@effort(deadline=None, max_examples=10)
def test_nobody_idles_while_others_have_more_than_they_can_start(seed: int, dispatch: str) -> None:
    """Then all engines end within one sample's time of each other, and the step is not longer than its longest engine."""
    plain, stolen = (play(chosen(seed=seed, dispatch=dispatch, stealing=on)) for on in (False, True))
    spans = rollouts(stolen)
    steals = [steal for span in spans.values() for steal in span.attrs.get("steals", ())]
    assert sum(span.attrs["samples"] for span in spans.values()) == 48
    assert stolen.header.samples["trained"] == 48
    assert all(steal["from"] in spans and 1 <= steal["samples"] <= steal["queued"] for steal in steals)
    assert steals, "the slow engine has waiting samples when the first fast one runs dry"
    slowest = max((span.end_s - span.start_s) / max(span.attrs["iterations"], 1) for span in op_spans(stolen, "decode"))
    longest = 2000 * slowest
    assert end(stolen) - min(span.end_s for span in spans.values()) <= longest
    assert end(stolen) <= end(plain) + longest


def test_stealing_shortens_a_step_with_a_slow_engine() -> None:
    ends = [end(play(chosen(96, response={"dist": "fixed", "value": 100}, stealing=on))) for on in (False, True)]
    assert ends[1] < 0.8 * ends[0]


def op_spans(timeline: Timeline, op: str) -> list[Span]:
    return [span for span in timeline.spans if span.stage == "rollout" and span.op == op]


def test_stealing_changes_nothing_where_nothing_waits() -> None:
    plain, stolen = (play(chosen(12, max_num_seqs=16, stealing=on)) for on in (False, True))
    assert end(stolen) == pytest.approx(end(plain), rel=1e-9)
    assert not any("steals" in span.attrs for span in rollouts(stolen).values())


@given(st.integers(0, 50), st.sampled_from([0.1, 0.25, 1.0]), st.sampled_from([1, 3]), st.booleans())
@effort(deadline=None, max_examples=15)
def test_the_first_prompts_that_are_whole_are_kept(seed: int, extra: float, samples: int, stealing: bool) -> None:
    made = chosen(24, seed, samples, over_issue=extra, stealing=stealing)
    timeline = play(made)
    counts, issued = timeline.header.samples, (24 + int(np.ceil(24 * extra - 1e-9))) * samples
    assert counts["issued"] == issued and counts["trained"] == 24 * samples
    assert counts["issued"] == sum(counts[fate] for fate in counts if fate != "issued")
    assert counts["dropped"] + counts["aborted"] == issued - 24 * samples
    ended = sum(span.attrs["samples"] for span in rollouts(timeline).values())
    assert ended == 24 * samples + counts["dropped"], "samples that ended are trained on or dropped"


@given(st.integers(0, 20))
@effort(deadline=None, max_examples=8)
def test_the_step_ends_when_enough_of_a_larger_step_is_back(seed: int) -> None:
    """24 of 30 prompts are whole when the larger step has 24 whole ones; then everybody stops within one iteration."""
    early, whole = play(chosen(24, seed, over_issue=0.25)), play(chosen(30, seed))
    assert whole.header.samples["trained"] == 30
    assert end(early) < end(whole)
    kept = early.header.wasted_tokens + response_tokens(early)
    assert kept < response_tokens(whole)
    stops = {round(span.end_s, 1) for span in rollouts(early).values() if "aborted" in span.attrs}
    assert len(stops) <= 2


def response_tokens(timeline: Timeline) -> int:
    return sum(span.attrs["response_tokens"] for span in rollouts(timeline).values())


def test_more_extra_prompts_cut_the_tail_further() -> None:
    ends = [end(play(chosen(24, 3, max_num_seqs=64, over_issue=extra))) for extra in (0.0, 0.25, 1.0)]
    assert ends[0] > ends[1] > ends[2]


def test_what_is_scored_sample_by_sample_is_what_is_kept() -> None:
    made = chosen(24, 1, over_issue=0.5, stealing=True).replace({"schedule": {"scoring": "sample"}})
    timeline = play(made)
    scored = [span for span in timeline.stages() if span.stage == "reward"]
    lengths = sum(span.tokens for span in scored)
    trained = [span for span in timeline.stages() if span.stage == "update_actor"]
    assert lengths == sum(span.tokens for span in trained) > 0
