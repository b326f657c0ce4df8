import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.datasets import UNKNOWN, Dataset
from executor.experience import Samples
from executor.limits import refuse
from executor.prompts import Prompts
from executor.tasks import TASKS
from lab.errors import InputError
from lab.evaluation import lengths
from lab.load import load
from lab.scenario import Scenario
from tests.lab.test_data import ROWS, written

LENGTHS = {"dist": "lognormal", "mean": 16, "p95": 28, "max": 32}
REWARD = TASKS["echo"].reward


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Scenario]:
    """A scenario of an offline algorithm on the built-in task."""

    def make(algorithm: str, each: int = 2, **said: Any) -> Scenario:
        work = {"prompts_per_step": 6, "samples_per_prompt": each, "response_tokens": LENGTHS}
        work |= {"prompt_tokens": {"dist": "fixed", "value": 12}}
        update = {"minibatch_samples": 6 * each, "microbatch_tokens": 4096}
        told = {"data": {"task": "echo"}, "workload": work, "update": update} | said
        return load(written(tmp_path, algorithm, "prompts", **told))

    return make


def rewards(samples: Samples) -> np.ndarray:
    pairs = zip(samples.tokens, samples.num_prompt_tokens, strict=True)
    return np.asarray([REWARD(tokens[:known].tolist(), tokens[known:].tolist()) for tokens, known in pairs])


@pytest.mark.parametrize("algorithm", ["sft", "reward_model", "dpo", "kto"])
def test_samples_have_the_lengths_that_a_simulation_draws(made: Callable[..., Scenario], algorithm: str) -> None:
    scenario = made(algorithm)
    for step in range(3):
        batch = Dataset(scenario).batch(step)
        assert len(batch) == scenario.workload.samples_per_step
        responses = (np.asarray(batch.lengths) - batch.num_prompt_tokens).reshape(6, 2)
        drawn = scenario.workload.response_lengths(scenario.seed, step)
        assert np.array_equal(np.sort(responses), np.sort(drawn)), "the two of a pair may stand in either order"
        assert batch.num_prompt_tokens.tolist() == [12] * 12
        assert batch.step == batch.policy_version == step
        again = Dataset(scenario).batch(step)
        assert all(np.array_equal(a, b) for a, b in zip(batch.tokens, again.tokens, strict=True))


@pytest.mark.parametrize("algorithm", ["reward_model", "dpo"])
def test_pairs_stand_chosen_first_and_share_a_prompt(made: Callable[..., Scenario], algorithm: str) -> None:
    batch = Dataset(made(algorithm, 4)).batch(0)
    scores = rewards(batch)
    assert (scores[::2] > scores[1::2]).all()
    for i in range(0, len(batch), 2):
        known = int(batch.num_prompt_tokens[i])
        assert batch.prompts[i] == batch.prompts[i + 1]
        assert np.array_equal(batch.tokens[i][:known], batch.tokens[i + 1][:known])
    assert len({tuple(tokens) for tokens in batch.tokens}) > len(batch) - 2, "pairs of a prompt differ"


def test_kto_is_told_which_responses_are_good(made: Callable[..., Scenario]) -> None:
    batch = Dataset(made("kto")).batch(0)
    assert np.array_equal(batch.columns["labels"] == 1, rewards(batch) >= 0.75)


def test_held_out_samples_have_the_lengths_of_an_evaluation(made: Callable[..., Scenario]) -> None:
    scenario = made("dpo", evaluate={"every_steps": 1, "prompts": 7, "samples_per_prompt": 2})
    held_out = Dataset(scenario).held_out(scenario.evaluate.num_samples)
    known, answers = lengths(scenario, 5)
    assert np.array_equal(held_out.num_prompt_tokens[::2], known)
    responses = (np.asarray(held_out.lengths) - held_out.num_prompt_tokens).reshape(7, 2)
    assert np.array_equal(np.sort(responses), np.sort(answers))
    trained = {tuple(tokens) for step in range(20) for tokens in Dataset(scenario).batch(step).tokens}
    assert not trained & {tuple(tokens) for tokens in held_out.tokens}


def test_pairs_for_a_report_are_of_every_kind(made: Callable[..., Scenario]) -> None:
    pairs = Dataset(made("reward_model")).judged(30)
    assert len(pairs) == 60
    kinds = pairs.columns["kind"][::2].tolist()
    assert all(kinds.count(kind) == 10 for kind in ("natural", "length_matched", "adversarial"))
    responses = (np.asarray(pairs.lengths) - pairs.num_prompt_tokens).reshape(-1, 2)
    named = np.asarray(kinds)
    assert (responses[named == "length_matched", 0] == responses[named == "length_matched", 1]).all()
    assert (responses[named == "adversarial", 0] < responses[named == "adversarial", 1]).all()


@pytest.mark.parametrize(
    ("algorithm", "source"),
    [("sft", "demonstrations"), ("reward_model", "preferences"), ("dpo", "preferences"), ("kto", "labels")],
)
def test_of_a_file_both_worlds_read_the_same_rows(tmp_path: Path, algorithm: str, source: str) -> None:
    scenario = load(written(tmp_path, algorithm, source, data={source: "data.jsonl", "held_out_share": 0.25}))
    data = Dataset(scenario)
    for step in range(4):
        batch, workload = data.batch(step), scenario.workload
        responses = (np.asarray(batch.lengths) - batch.num_prompt_tokens).reshape(3, -1)
        assert np.array_equal(responses, workload.response_lengths(1, step))
        assert np.array_equal(batch.num_prompt_tokens.reshape(3, -1)[:, 0], workload.prompt_lengths(1, step))
    held_out, together = data.held_out(100), scenario.algorithm.together
    assert len(held_out) == together
    judged = scenario.replace({"evaluate": {"every_steps": 1, "prompts": 1, "samples_per_prompt": together}})
    known, answers = lengths(judged, 7)
    assert known.tolist() == held_out.num_prompt_tokens[::together].tolist()
    assert answers.ravel().tolist() == (np.asarray(held_out.lengths) - held_out.num_prompt_tokens).tolist()
    trained = {tuple(tokens) for step in range(4) for tokens in data.batch(step).tokens}
    assert not trained & {tuple(tokens) for tokens in held_out.tokens}


def test_what_a_line_does_not_state_is_unknown(tmp_path: Path) -> None:
    batch = Dataset(load(written(tmp_path, "dpo", "preferences"))).batch(0)
    assert set(batch.columns["language"]) == {UNKNOWN}


PLACED = {"pool": "all", "threads": 1}
ROLLS: dict[str, Any] = {
    "place": {"actor.generate": [PLACED], "actor.train": PLACED, "reference.score": PLACED,
              "reward.score": PLACED | {"kind": "function", "function": "length"}},
    "rollout": {"kv_bytes": "64 MiB", "block_tokens": 32, "max_num_seqs": 32, "max_num_batched_tokens": 2048},
    "workload": {"prompts_per_step": 3, "samples_per_prompt": 2, "response_tokens": {"dist": "fixed", "value": 9}},
    "update": {"minibatch_samples": 6, "microbatch_tokens": 4096},
    "data": {"prompts": "data.jsonl", "held_out_share": 0.25},
}  # fmt: skip


def test_prompts_of_a_file_are_asked_in_the_order_of_the_workload(tmp_path: Path) -> None:
    scenario = load(written(tmp_path, "grpo", "prompts", **ROLLS))
    prompts, texts = Prompts(scenario), {3: 0, 5: 0, 7: 0, 11: 0}
    for step in range(4):
        asked = prompts.at(step, [2, 0])
        known = scenario.workload.prompt_lengths(1, step)
        assert [len(prompt) for prompt in asked] == [known[2], known[0]]
        for prompt in prompts.at(step, range(3)):
            texts[len(prompt) - 1] += 1
    [held_out] = prompts.held_out()
    assert texts.pop(len(held_out) - 1) == 0
    assert set(texts.values()) == {4}


def test_prompts_of_the_task_are_those_of_the_task(made: Callable[..., Scenario]) -> None:
    scenario = made("dpo")
    assert Prompts(scenario).at(3, [4]) == [TASKS["echo"].prompt(1, 3, 4, 12)]
    assert Prompts(scenario).at(3, []) == []


@pytest.mark.parametrize(
    ("rows", "said", "line", "key"),
    [
        (ROWS["prompts"] * 3, {"evaluate": {"every_steps": 1, "prompts": 9}}, None, "evaluate.prompts"),
        ([*ROWS["prompts"], {"prompt": "p" * 4090}], {"update": ROLLS["update"] | {"microbatch_tokens": 5000}}, 5,
         "data.prompts"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used_are_refused(
    tmp_path: Path, rows: list[Any], said: dict[str, Any], line: int | None, key: str
) -> None:
    path = written(tmp_path, "grpo", "prompts", **(ROLLS | said))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError) as told:
        refuse(load(path))
    assert (told.value.line, told.value.key) == (line, key)


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    scenario = load(written(tmp_path, "dpo", "preferences"))
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write(json.dumps(ROWS["preferences"][0]))
    with pytest.raises(InputError, match="not the one that the scenario was read with"):
        Dataset(scenario)
