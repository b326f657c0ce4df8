"""A run that draws in every way at once, on the engine that needs no vLLM; beside the simulation of the same scenario."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from executor.run import execute
from lab import drawing
from lab.dataflow import conforms
from lab.scenario import Scenario
from lab.wiring import build
from profiles.profile import datasheet
from simulator.run import simulate

pytestmark = [pytest.mark.real, pytest.mark.full]


def test_every_way_of_drawing_at_once(local_ray: None, scenario: Callable[..., Scenario], tmp_path: Path) -> None:
    arms = [{"temperature": 0.7, "share": 0.5}, {"temperature": 1.2, "share": 0.5}]
    chosen = scenario(
        "quickstart", num_steps=3,
        place={"actor.generate": [{"pool": "all", "backend": "transformers"}]},
        workload={"end": "eos"}, algorithm={"old_logprob": "recompute"},
        sampling={
            "mixture": arms, "bandit": {"rule": "ucb", "floor": 0.2}, "entropy": {"low": 9.0, "step": 0.1},
            "best_of": 2, "top_p": 0.95,
        },
    )  # fmt: skip
    timeline, dataflow = execute(chosen, tmp_path), build(chosen)
    header = timeline.header
    assert (header.status, header.error) == ("done", "")
    assert conforms(dataflow, timeline) == []
    rollouts = [span for span in timeline.spans if span.stage == "rollout" and not span.op]
    limit = chosen.workload.response_tokens.max * 64
    assert all(0 < span.attrs["response_tokens"] < limit for span in rollouts), "the model ended some"
    assert all(span.attrs["samples"] == 64 for span in rollouts)
    predicted = simulate(chosen, {"cpu-core": datasheet("cpu-core")}).header.samples
    assert header.samples == predicted
    assert header.samples["dropped"] == header.samples["trained"] == 96
    _check_learning(header.learning)
    assert len(list(drawing.assumed(chosen))) == 2


def _check_learning(rows: list[dict]) -> None:  # type: ignore[type-arg]
    assert [row["sampling"]["offset"] for row in rows] == pytest.approx([0.0, 0.1, 0.2])
    assert [row["sampling"]["observed"]["last_step"] for row in rows] == [-1, 0, 1]
    shares = np.array([row["sampling"]["shares"] for row in rows[1:]])
    assert np.allclose(shares.sum(axis=1), 1.0)
    assert shares.min() >= 0.2 - 1e-12
    for row in rows:
        assert 0 < row["distinct_1"] <= row["distinct_2"] <= 1
        assert row["sampled_entropy"] > 0
        assert set(row["reward_by_temperature"]) == {"0.7", "1.2"}
        assert "logprob_gap" not in row, "what top_p left to draw from is not what the trainer computes"
