"""Runs without a barrier: what the driver keeps books of, and whole ones with real workers."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import records
from executor.past import Past, joined, size
from executor.resume import resume
from executor.run import execute
from lab import runs
from lab.dataflow import conforms
from lab.fates import ABORTED, BUFFERED, DROPPED
from lab.issuing import Prompts
from lab.metrics import summarise
from lab.scenario import Scenario
from lab.timeline import Timeline
from lab.wiring import build

Make = Callable[..., Scenario]
CLOSE = 1e-3


def played(chosen: Scenario, folder: Path) -> Timeline:
    """A run that is done: lawful, whole on disk, every sample counted once and every batch whole."""
    timeline = execute(chosen, folder)
    assert (timeline.header.status, timeline.header.error) == ("done", "")
    assert conforms(build(chosen), timeline) == []
    counts = dict(timeline.header.samples)
    assert counts.pop("issued") == sum(counts.values())
    assert counts["trained"] == chosen.num_steps * chosen.workload.samples_per_step
    assert counts["lost"] == 0
    names = [span.span_id for span in timeline.spans]
    assert len(set(names)) == len(names)
    assert sorted(span.span_id for span in runs.finished_spans(folder)) == sorted(names)
    assert_trained_once(chosen, folder)
    return timeline


def assert_trained_once(chosen: Scenario, folder: Path) -> None:
    """No sample is in two records, none is older than allowed, and prompts are those of the workload in order."""
    places, largest = list[tuple[int, int]](), build(chosen).largest_lag
    for step in records.steps_of(folder):
        samples = records.read(records.path_of(folder, step), chosen.digest)
        places += zip(samples.prompts.tolist(), samples.indices.tolist(), strict=True)
        lags = samples.policy_version - samples.columns["versions"]
        assert lags.min() >= 0 and (lags.max() <= largest or chosen.weight_sync.in_flight == "mix")
    assert len(set(places)) == len(places) == chosen.num_steps * chosen.workload.samples_per_step


@pytest.mark.real
def test_samples_go_on_under_new_weights(local_ray: None, scenario: Make, tmp_path: Path) -> None:
    chosen = scenario("async-tiny", num_steps=4)
    timeline = played(chosen, tmp_path)
    assert 0 < summarise(timeline)["lag"]["max"] <= 1
    rollouts = [span for span in timeline.stages() if span.stage == "rollout"]
    assert sum(span.attrs["issued"] for span in rollouts) == timeline.header.samples["issued"]
    assert sum(span.attrs["samples"] for span in rollouts) <= timeline.header.samples["issued"]
    assert any(span.attrs["carried"] for span in rollouts[:-1]) and any(s.attrs["recomputed_tokens"] for s in rollouts)
    read = [records.read(records.path_of(tmp_path, step)) for step in range(chosen.num_steps)]
    versions = [row for samples in read for row in samples.columns["token_versions"]]
    assert any(row[0] < row[-1] for row in versions), "a sample has tokens of two versions"
    assert all((np.diff(row) >= 0).all() for row in versions)
    assert all(row.get("logprob_gap", 0.0) < CLOSE for row in timeline.header.learning)


@pytest.mark.real
@pytest.mark.full
@pytest.mark.parametrize("bound", [0, 2, 4])
def test_no_sample_is_older_than_its_bound(local_ray: None, scenario: Make, tmp_path: Path, bound: int) -> None:
    schedule = {"staleness": {"unit": "versions", "bound": bound, "at_bound": "block"}}
    timeline = played(scenario("async-tiny", num_steps=6, schedule=schedule), tmp_path)
    assert summarise(timeline)["lag"]["max"] <= bound


CHANGES: dict[str, dict[str, Any]] = {
    "small batches": {"schedule": {"trigger_samples": 32, "staleness": {"unit": "batches", "bound": 2}}},
    "packed": {"experience": {"transport": "object_store", "compression": "zstd", "batch_samples": 8}},
    "interrupt": {
        "schedule": {"staleness": {"bound": 0, "at_bound": "interrupt"}}, "weight_sync": {"in_flight": "interrupt"},
    },
    "drop": {"schedule": {"staleness": {"bound": 0, "at_bound": "drop"}}, "weight_sync": {"in_flight": "drain"}},
    "scored as they come": {"schedule": {"scoring": "sample"}, "weight_sync": {"in_flight": "drain"}},
    "count less": {
        "schedule": {"staleness": {"bound": 0, "at_bound": "down_weight"}},
        "buffer": {"capacity_samples": 256, "at_high": "throttle"}, "weight_sync": {"kv": "keep"},
    },
}  # fmt: skip


@pytest.mark.real
@pytest.mark.full
@pytest.mark.parametrize("what", CHANGES)
def test_whatever_happens_at_the_bound(local_ray: None, scenario: Make, tmp_path: Path, what: str) -> None:
    timeline = played(scenario("async-tiny", num_steps=4, **CHANGES[what]), tmp_path)
    spans = [span for span in timeline.stages() if span.stage == "advantage"]
    assert all(span.attrs["decision"]["decided"]["start"] for span in spans)
    if what == "packed":
        notes = [span.attrs for span in timeline.stages() if span.stage == "rollout" and span.attrs["messages"]]
        assert notes
        assert all(0 < said["compression"] == said["sent_bytes"] / said["raw_bytes"] < 1 for said in notes)
    if what == "count less":
        assert min(span.attrs["weight_mean"] for span in spans) < 1
    if what == "interrupt":
        assert timeline.header.samples["aborted"] > 0


FAULTS = [
    {"kind": "buffer_lost", "at": 1.5, "detect": 1.0},
    {"kind": "worker_lost", "target": "actor.generate[0]", "at": 4.0, "detect": 1.0, "recovery": "restart"},
]


@pytest.mark.real
@pytest.mark.full
def test_a_run_outlives_its_buffer_and_its_engine(local_ray: None, scenario: Make, tmp_path: Path) -> None:
    """What was lost with them is issued again: nothing is trained twice, and nothing is left out."""
    chosen = scenario("async-tiny", num_steps=24, faults=FAULTS)
    timeline = execute(chosen, tmp_path)
    assert (timeline.header.status, timeline.header.error) == ("done", "")
    assert conforms(build(chosen), timeline) == []
    counts = dict(timeline.header.samples)
    assert counts.pop("issued") == sum(counts.values())
    assert (counts["trained"], counts["lost"] > 0) == (24 * 64, True)
    assert [fault["kind"] for fault in timeline.header.faults] == ["buffer_lost", "worker_lost"]
    assert_trained_once(chosen, tmp_path)


class Enough(Exception):
    """Somebody ends a run."""


@pytest.mark.real
@pytest.mark.full
def test_a_run_goes_on_from_its_checkpoint(local_ray: None, scenario: Make, tmp_path: Path) -> None:
    """What was under way is lost and issued again; nothing is trained twice, and nothing is left out."""
    chosen = scenario("async-tiny", num_steps=5, checkpoint={"every_steps": 2})

    def ended(stage: str, finished: int) -> None:
        if finished == 3:
            raise Enough

    assert execute(chosen, tmp_path, ended).header.status == "failed"
    timeline = execute(chosen, tmp_path, earlier=resume(chosen, tmp_path))
    assert (timeline.header.status, timeline.header.error) == ("done", "")
    assert conforms(build(chosen), timeline) == []
    counts = dict(timeline.header.samples)
    assert counts.pop("issued") == sum(counts.values())
    assert (counts["trained"], counts["lost"] > 0) == (5 * 64, True)
    assert_trained_once(chosen, tmp_path)
    rollouts = [span.step for span in timeline.stages() if span.stage == "rollout"]
    assert rollouts == sorted(rollouts)


def issue(past: Past, step: int, fate: int) -> np.ndarray:
    numbers = past.fates.issue(step, np.arange(64), 0)
    past.fates.settle(numbers, fate)
    return numbers


def test_a_run_that_goes_on_issues_again_what_was_not_trained(scenario: Make) -> None:
    chosen = scenario("async-tiny")
    past = Past(chosen)
    past.train(issue(past, 0, BUFFERED))
    issue(past, 1, BUFFERED)
    issue(past, 2, DROPPED)
    issue(past, 3, ABORTED)
    again = Past(chosen, 1, past.state())
    assert again.counts() == past.counts() | {"buffered": 0, "lost": 64}
    assert again.trained().tolist() == [[0] * 64, list(range(64))]
    first = Prompts(chosen, again.trained()).take(1, 64)[0]
    assert (first.step, first.number) == (1, 0)
    assert Past(chosen, 1, again.state()).counts() == again.counts()


@given(st.lists(st.sets(st.integers(0, 60)), max_size=5))
def test_ranges_hold_what_was_put_into_them(parts: list[set[int]]) -> None:
    ranges, known = joined([], []), set[int]()
    for part in parts:
        ranges = joined(ranges, part - known)
        known |= part
    assert [place for start, end in ranges for place in range(start, end)] == sorted(known)
    assert size(ranges) == len(known)
    assert all(end < start for (_, end), (start, _) in pairwise(ranges))


def test_whoever_goes_back_by_itself_knows_what_it_loses(scenario: Make) -> None:
    """Also what was issued and trained since the checkpoint."""
    chosen = scenario("async-tiny")
    past = Past(chosen)
    past.train(issue(past, 0, BUFFERED))
    saved = past.state()
    past.train(issue(past, 1, BUFFERED))
    issue(past, 2, ABORTED)
    issue(past, 3, BUFFERED)
    again = Past(chosen, 1, saved, past)
    assert again.counts() == {
        "issued": 256, "trained": 64, "aborted": 64, "lost": 128, "dropped": 0, "buffered": 0, "in_flight": 0
    }  # fmt: skip
    assert Past(chosen, 0, None, past).counts()["lost"] == 192
