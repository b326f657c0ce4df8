"""Losses and gradients of every algorithm, in micro-batches padded, packed and with shared prompts, against the same
written out: one sample at a time, token by token, in float64."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from executor.algorithms.objectives import OBJECTIVES, Material, reported, units
from executor.attention import PACKED
from executor.experience import Samples
from executor.learner import logprobs
from executor.microbatch import Microbatch
from executor.network import Outputs, build_actor, build_critic
from lab.algorithm import Dpo, Grpo, Kto, Ppo, RewardModel, Sft
from lab.library import model

torch.set_num_threads(1)  # two would wait for each other on a busy machine
SPEC = model("tiny-llama").model_copy(update={
    "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48, "vocabulary": 64,
})  # fmt: skip
RESPONSES = (17, 2, 9, 12, 1, 12, 5, 8)
GROUPS = ([2, 3, 0, 1], [4, 5], [6, 7])
PPO = {"kl_coef": 0.3, "clip": 0.2, "importance_cap": 1.2}
DRIFT = 0.6
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "sft": (Sft(name="sft"), "actor", {}),
    "grpo": (Grpo(name="grpo", **PPO), "actor", {}),
    "grpo, recomputed": (Grpo(name="grpo", old_logprob="recompute", **PPO), "actor", {}),
    "grpo, stale": (Grpo(name="grpo", **PPO), "actor", {"stale": True}),
    "ppo": (Ppo(name="ppo", **PPO), "actor", {}),
    "ppo, recomputed": (Ppo(name="ppo", old_logprob="recompute", **PPO), "actor", {}),
    "ppo critic": (Ppo(name="ppo", **PPO), "critic", {}),
    "dpo": (Dpo(name="dpo", beta=0.7), "actor", {}),
    "dpo online": (Dpo(name="dpo", beta=0.7, online=True), "actor", {}),
    "kto": (Kto(name="kto", beta=0.7), "actor", {"drift": DRIFT}),
    "kto without kl": (Kto(name="kto", beta=0.7, kl="none"), "actor", {}),
    "reward model": (RewardModel(name="reward_model"), "reward", {}),
}


def samples(algorithm: Any) -> Samples:
    rng = np.random.default_rng(3)

    def rows(mean: float, spread: float) -> list[np.ndarray]:
        return [rng.normal(mean, spread, n).astype(np.float32) for n in RESPONSES]

    behaviour = rows(-4, 0.5)
    columns: dict[str, Any] = {name: rows(0, 1) for name in ("advantages", "returns", "values")}
    columns["reference_logprobs"] = [row + noise for row, noise in zip(behaviour, rows(0, 0.2), strict=True)]
    columns["labels"] = np.asarray([1, 0, 0, 1, 1, 1, 0, 1])
    if getattr(algorithm, "old_logprob", "") == "recompute":
        columns["old_logprobs"] = [row + noise for row, noise in zip(behaviour, rows(0, 0.3), strict=True)]
    if getattr(algorithm, "online", False):
        columns["weights"] = np.asarray([1, 1, 0, 0, 1, 1, 1, 1], np.float32)
    prompts = [4 + i // 2 % 3 for i in range(len(RESPONSES))]
    asked = [rng.integers(4, 64, n) for n in prompts[::2]]
    return Samples(
        step=0, policy_version=0, prompts=np.arange(len(RESPONSES)) // 2, num_prompt_tokens=np.asarray(prompts),
        tokens=[np.r_[asked[i // 2], rng.integers(4, 64, n)] for i, n in enumerate(RESPONSES)],
        logprobs=behaviour, temperatures=np.asarray([1.0, 0.7, 1.3, 1.0, 0.5, 1.0, 1.0, 0.9], np.float32), columns=columns,
    )  # fmt: skip


def network(role: str) -> Any:
    return build_actor(SPEC, 0) if role == "actor" else build_critic(SPEC, 0, head_std=1.0)


# Written out


def said(net: Any, role: str, batch: Samples) -> list[torch.Tensor]:
    """Of each sample on its own: log-probs or values of its response tokens, or its reward."""
    found = []
    for i, tokens in enumerate(batch.tokens):
        ids, first = torch.from_numpy(tokens)[None], int(batch.num_prompt_tokens[i])
        if role == "actor":
            odds = (net(input_ids=ids).logits[0, first - 1 : -1] / float(batch.temperatures[i])).log_softmax(-1)
            found.append(torch.stack([odds[t, token] for t, token in enumerate(ids[0, first:])]))
        else:
            values = net(ids, torch.ones_like(ids))[0]
            found.append(values[-1] if role == "reward" else values[first - 1 : -1])
    return found


def surrogate(new: list[torch.Tensor], batch: Samples, algorithm: Any, more: dict[str, Any]) -> torch.Tensor:
    total, columns, cap = torch.zeros((), dtype=torch.float64), batch.columns, algorithm.importance_cap
    for i, row in enumerate(new):
        for t, value in enumerate(row):
            behaviour, advantage = float(batch.logprobs[i][t]), float(columns["advantages"][i][t])
            old = float(columns["old_logprobs"][i][t]) if "old_logprobs" in columns else behaviour
            ratio = (value - old).exp()
            truncated = ratio.clamp(max=cap) if more.get("stale") else ratio
            near = ratio.clamp(1 - algorithm.clip, 1 + algorithm.clip)
            worse = torch.minimum(truncated * advantage, near * advantage)
            total = total - min(math.exp(old - behaviour), cap) * worse
            if algorithm.name == "grpo":
                away = float(columns["reference_logprobs"][i][t]) - value
                total = total + algorithm.kl_coef * (away.exp() - away - 1)
    return total / sum(RESPONSES)


def squared(new: list[torch.Tensor], batch: Samples, algorithm: Any, more: dict[str, Any]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(new):
        for value, old, back in zip(row, batch.columns["values"][i], batch.columns["returns"][i], strict=True):
            near = float(old) + (value - float(old)).clamp(-algorithm.value_clip, algorithm.value_clip)
            total = total + 0.5 * torch.maximum((value - float(back)) ** 2, (near - float(back)) ** 2)
    return total / sum(RESPONSES)


def likelihood(new: list[torch.Tensor], batch: Samples, algorithm: Any, more: dict[str, Any]) -> torch.Tensor:
    return -sum((row.sum() for row in new), torch.zeros(())) / sum(RESPONSES)


def _implied(new: list[torch.Tensor], batch: Samples, beta: float) -> list[torch.Tensor]:
    references = batch.columns["reference_logprobs"]
    return [beta * (row.sum() - sum(map(float, ref))) for row, ref in zip(new, references, strict=True)]


def pairs(new: list[torch.Tensor], batch: Samples, algorithm: Any, more: dict[str, Any]) -> torch.Tensor:
    scores = new if algorithm.name == "reward_model" else _implied(new, batch, algorithm.beta)
    weights = batch.columns.get("weights", np.ones(len(batch)))
    total = torch.zeros(())
    for i in range(0, len(scores), 2):
        total = total + float(weights[i]) * (1 + (scores[i + 1] - scores[i]).exp()).log()
    return total / (sum(map(float, weights)) / 2)


def prospect(new: list[torch.Tensor], batch: Samples, algorithm: Any, more: dict[str, Any]) -> torch.Tensor:
    drift, total = algorithm.beta * more.get("drift", 0.0), torch.zeros(())
    for score, label in zip(_implied(new, batch, algorithm.beta), batch.columns["labels"], strict=True):
        gain = score - drift if label else drift - score
        total = total + 1 - 1 / (1 + (-gain).exp())
    return total / len(new)


WRITTEN: dict[str, Callable[..., torch.Tensor]] = {
    "sft": likelihood, "grpo": surrogate, "ppo": surrogate, "dpo": pairs, "kto": prospect, "reward_model": pairs,
}  # fmt: skip


@pytest.mark.parametrize("pack", ["padded", "packed", "shared"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_written_out(case: str, pack: str) -> None:
    algorithm, role, more = CASES[case]
    batch = samples(algorithm)
    total, gradients, sums = in_microbatches(algorithm, role, batch, more, pack)
    exact = network(role).double()
    written = squared if role == "critic" else WRITTEN[algorithm.name]
    expected = written(said(exact, role, batch), batch, algorithm, more)
    expected.backward()
    assert total == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-5)
    name = "value_loss" if role == "critic" else "loss"
    assert reported(sums)[name] == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-5)
    for key, parameter in exact.named_parameters():
        ours, theirs = gradients[key], None if parameter.grad is None else parameter.grad.numpy()
        if ours is None or theirs is None:
            assert ours is theirs, key
        else:
            np.testing.assert_allclose(ours, theirs, atol=2e-4 * max(1e-2, np.abs(theirs).max()), err_msg=key)


def in_microbatches(
    algorithm: Any, role: str, batch: Samples, more: dict[str, Any], pack: str
) -> tuple[float, dict[str, Any], dict[str, float]]:
    """As a trainer does: loss, gradient by parameter and what is reported, as means over the units."""
    net = network(role)
    if pack != "padded":
        (net if role == "actor" else net.trunk).set_attn_implementation(PACKED)
    outputs, objective = Outputs(net), OBJECTIVES[algorithm.name, role]
    number = units(objective.unit, batch, list(range(len(batch))))
    material = Material(algorithm=algorithm, samples=batch, **more)
    total, sums = 0.0, dict[str, float]()
    for group in GROUPS:
        part = Microbatch(batch, group, pack=pack)
        found = outputs(part.ids, part.positions, part.lasts if role == "reward" else part.places, part.rows)
        output = logprobs(found, part.targets, part.temperatures) if role == "actor" else found.squeeze(-1)
        loss = objective.loss(output, part, material)
        (loss.total / number).backward()
        total += float(loss.total.detach()) / number
        for key, value in loss.sums.items():
            sums[key] = sums.get(key, 0.0) + value / number
    grads = {key: None if one.grad is None else one.grad.numpy() for key, one in net.named_parameters()}
    return total, grads, sums


def test_what_is_reported_of_pairs_and_labels_are_means_over_them() -> None:
    for case in ("dpo online", "kto"):
        algorithm, role, more = CASES[case]
        batch = samples(algorithm)
        with torch.no_grad():
            scores = [float(one) for one in _implied(said(network(role), role, batch), batch, algorithm.beta)]
        found = reported(in_microbatches(algorithm, role, batch, more, "padded")[2])
        if case == "kto":
            labels = batch.columns["labels"].tolist()
            chosen = [score for score, label in zip(scores, labels, strict=True) if label]
            rejected = [score for score, label in zip(scores, labels, strict=True) if not label]
        else:
            kept = [i for i in range(0, 8, 2) if batch.columns["weights"][i]]
            chosen, rejected = [scores[i] for i in kept], [scores[i + 1] for i in kept]
            right = [one > other for one, other in zip(chosen, rejected, strict=True)]
            assert found["accuracy"] == pytest.approx(sum(right) / len(right))
        assert found["chosen_score"] == pytest.approx(sum(chosen) / len(chosen), rel=1e-3)
        assert found["rejected_score"] == pytest.approx(sum(rejected) / len(rejected), rel=1e-3)
        assert found["margin"] == pytest.approx(found["chosen_score"] - found["rejected_score"], rel=1e-3)


@pytest.mark.parametrize("case", ["grpo", "ppo", "ppo critic"])
def test_a_batch_of_several_versions_costs_what_its_samples_cost(case: str) -> None:
    """Each as fresh or as stale as it is, and by as much as it counts."""
    algorithm, role, _ = CASES[case]
    batch, objective = samples(algorithm), OBJECTIVES[algorithm.name, role]
    output = torch.from_numpy(np.concatenate([row + 0.5 for row in batch.logprobs]))
    counts, fresh = np.asarray([1, 1, 0.5, 0.25, 1, 0.5, 1, 0], np.float32), [i % 3 == 0 for i in range(8)]
    rows = [np.full(number, age) for number, age in zip(RESPONSES, fresh, strict=True)]
    mixed = Material(algorithm=algorithm, samples=batch.with_columns(counts=counts), stale=True, fresh=rows)
    whole, found = objective.loss(output, Microbatch(batch, range(8)), mixed).total, 0.0
    for i, part in enumerate(torch.split(output, RESPONSES)):
        alone = Material(algorithm=algorithm, samples=batch, stale=not fresh[i])
        found += float(counts[i] * objective.loss(part, Microbatch(batch, [i]), alone).total)
    assert float(whole) == pytest.approx(found, rel=1e-5)
    if role == "actor":
        every = Material(algorithm=algorithm, samples=batch.with_columns(counts=counts), stale=True)
        assert float(objective.loss(output, Microbatch(batch, range(8)), every).total) != pytest.approx(found, rel=1e-3)
