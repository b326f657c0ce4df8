"""Engines that help each other, and samples that are sent in a stage of their own: whole runs of real workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executor.run import execute
from executor.sending import SHARED
from lab.dataflow import conforms
from lab.scenario import Scenario
from lab.timeline import Span, Timeline
from lab.wiring import build
from profiles.profile import datasheet
from simulator.run import simulate

pytestmark = pytest.mark.real
Make = Callable[..., Scenario]
PROMPTS, TRIED, ISSUED = 8, 4, 12


def two_engines(scenario: Make, **changes: Any) -> Scenario:
    engines = {"place": {"actor.generate": [{"pool": "all", "speed": 3.0}, {"pool": "all"}]}}
    return scenario("quickstart", **engines, **changes)


def spans(timeline: Timeline, stage: str, op: str = "") -> list[Span]:
    return [span for span in timeline.spans if (span.stage, span.op) == (stage, op)]


@pytest.mark.full
def test_a_run_with_over_issue_stealing_and_samples_sent_as_they_end(
    local_ray: None, scenario: Make, tmp_path: Path
) -> None:
    """Prompts are dealt three to one, though engines are equal: the one that has few steals."""
    chosen = two_engines(
        scenario, num_steps=2, rollout={"over_issue": 0.5, "stealing": True, "max_num_seqs": 4, "dispatch": "weighted"},
        schedule={"scoring": "sample"},
        experience={"transport": "shared_memory", "compression": "zstd", "prefetch": True, "batch_samples": 6},
    )  # fmt: skip
    timeline = execute(chosen, tmp_path)
    header = timeline.header
    assert (header.status, header.error) == ("done", "")
    assert conforms(build(chosen), timeline) == []
    counts = header.samples
    assert (counts["issued"], counts["trained"]) == (2 * ISSUED * TRIED, 2 * PROMPTS * TRIED)
    assert counts["aborted"] > 0 and counts["issued"] == sum(counts.values()) - counts["issued"]
    rollouts = spans(timeline, "rollout")
    assert (header.wasted_tokens or 0) > 0
    assert counts["aborted"] == sum(span.attrs.get("aborted", 0) for span in rollouts)
    assert any(theft["from"] == "actor.generate[0]" for span in rollouts for theft in span.attrs.get("steals", ()))
    assert sum(span.attrs["samples"] for span in spans(timeline, "transfer")) == 2 * PROMPTS * TRIED
    for sent in spans(timeline, "transfer", "send"):
        assert 0 < sent.bytes < sent.attrs["raw_bytes"] and sent.attrs["messages"] >= 2
    assert all(row["logprob_gap"] < 1e-3 for row in header.learning)
    assert not list(SHARED.glob("lab-*"))
    played = simulate(chosen, {"cpu-core": datasheet("cpu-core")})
    assert played.header.samples["issued"] == counts["issued"]
    assert {span.span_id for span in spans(played, "transfer")} == {
        span.span_id for span in spans(timeline, "transfer")
    }


@pytest.mark.full
def test_an_engine_starts_when_the_queue_outlives_a_start(local_ray: None, scenario: Make, tmp_path: Path) -> None:
    chosen = scenario(
        "quickstart", num_steps=5, place={"actor.generate": [{"pool": "all", "engines": 2}]},
        workload={"prompts_per_step": 48, "response_tokens": {"dist": "lognormal", "mean": 60, "p95": 90, "max": 96}},
        rollout={"max_num_seqs": 4}, update={"minibatch_samples": 48 * TRIED},
        scaling={"actor.generate": {"min": 1, "start": 2.0, "drain": 3.0, "hold": 600.0, "look": 0.5}},
    )  # fmt: skip
    timeline = execute(chosen, tmp_path)
    assert (timeline.header.status, timeline.header.error) == ("done", "")
    assert conforms(build(chosen), timeline) == []
    rollouts = spans(timeline, "rollout")
    [first, *_] = [record for span in rollouts for record in span.attrs.get("scaling", ())]
    assert (first["target"], first["why"], first["ready"], first["starting"]) == (2, "backlog", 1, 0)
    [begun] = [span for span in spans(timeline, "setup") if span.step >= 0]
    late = [span for span in rollouts if span.worker == "actor.generate[1]"]
    assert begun.worker == "actor.generate[1]" and begun.start_s > first["at_s"]
    assert late and all(span.start_s >= begun.end_s for span in late)
    synced = [span for span in spans(timeline, "weight_sync") if span.worker == "actor.generate[1]"]
    assert len(synced) >= len(late) - 1
    assert all(row["logprob_gap"] < 1e-3 for row in timeline.header.learning)


@pytest.mark.full
@pytest.mark.parametrize("transport", ["rpc", "object_store"])
def test_samples_are_sent_one_step_off(local_ray: None, scenario: Make, tmp_path: Path, transport: str) -> None:
    chosen = two_engines(
        scenario, num_steps=3, schedule={"mode": "one_step_off"}, checkpoint={"every_steps": 2},
        experience={"transport": transport, "compression": "lz4"},
    )  # fmt: skip
    timeline = execute(chosen, tmp_path)
    assert (timeline.header.status, timeline.header.error) == ("done", "")
    assert conforms(build(chosen), timeline) == []
    assert all(span.attrs["messages"] == 1 for span in spans(timeline, "transfer", "send"))
    assert timeline.header.samples["trained"] == timeline.header.samples["issued"] == 3 * PROMPTS * TRIED
