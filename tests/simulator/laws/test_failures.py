"""Whatever fails, in whatever schedule: the run ends, every sample has one fate, and what a checkpoint holds is not lost."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.dataflow import conforms
from lab.fates import FATE, TRAINED
from lab.metrics import publications, summarise
from lab.scenario import Scenario
from tests.plays import FATES, SLACK, Played, batches, drawn_for, num_batches, overlaps, play
from tests.strategies import on_gpus

SOON = {"detect": 1.0, "start": 2.0}
NOTICE = 0.5
PASSING = {"duration": 3.0}
KINDS: tuple[dict[str, Any], ...] = (
    {"kind": "worker_lost", "target": "actor.generate[0]", "recovery": "reassign"} | SOON,
    {"kind": "worker_lost", "target": "actor.generate[1]", "recovery": "restart"} | SOON,
    {"kind": "trainer_lost", "target": "actor.train[0]"} | SOON,
    {"kind": "node_lost", "target": "serve/0"} | SOON,
    {"kind": "node_lost", "target": "train/0"} | SOON,
    {"kind": "scorer_lost", "target": "reward.score[0]"} | SOON,
    {"kind": "buffer_lost"},
    {"kind": "straggler", "target": "actor.generate[0]", "factor": 0.3} | PASSING,
    {"kind": "straggler", "target": "actor.train[0]", "factor": 0.3},
    {"kind": "link_degraded", "target": "port train/0", "factor": 0.1} | PASSING,
    {"kind": "preempted", "target": "actor.generate[1]", "notice": 1.0} | PASSING | SOON,
    {"kind": "preempted", "target": "train/0", "notice": NOTICE} | PASSING | SOON,
)
TRAINERS = tuple(kind for kind in KINDS if kind.get("target") in ("actor.train[0]", "train/0") and "factor" not in kind)
struck = st.lists(st.tuples(st.sampled_from(KINDS), st.floats(0.01, 0.95)), min_size=1, max_size=3)


def failing(calm: Played, faults: list[tuple[dict[str, Any], float]]) -> Scenario:
    """The same with these faults, at shares of the time that it took without any."""
    return calm.scenario.replace({"faults": [fault | {"at": share * calm.makespan} for fault, share in faults]})


@given(on_gpus(loss=True), struck)
@settings(max_examples=25)
def test_the_run_ends_and_every_sample_has_one_fate(
    chosen: Scenario, faults: list[tuple[dict[str, Any], float]]
) -> None:
    played = play(failing(play(chosen), faults))
    counts, world = played.samples, played.world
    assert len(played.timeline.header.faults) == len(faults)
    assert conforms(world.dataflow, played.timeline) == []
    assert len(publications(played.timeline)) == chosen.num_steps
    assert counts["issued"] == sum(counts[fate] for fate in FATES)
    assert counts["trained"] == chosen.num_steps * chosen.workload.samples_per_step
    trained = np.sort(np.concatenate(batches(world)))
    assert np.array_equal(trained, np.flatnonzero(world.ledger.column(FATE) == TRAINED))
    drawn = [sample for step in range(num_batches(played)) for sample in drawn_for(world, step)]
    assert len(set(drawn)) == len(drawn), "what was trained and lost is trained again once"


@given(on_gpus(loss=True), struck)
@settings(max_examples=15)
def test_spans_and_accounts_stay_lawful(chosen: Scenario, faults: list[tuple[dict[str, Any], float]]) -> None:
    played = play(failing(play(chosen), faults))
    spans, slack = played.timeline.spans, SLACK * played.makespan
    assert all(span.start_s <= span.end_s for span in spans)
    assert overlaps((span for span in spans if not span.op), slack) == []
    assert len({span.span_id for span in spans}) == len(spans)
    summary = summarise(played.timeline)
    for shares in summary["pools"].values():
        assert sum(shares.values()) == pytest.approx(1.0) and min(shares.values()) >= 0
    assert 0 <= summary["goodput"] <= 1 and 0 <= summary["lost_s"] <= played.makespan + slack
    assert summary["tokens"]["wasted"] >= summary["tokens"]["lost"] >= 0
    assert all(fault["lost_tokens"] >= 0 for fault in played.timeline.header.faults if "lost_tokens" in fault)


def saved(played: Played, time: float) -> int:
    """Steps that the last checkpoint holds that every rank had written by then, in any attempt."""
    ends: dict[int, list[float]] = {}
    for span in played.stages_all():
        if span.stage == "checkpoint" and not span.lost:
            ends.setdefault(span.step, []).append(span.end_s)
    return max((step + 1 for step, own in ends.items() if max(own) <= time), default=0)


@given(
    on_gpus(loss=True), st.lists(st.tuples(st.sampled_from(TRAINERS), st.floats(0.01, 0.95)), min_size=1, max_size=2)
)
@settings(max_examples=20)
def test_nothing_is_lost_that_a_checkpoint_holds(chosen: Scenario, faults: list[tuple[dict[str, Any], float]]) -> None:
    """And every step is trained to its end exactly once by every rank."""
    played = play(failing(play(chosen.replace({"checkpoint": {"every_steps": 1, "blocking": True}})), faults))
    backs = [(fault["at_s"], fault["step"]) for fault in played.timeline.header.faults if "step" in fault]
    for at, step in backs:
        assert step >= saved(played, at)
    for span in played.timeline.lost():
        if span.stage.startswith("update_"):
            assert any(step <= span.step and span.end_s <= at + NOTICE + SLACK for at, step in backs)
    ranks = chosen.place.actor_train.data_parallel
    done = sorted(span.step for span in played.stages("update_actor"))
    assert done == sorted(list(range(num_batches(played))) * ranks)


@given(on_gpus(loss=True), st.floats(0.05, 0.9))
@settings(max_examples=10)
def test_a_fault_takes_no_time_away(chosen: Scenario, share: float) -> None:
    """Up to the fault the run is the one without it."""
    calm = play(chosen)
    played = play(failing(calm, [(TRAINERS[0], share)]))
    at = played.timeline.header.faults[0]["at_s"]
    before, after = (
        {span.span_id: span.end_s for span in one.stages_all() if span.end_s < at and "generate" not in span.worker}
        for one in (calm, played)
    )
    assert before == pytest.approx({name: after[name] for name in before}, rel=1e-9)
    assert played.makespan > at
