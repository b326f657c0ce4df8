"""Evaluation: a set that stays, estimates in closed form, rows that survive a crash; and real engines that answer it."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.evaluating import START, Evaluations, answer_seeds, held_out, judged, learned, prompt_set
from executor.experience import Samples
from executor.tasks import TASKS
from lab.evaluation import Estimate, lengths, mean_reward, shares, version_of, win_rate
from lab.scenario import Scenario

Make = Callable[..., Scenario]
WANTED = {"every_steps": 1, "prompts": 6, "samples_per_prompt": 2}


def test_the_prompts_of_an_evaluation_stay_and_no_step_trains_on_them(scenario: Make) -> None:
    chosen = scenario("quickstart", evaluate=WANTED, num_steps=50)
    asked = prompt_set(chosen)
    assert asked == prompt_set(scenario("quickstart", evaluate=WANTED | {"every_steps": 7}))
    assert [len(prompt) for prompt in asked] == lengths(chosen, 3)[0].tolist()
    assert version_of(asked) != version_of(asked[::-1]) != version_of(asked[1:])
    draws = [TASKS["echo"].prompt(chosen.seed, step, i, 12)[-1] for step in range(50) for i in range(6)]
    assert len({tuple(draws[6 * step : 6 * step + 6]) for step in range(50)}) > 40, "prompts of steps vary"


def test_answers_have_seeds_of_their_own(scenario: Make) -> None:
    chosen = scenario("quickstart", evaluate=WANTED)
    seeds = answer_seeds(chosen, range(6))
    assert len(set(seeds.ravel().tolist())) == 12
    assert answer_seeds(chosen, [4, 2]).tolist() == [seeds[4].tolist(), seeds[2].tolist()]
    assert sorted(prompt for share in shares(chosen, 0) for prompt in share) == list(range(6))


@given(st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=3, max_size=3), min_size=1, max_size=8))
def test_a_win_rate_counts_every_meeting_and_half_of_the_ties(rows: list[list[float]]) -> None:
    now, before = np.array(rows), np.array(rows)[:, ::-1] * 0.5 + 0.125
    points = [[(a > b) + 0.5 * (a == b) for a, b in product(x, y)] for x, y in zip(now, before, strict=True)]
    found = win_rate(now, before)
    means = [sum(each) / len(each) for each in points]
    assert found.mean == pytest.approx(sum(means) / len(means))
    assert found.mean + win_rate(before, now).mean == pytest.approx(1)
    assert win_rate(now, now).mean == 0.5
    assert (found.error is None) == (len(rows) == 1)
    if found.error is not None:
        variance = sum((mean - found.mean) ** 2 for mean in means) / (len(means) - 1)
        assert found.error == pytest.approx((variance / len(means)) ** 0.5)


def test_errors_shrink_with_prompts_and_not_with_answers_that_repeat() -> None:
    rewards = np.random.default_rng(0).normal(size=(50, 1))
    once, thrice = mean_reward(rewards), mean_reward(np.repeat(rewards, 3, axis=1))
    assert once == thrice
    assert mean_reward(np.tile(rewards, (4, 1))).error == pytest.approx(once.error / 2, rel=0.02)
    assert once.number == 50


def samples_of(lengths: list[int]) -> Samples:
    number = len(lengths)
    return Samples(
        step=0, policy_version=0, prompts=np.arange(number) // 2, num_prompt_tokens=np.full(number, 3),
        tokens=[np.arange(3 + n) for n in lengths], logprobs=[np.zeros(n, np.float32) for n in lengths],
    )  # fmt: skip


def test_rows_survive_a_crash_and_what_is_evaluated_again_replaces(scenario: Make, tmp_path: Path) -> None:
    chosen, drawn = scenario("quickstart", evaluate=WANTED), samples_of([4] * 12)
    rows = Evaluations(chosen, tmp_path)
    assert not rows.begun
    start, better = np.zeros(12), np.ones(12)
    assert "win_rate" not in rows.answered(START, drawn, start)
    row = rows.answered(0, drawn, better)
    assert (row["reward"], row["win_rate"], row["win_rate_error"]) == (1.0, 1.0, 0.0)
    with rows.file.open("a") as file:
        file.write('{"step": 1, "rewa')  # killed while it wrote
    again = Evaluations(chosen, tmp_path)
    assert again.rows == rows.rows
    assert again.answered(0, drawn, start)["win_rate"] == 0.5
    assert Evaluations(chosen, tmp_path).rows[0]["reward"] == 0.0
    assert learned(row) == {
        "evaluation_reward": 1.0, "evaluation_reward_error": 0.0, "evaluation_win_rate": 1.0,
        "evaluation_win_rate_error": 0.0, "evaluation_response_tokens": 4.0,
    }  # fmt: skip


OFFLINE: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft-7b", {}), "dpo": ("dpo-7b", {}), "kto": ("kto-7b", {}), "reward_model": ("reward-model-7b", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", OFFLINE)
def test_held_out_numbers_are_those_of_a_loop(scenario: Make, name: str) -> None:
    base, changes = OFFLINE[name]
    chosen = scenario(base, evaluate={"every_steps": 1, "prompts": 8, "samples_per_prompt": 2}, **changes)
    samples, rng = held_out(chosen), np.random.default_rng(1)
    numbers = [
        len(tokens) - int(known) for tokens, known in zip(samples.tokens, samples.num_prompt_tokens, strict=True)
    ]
    outputs = [(float(rng.normal(-20, 5)), number) for number in numbers]
    needs = chosen.algorithm.needs_reference
    reference = [rng.normal(-1, 0.1, number).astype(np.float32) for number in numbers] if needs else []
    found = judged(chosen, samples, outputs, reference)
    assert len(samples) == 16
    beta = getattr(chosen.algorithm, "beta", 1.0)
    said = [
        beta * (total - float(sum(map(float, base))))
        for (total, _), base in zip(outputs, reference or [()] * 16, strict=True)
    ]
    if name == "sft":
        assert found == {"loss": pytest.approx(-sum(total for total, _ in outputs) / sum(numbers))}
    elif name == "kto":
        labels = samples.columns["labels"].tolist()
        good, bad = ([one for one, label in zip(said, labels, strict=True) if label == wanted] for wanted in (1, 0))
        assert found["margin"] == pytest.approx(sum(good) / len(good) - sum(bad) / len(bad))
        assert found["accuracy"] == (sum(one > 0 for one in good) + sum(one < 0 for one in bad)) / 16
    else:
        margins = [said[i] - said[i + 1] for i in range(0, 16, 2)]
        assert found["margin"] == pytest.approx(sum(margins) / 8)
        assert found["accuracy"] == sum(margin > 0 for margin in margins) / 8
        assert found["loss"] == pytest.approx(sum(np.log1p(np.exp(-margin)) for margin in margins) / 8)


def test_one_prompt_has_no_error() -> None:
    assert Estimate.over(np.array([2.0])) == Estimate(mean=2.0, error=None, number=1)


def test_greedy_answers_are_not_asked_for_twice(scenario: Make) -> None:
    assert scenario("quickstart", evaluate={"every_steps": 1}).evaluate.drawn_at == 0
    assert scenario("quickstart", evaluate=WANTED).evaluate.drawn_at == 1
    with pytest.raises(ValueError, match="greedy answers to one prompt"):
        scenario("quickstart", evaluate=WANTED | {"temperature": 0})


@pytest.mark.real
@pytest.mark.full
def test_engines_answer_and_the_reward_judges(local_ray: None, scenario: Make, tmp_path: Path) -> None:
    from executor.run import execute
    from lab.dataflow import conforms
    from lab.wiring import build

    evaluate = {"every_steps": 2, "prompts": 8, "response_tokens": {"dist": "fixed", "value": 8}}
    chosen = scenario("quickstart", num_steps=2, evaluate=evaluate, optimizer={"lr": 1e-3})
    timeline = execute(chosen, tmp_path)
    assert (timeline.header.status, timeline.header.error) == ("done", "")
    assert conforms(build(chosen), timeline) == []
    [span] = [span for span in timeline.stages() if span.stage == "evaluate"]
    assert (span.step, span.policy_version, span.attrs["samples"], span.attrs["response_tokens"]) == (1, 2, 8, 64)
    rows = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [START, 1]
    assert rows[1]["prompt_set"] == rows[0]["prompt_set"] == version_of(prompt_set(chosen))
    assert 0 <= rows[1]["win_rate"] <= 1
    assert timeline.header.learning[1]["evaluation_reward"] == rows[1]["reward"]
    assert "evaluation_reward" not in timeline.header.learning[0]


def reading(rank: int, world: int, chosen: Scenario, role: str) -> tuple[Any, dict[str, float], dict[str, float], Any]:
    """What a trainer reads before and after three steps of training, and the spans of the first reading."""
    from executor.datasets import Dataset
    from executor.evaluating import read
    from executor.trainer import Trainer

    trainer = Trainer(chosen.team(role, "train")[rank], rank, world, role, chosen, 0)
    trainer.ready()
    samples, data = held_out(chosen), Dataset(chosen)
    sums, info = read(trainer, START, samples)
    before = trainer.logprobs(samples) if role == "actor" else []
    reference = before if chosen.algorithm.needs_reference else []
    rows = [sums[i] for i in range(len(samples))]
    first = judged(chosen, samples, rows, reference)
    for step in range(3):
        batch = data.batch(step)
        columns = {"reference_logprobs": trainer.logprobs(batch)} if reference else {}
        trainer.update(step, batch.with_columns(**columns))
    again, _ = read(trainer, 2, samples)
    last = judged(chosen, samples, [again[i] for i in range(len(samples))], reference)
    whole = [float(np.sum(row, dtype=np.float64)) for row in before]
    return (rows, whole), first, last, info["spans"]


@pytest.mark.real
@pytest.mark.full
def test_trainers_read_held_out_samples_better_once_they_are_trained(scenario: Make) -> None:
    from tests.executor.ranks import Ranks

    evaluate = {"every_steps": 1, "prompts": 16, "samples_per_prompt": 2}
    parts = {"evaluate": evaluate, "optimizer": {"lr": 1e-3}, "workload": {"prompts_per_step": 16},
             "update": {"minibatch_samples": 16}}  # fmt: skip
    with Ranks(1) as fleet:
        for name, role, key in (
            ("sft", "actor", "loss"),
            ("dpo", "actor", "margin"),
            ("reward-model", "reward", "margin"),
        ):
            chosen = scenario(f"{name}-learns", **parts)
            [((rows, whole), first, last, spans)] = fleet.run(reading, chosen, role)
            if whole:
                assert [total for total, _ in rows] == pytest.approx(whole, rel=1e-4)
            if name == "dpo":
                assert (first["margin"], first["accuracy"]) == pytest.approx((0, 0.5), abs=1e-3)
            assert last[key] < first[key] if key == "loss" else last[key] > first[key], name
            assert {span.op for span in spans if span.op} == {"forward"}
            assert spans[-1].attrs["samples"] == 32
