"""Every algorithm for real: whole runs behind one line of YAML, and the same steps on one rank and on two."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.datasets import Dataset
from executor.run import execute
from lab.dataflow import conforms
from lab.scenario import Scenario
from lab.timeline import Span
from lab.wiring import build
from simulator.microbatches import plan
from tests.executor.ranks import Ranks
from tests.executor.test_ranks import trainer_of, weights_of

pytestmark = pytest.mark.real
Make = Callable[..., Scenario]
TRAIN = {"pool": "all", "data_parallel": 1, "zero_stage": 0, "threads": 1}
ACTOR = {"arch": "tiny-llama", "dtype": "float32"}
LIKE = {"like": "actor", "dtype": "float32"}
ROLES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "sft": ({"actor": ACTOR}, ["actor.train"]),
    "reward_model": ({"reward": ACTOR}, ["reward.train"]),
    "dpo": ({"actor": ACTOR, "reference": LIKE}, ["actor.train", "reference.score"]),
    "kto": ({"actor": ACTOR, "reference": LIKE}, ["actor.train", "reference.score"]),
    "grpo": ({"actor": ACTOR, "reference": LIKE}, ["actor.train", "reference.score", "reward.score", "actor.generate"]),
    "ppo": (
        {"actor": ACTOR, "critic": LIKE, "reference": LIKE},
        ["actor.train", "critic.train", "reference.score", "reward.score", "actor.generate"],
    ),
}
"""models and placements that an algorithm needs"""


def scenario_of(scenario: Make, name: str, ranks: int = 1, num_steps: int = 3, **changes: Any) -> Scenario:
    """An algorithm on the echo task: 8 prompts with two responses each, one optimizer step."""
    original = scenario("quickstart", num_steps=num_steps)
    algorithm = {"name": name} | changes.pop("algorithm", {})
    models, works = ROLES["grpo" if algorithm.get("online") else name]
    place = original.model_dump(mode="json", by_alias=True)["place"]
    parts = {work: place.get(work) or TRAIN for work in works}
    parts |= {work: TRAIN | {"data_parallel": ranks} for work in works if work.endswith("train")}
    lengths = {
        "prompt_tokens": {"dist": "fixed", "value": 8},
        "response_tokens": {"dist": "empirical", "values": [4, 7, 12]},
    }
    return original.replace({
        "algorithm": algorithm, "models": models, "place": parts, "checkpoint": {},
        "workload": {"prompts_per_step": 8, "samples_per_prompt": 2} | lengths,
        "update": {"minibatch_samples": 8, "microbatch_tokens": 60},
    } | changes)  # fmt: skip


CHOICES: dict[str, dict[str, Any]] = {
    "dpo": {}, "kto": {}, "sft": {}, "reward_model": {"models": {"reward": ACTOR | {"lora": {"rank": 4}}}},
}  # fmt: skip


def learned(rank: int, world: int, chosen: Scenario) -> tuple[list[dict[str, float]], dict[str, Any], Span]:
    """What two steps on the data set report, the weights after them, and the span of the last one; the reference is off
    by a constant."""
    [role] = chosen.algorithm.trains
    trainer, rows = trainer_of(rank, world, chosen, role), []
    for step in range(2):
        samples = Dataset(chosen).batch(step)
        lengths = np.asarray(samples.lengths) - samples.num_prompt_tokens
        columns = {"reference_logprobs": [np.full(n, -3.0, np.float32) for n in lengths]}
        columns["mismatched_logprobs"] = -7.0 * lengths
        info = trainer.update(step, samples, columns)
        rows.append(info["learning"])
    return rows, weights_of(trainer), info["spans"][-1]


def noted(chosen: Scenario, rank: int, span: Span) -> bool:
    """Whether an update says of its passes what a simulation says of the same ones."""
    [role], samples = chosen.algorithm.trains, Dataset(chosen).batch(1)
    expected = plan(chosen, role, samples.lengths).notes(rank)
    return {key: pytest.approx(value, abs=1e-9) for key, value in expected.items()} == {
        key: span.attrs[key] for key in expected
    }


@pytest.mark.full
def test_two_ranks_and_packed_passes_make_the_same_steps_of_pairs_and_labels(scenario: Make) -> None:
    """A pair is never parted, and the KL of KTO is that of the whole mini-batch."""
    packed = {"minibatch_samples": 8, "microbatch_tokens": 60, "pack": "packed"}
    with Ranks(1) as one, Ranks(2) as two:
        for name, more in CHOICES.items():
            plain, tight = scenario_of(scenario, name, **more), scenario_of(scenario, name, update=packed, **more)
            spread = scenario_of(scenario, name, ranks=2, **more)
            rows, weights, span = one.run(learned, plain)[0]
            found = [*two.run(learned, spread), *one.run(learned, tight)]
            spans = [(plain, 0, span), (spread, 0, found[0][2]), (spread, 1, found[1][2]), (tight, 0, found[2][2])]
            assert all(noted(*each) for each in spans)
            for other_rows, other_weights, _ in (found[0], found[2]):
                for mine, other in zip(rows, other_rows, strict=True):
                    assert mine == pytest.approx(other, rel=2e-3, abs=1e-4), name
                for key, tensor in weights.items():
                    np.testing.assert_allclose(tensor, other_weights[key], atol=1e-3, err_msg=f"{name} {key}")
            assert (rows[0].get("kl", 0.0) > 0) == (name == "kto")


def run(chosen: Scenario, folder: Path) -> list[dict[str, Any]]:
    """Executes; the learning rows of a lawful and complete run."""
    timeline = execute(chosen, folder)
    header, total = timeline.header, chosen.workload.samples_per_step * chosen.num_steps
    assert (header.status, header.error) == ("done", "")
    assert conforms(build(chosen), timeline) == []
    assert header.samples["issued"] == header.samples["trained"] == total
    assert {span.stage for span in timeline.stages()} == {node.stage for node in build(chosen).nodes.values()}
    assert {span.worker for span in timeline.stages()} == set(chosen.workers)
    return [dict(row) for row in header.learning]


def test_sft_runs(local_ray: None, scenario: Make, tmp_path: Path) -> None:
    rows = run(scenario_of(scenario, "sft"), tmp_path)
    losses = [row["loss"] for row in rows]
    assert losses == sorted(losses, reverse=True)
    assert not any("reward" in row for row in rows)


@pytest.mark.full
@pytest.mark.parametrize("name", ["dpo", "kto", "reward_model"])
def test_preferences_are_learned(local_ray: None, scenario: Make, tmp_path: Path, name: str) -> None:
    """From policies that prefer nothing; KTO's first mini-batch knows of no drift."""
    rows = run(scenario_of(scenario, name, num_steps=6), tmp_path)
    assert rows[-1]["margin"] > max(rows[0]["margin"], 0.1)
    assert rows[-1]["loss"] < rows[0]["loss"]
    if name != "kto":
        assert rows[-1]["accuracy"] >= 0.75


@pytest.mark.full
@pytest.mark.parametrize(("name", "changes"), [
    ("grpo", {"algorithm": {"old_logprob": "recompute"}}),
    ("ppo", {"algorithm": {"old_logprob": "recompute"}, "schedule": {"mode": "one_step_off"}}),
    ("ppo", {"schedule": {"mode": "one_step_off"}}),
    ("dpo", {"algorithm": {"online": True}}),
])  # fmt: skip
def test_what_is_generated_is_learned_from(
    local_ray: None, scenario: Make, tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    chosen = scenario_of(scenario, name, **changes)
    rows = run(chosen, tmp_path)
    assert all(0 <= row["reward"] <= 1 for row in rows)
    assert all(row["logprob_gap"] < 1e-3 for row in rows)
    if name != "dpo":
        sizes = [row["effective_sample_size"] for row in rows]
        assert all(0 < size <= 1 + 1e-6 for size in sizes)
        assert all(0 <= row["clip_fraction"] <= 1 for row in rows)
    if name == "ppo":
        assert rows[-1]["value_loss"] > 0  # before, nobody may have got a reward, as the value said
