"""Scoring workers as plain objects: they need torch but no Ray."""

from typing import Any

import numpy as np
import pytest
import torch

from executor.algorithms.advantages import joined
from executor.network import build_actor, build_critic
from executor.origin import origin
from executor.rewards import RewardFailed
from executor.scoring import finite, pad
from executor.tasks import TASKS
from tests.executor.judged import CLOSE, MODEL, Make, judged_by, samples, scorers

TWO = {"replicas": 2}
HEAD = {"kind": "model", "shares_trunk": True}


def test_padding_is_right_and_masked() -> None:
    rows = [np.asarray([5, 6, 7]), np.asarray([8])]
    ids, mask = pad(rows)
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert [part.shape for part in pad(rows, 4)] == [(2, 4), (2, 4)]
    assert all(np.array_equal(wide[:, :3], part) for wide, part in zip(pad(rows, 4), (ids, mask), strict=True))


@pytest.mark.parametrize("changes", [{}, {"update": {"microbatch_tokens": 80}}])
def test_reference_logprobs_are_those_of_each_sample_alone(scenario: Make, changes: dict[str, Any]) -> None:
    chosen = scenario("quickstart", **changes)
    (worker,) = scorers(chosen, "reference")
    worker.recorder.take()
    columns, info = worker.score(0, samples())
    network = build_actor(*origin(chosen, "actor"))  # the reference starts as the actor does
    rows = zip(samples().tokens, columns["reference_logprobs"], samples().temperatures, strict=True)
    for tokens, found, heat in rows:
        ids = torch.from_numpy(tokens)[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(network(input_ids=ids).logits[0, 11:-1] / heat, -1)
        assert found == pytest.approx(logprobs.gather(-1, ids[0, 12:, None]).squeeze(-1).numpy(), abs=1e-4)
    ops = [span for span in info["spans"] if span.op]
    assert sum(span.tokens for span in ops) == sum(samples().lengths)
    assert all(span.attrs["quantities"]["tokens"] <= chosen.update.microbatch_tokens for span in ops)
    assert all(span.attrs["quantities"]["tokens"] >= span.tokens for span in ops)


def test_rewards_by_rule(scenario: Make) -> None:
    (worker,) = scorers(scenario("quickstart"), "reward")
    columns, _ = worker.score(0, samples())
    expected = [TASKS["echo"].reward(row[:12].tolist(), row[12:].tolist()) for row in samples().tokens]
    assert columns["rewards"].tolist() == expected


def test_rewards_by_a_function_of_the_library_with_its_arguments(scenario: Make) -> None:
    chosen = judged_by(scenario, {"kind": "function", "function": "length", "arguments": {"target": 20}})
    (worker,) = scorers(chosen, "reward")
    numbers = [len(row) - 12 for row in samples().tokens]
    expected = [1 - abs(n - 20) / max(n, 20) for n in numbers]
    assert worker.score(0, samples())[0]["rewards"].tolist() == pytest.approx(expected)


def test_rewards_by_model_read_the_last_token(scenario: Make) -> None:
    chosen = judged_by(scenario, {"kind": "model", "max_batch_samples": 4}, **MODEL)
    (worker,) = scorers(chosen, "reward")
    columns, info = worker.score(0, samples())
    network = build_critic(*origin(chosen, "reward"), head_std=1.0)
    for row, found in zip(samples().tokens, columns["rewards"], strict=True):
        ids = torch.from_numpy(row)[None]
        with torch.no_grad():
            assert found == pytest.approx(float(network(ids, torch.ones_like(ids))[0, -1]), abs=1e-4)
    assert np.std(columns["rewards"]) > 0.1
    assert sum(span.op == "forward" for span in info["spans"]) == 3


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("role", ["reference", "reward"])
def test_scores_of_samples_that_come_one_by_one_do_not_depend_on_the_batch(
    scenario: Make, role: str, dtype: str
) -> None:
    """To the bit: what is scored when, and beside what, must not change what a run learns."""
    place = {"reference.score": {"pool": "all", "dtype": dtype}}
    chosen = judged_by(
        scenario, {"kind": "model", "dtype": dtype}, place=place, schedule={"scoring": "sample"}, **MODEL
    )
    (worker,) = scorers(chosen, role)
    rows, name = samples(17), "rewards" if role == "reward" else "reference_logprobs"
    together = worker.judged(rows)[name]
    for i in range(len(rows)):
        (alone,) = worker.judged(rows.take([i]))[name]
        assert np.array_equal(alone, together[i])


@pytest.mark.parametrize("number", [1, 8, 9])
@pytest.mark.parametrize("role", ["reference", "reward"])
def test_replicas_share_a_step_out_and_score_what_one_does(scenario: Make, role: str, number: int) -> None:
    one = judged_by(scenario, {"kind": "model"}, schedule={"scoring": "sample"}, **MODEL)
    two = judged_by(
        scenario, {"kind": "model"} | TWO, place={"reference.score": {"pool": "all"} | TWO},
        schedule={"scoring": "sample"}, **MODEL,
    )  # fmt: skip
    (alone,), both = scorers(one, role), scorers(two, role)
    expected = alone.score(0, samples(number))[0]
    answers = [worker.score(0, samples(number)) for worker in both]
    found = joined([columns for columns, _ in answers], number)
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        assert all(np.array_equal(a, b) for a, b in zip(column, found[name], strict=True))
        assert isinstance(found[name], type(column))
    stages = [span for _, info in answers for span in info["spans"] if not span.op and span.step == 0]
    assert [span.attrs.get("samples", 0) for span in stages] == [-(-number // 2), number // 2]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("role", ["reference", "reward"])
def test_samples_that_come_one_by_one_score_what_a_whole_step_does(scenario: Make, role: str, replicas: int) -> None:
    one = judged_by(scenario, {"kind": "model"}, schedule={"scoring": "sample"}, **MODEL)
    rows, many = samples(12, per_prompt=4), {"replicas": replicas, "max_batch_samples": 2}
    streamed = judged_by(
        scenario, {"kind": "model"} | many, place={"reference.score": {"pool": "all"} | many},
        schedule={"scoring": "sample"}, workload={"samples_per_prompt": 4}, **MODEL,
    )  # fmt: skip
    expected = scorers(one, role)[0].score(0, rows)[0]
    team = scorers(streamed, role)
    for worker in team:
        worker.open(0, 0)
        for ended in ([7, 2], [1], [11, 0, 5, 4]):  # the others were not handed in
            worker.submit(0, ended, rows.take(ended))
    answers = [worker.collect(0, rows) for worker in team]
    found = joined([columns for columns, _ in answers], 12)
    for name, column in expected.items():
        assert all(np.array_equal(a, b) for a, b in zip(column, found[name], strict=True))
    stages = [span for _, info in answers for span in info["spans"] if not span.op and span.step == 0]
    assert sum(span.attrs["samples"] for span in stages) == 12 and sum(span.attrs["ahead"] for span in stages) == 7


def test_a_head_scores_what_a_model_of_its_trunk_and_head_does(scenario: Make) -> None:
    """One pass of the reference gives log-probs and rewards."""
    like = {"models": {"reward": {"like": "reference", "dtype": "float32"}}}
    (apart,) = scorers(judged_by(scenario, {"kind": "model"}, **like), "reward")
    shared = judged_by(scenario, HEAD, **like)
    (trunk,), (head,), rows = scorers(shared, "reference"), scorers(shared, "reward"), samples()
    head.recorder.take()
    columns, _ = trunk.score(0, rows)
    assert list(columns) == ["reference_logprobs"]
    found, info = head.score(0, rows, trunk.trunk(0))
    expected = apart.judged(rows)["rewards"]
    assert found["rewards"] == pytest.approx(expected, abs=1e-4)
    assert np.std(expected) > 0.1
    assert not [span for span in info["spans"] if span.op], "no pass of its own"
    assert head.judged(rows)["rewards"] == pytest.approx(expected, abs=1e-4), "without the reference's pass too"


def test_heads_of_several_trunks_score_the_share_of_theirs(scenario: Make) -> None:
    like = {"models": {"reward": {"like": "reference", "dtype": "float32"}}}
    shared = judged_by(scenario, HEAD | TWO, place={"reference.score": {"pool": "all"} | TWO}, **like)
    rows, trunks, heads = samples(7), scorers(shared, "reference"), scorers(shared, "reward")
    for trunk in trunks:
        trunk.score(0, rows)
    columns = [head.score(0, rows, trunk.trunk(0))[0] for head, trunk in zip(heads, trunks, strict=True)]
    (alone,) = scorers(judged_by(scenario, {"kind": "model"}, **like), "reward")
    assert joined(columns, 7)["rewards"] == pytest.approx(alone.judged(rows)["rewards"], **CLOSE)


def test_a_cache_spares_passes_and_leaves_rewards_as_they_are(scenario: Make) -> None:
    plain = judged_by(scenario, {"kind": "model"}, schedule={"scoring": "sample"}, **MODEL)
    cached = judged_by(scenario, {"kind": "model", "cache": {"hit_share": 0.5}}, **MODEL)
    (alone,), (keeps,) = scorers(plain, "reward"), scorers(cached, "reward")
    first, again = samples(6), samples(9)
    keeps.score(0, first)
    columns, info = keeps.score(0, again)
    assert columns["rewards"].tolist() == alone.score(0, again)[0]["rewards"].tolist()
    (stage,) = [span for span in info["spans"] if not span.op and span.step == 0]
    hits = sum(any(np.array_equal(a, b) for b in first.tokens) for a in again.tokens)
    assert (stage.attrs["hits"], stage.attrs["samples"], stage.tokens) == (hits, 9, sum(again.lengths))
    assert sum(span.tokens for span in info["spans"] if span.op) < sum(again.lengths) or not hits


def test_a_reward_model_that_gives_nan_is_told(scenario: Make) -> None:
    (worker,) = scorers(judged_by(scenario, {"kind": "model"}, **MODEL), "reward")
    with torch.no_grad():
        worker._model.value_head.weight[0, 0] = float("nan")
    with pytest.raises(RewardFailed, match=r"the reward model gave nan, .* prompt 0 of step 0"):
        worker.score(0, samples())
    with pytest.raises(RewardFailed, match="inf"):
        finite([0.0, float("inf")], samples(2))
