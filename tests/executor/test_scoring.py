"""Scoring workers as plain objects: they need torch but no Ray."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from executor.experience import Samples
from executor.network import build_actor, build_critic
from executor.origin import origin
from executor.scoring import ReferenceWorker, RewardWorker, pad
from executor.tasks import TASKS
from lab.scenario import Scenario

Make = Callable[..., Scenario]


def samples(number: int = 9) -> Samples:
    rng = np.random.default_rng(0)
    responses = rng.integers(1, 30, number)
    prompts = [TASKS["echo"].prompt(0, 0, i, 12) for i in range(number)]
    return Samples(
        step=0, policy_version=0, prompts=np.arange(number), num_prompt_tokens=np.full(number, 12),
        tokens=[np.asarray([*prompt, *rng.integers(4, 64, n)]) for prompt, n in zip(prompts, responses, strict=True)],
        logprobs=[np.zeros(n, dtype=np.float32) for n in responses],
    )  # fmt: skip


def test_padding_is_right_and_masked() -> None:
    ids, mask = pad([np.asarray([5, 6, 7]), np.asarray([8])])
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize("changes", [{}, {"sampling": {"temperature": 0.5}}, {"update": {"microbatch_tokens": 80}}])
def test_reference_logprobs_are_those_of_each_sample_alone(scenario: Make, changes: dict[str, Any]) -> None:
    chosen = scenario("quickstart", **changes)
    worker = ReferenceWorker(chosen.team("reference", "score")[0], chosen)
    worker.ready()
    columns, info = worker.score(0, samples())
    network = build_actor(*origin(chosen, "actor"))  # the reference starts as the actor does
    for tokens, found in zip(samples().tokens, columns["reference_logprobs"], strict=True):
        ids = torch.from_numpy(tokens)[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(network(input_ids=ids).logits[0, 11:-1] / chosen.sampling.temperature, -1)
        assert found == pytest.approx(logprobs.gather(-1, ids[0, 12:, None]).squeeze(-1).numpy(), abs=1e-4)
    ops = [span for span in info["spans"] if span.op]
    assert sum(span.tokens for span in ops) == sum(samples().lengths)
    assert all(span.attrs["quantities"]["tokens"] <= chosen.update.microbatch_tokens for span in ops)
    assert all(span.attrs["quantities"]["tokens"] >= span.tokens for span in ops)


def test_rewards_by_rule(scenario: Make) -> None:
    chosen = scenario("quickstart")
    worker = RewardWorker(chosen.team("reward", "score")[0], chosen)
    worker.ready()
    columns, _ = worker.score(0, samples())
    expected = [TASKS["echo"].reward(row[:12].tolist(), row[12:].tolist()) for row in samples().tokens]
    assert columns["rewards"].tolist() == expected


def test_rewards_by_model_read_the_last_token(scenario: Make) -> None:
    chosen = scenario(
        "quickstart",
        models={"reward": {"arch": "tiny-llama", "dtype": "float32"}},
        place={"reward.score": {"pool": "all", "kind": "model", "max_batch_samples": 4}},
    )
    worker = RewardWorker(chosen.team("reward", "score")[0], chosen)
    worker.ready()
    columns, info = worker.score(0, samples())
    network = build_critic(*origin(chosen, "reward"), head_std=1.0)
    for row, found in zip(samples().tokens, columns["rewards"], strict=True):
        ids = torch.from_numpy(row)[None]
        with torch.no_grad():
            assert found == pytest.approx(float(network(ids, torch.ones_like(ids))[0, -1]), abs=1e-4)
    assert np.std(columns["rewards"]) > 0.1
    assert sum(span.op == "forward" for span in info["spans"]) == 3
