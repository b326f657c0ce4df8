"""What holds of every simulation: its spans, its resources, its accounts, and the samples it counts, at any stop."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.dataflow import conforms
from lab.fates import BUFFERED, DROPPED, FATE, IN_FLIGHT, MADE, PROMPT, RESPONSE, TRAINED
from lab.metrics import publications, steady_window, step_times, summarise
from lab.scenario import Scenario
from tests.plays import FATES, SLACK, batches, drawn_for, num_batches, overlaps, play
from tests.strategies import on_cores, on_gpus

ANY = st.one_of(on_gpus(), on_cores())
WAITS = frozenset({"sample_wait", "bubble", "barrier", "prompt_wait", "wait"})
"""ops that cost nothing themselves"""


@given(ANY)
@settings(max_examples=25)
def test_spans_follow_the_dataflow_and_none_overlaps_another_on_what_it_holds(chosen: Scenario) -> None:
    played = play(chosen)
    spans, slack = played.timeline.spans, SLACK * played.makespan
    assert conforms(played.world.dataflow, played.timeline) == []
    assert all(0 <= span.start_s <= span.end_s for span in spans)
    assert overlaps((span for span in spans if not span.op), slack) == []
    assert overlaps((span for span in spans if span.op), slack) == []
    assert len({span.span_id for span in spans}) == len(spans)


@given(ANY)
@settings(max_examples=20)
def test_ops_lie_inside_their_stage_unless_they_go_on_beside_it(chosen: Scenario) -> None:
    played = play(chosen)
    stages = {span.span_id: span for span in played.stages_all()}
    for span in played.timeline.spans:
        if span.op:
            own = stages[span.span_id.split("#")[0]]
            assert (own.worker, own.stage, own.step) == (span.worker, span.stage, span.step)
            assert own.start_s - SLACK <= span.start_s
            assert span.end_s <= own.end_s + SLACK * played.makespan or span.resource != span.worker


@given(ANY)
@settings(max_examples=20)
def test_every_pools_shares_are_shares_and_add_to_one(chosen: Scenario) -> None:
    """And the steps tile the time up to the last publication."""
    played = play(chosen)
    summary, ends = summarise(played.timeline), publications(played.timeline)
    for shares in summary["pools"].values():
        assert sum(shares.values()) == pytest.approx(1.0) and min(shares.values()) >= 0
    assert len(ends) == chosen.num_steps and ends == sorted(ends)
    assert sum(step_times(played.timeline)) == pytest.approx(ends[-1]) and ends[-1] <= played.makespan + SLACK
    assert steady_window(played.timeline)[1] == ends[-1]


@given(ANY)
@settings(max_examples=25)
def test_every_sample_has_one_fate_and_is_trained_at_most_once(chosen: Scenario) -> None:
    played = play(chosen)
    counts, world = played.samples, played.world
    number = chosen.workload.samples_per_step
    per_batch = number * chosen.num_steps // num_batches(played)
    assert counts["issued"] == sum(counts[fate] for fate in FATES) == len(world.ledger)
    assert counts["trained"] == number * chosen.num_steps and counts["lost"] == 0
    assert [len(batch) for batch in batches(world)] == [per_batch] * num_batches(played)
    trained = np.sort(np.concatenate(batches(world)))
    assert np.array_equal(trained, np.flatnonzero(world.ledger.column(FATE) == TRAINED))
    drawn = [sample for step in range(num_batches(played)) for sample in drawn_for(world, step)]
    assert len(set(drawn)) == len(drawn), "no sample of the workload is trained twice"


@given(ANY)
@settings(max_examples=20)
def test_tokens_are_those_of_the_samples(chosen: Scenario) -> None:
    """The trainer reads the tokens of its batches; engines made those of all that ended, and what they wasted is counted."""
    played = play(chosen)
    ledger = played.world.ledger
    sizes = ledger.column(PROMPT) + ledger.column(RESPONSE)
    read = sum(int(sizes[batch].sum()) for batch in batches(played.world))
    updates = played.stages("update_actor")
    assert sum(span.tokens for span in updates) == read * chosen.algorithm.epochs
    assert sum(span.attrs["samples"] for span in updates) == chosen.workload.samples_per_step * chosen.num_steps
    for stage in ("value", "old_logprob"):
        if stage in played.world.dataflow.nodes:
            assert sum(span.tokens for span in played.stages(stage)) == read
    fate, ended = ledger.column(FATE), np.isin(ledger.column(FATE), (TRAINED, BUFFERED, DROPPED))
    told = sum(span.attrs["response_tokens"] for span in played.stages("rollout"))
    least, most = (int(ledger.column(RESPONSE)[rows].sum()) for rows in (ended, ended | (fate == IN_FLIGHT)))
    assert least <= told <= most and (told == least or chosen.schedule.mode == "asynchronous")
    assert np.all(ledger.column(MADE) <= ledger.column(RESPONSE))
    wasted = played.timeline.header.wasted_tokens
    assert wasted == int(ledger.column(MADE)[~np.isin(fate, (TRAINED, BUFFERED, IN_FLIGHT))].sum())
