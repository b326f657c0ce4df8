"""A real optimizer step against the same step written out in plain torch, sample by sample and without padding."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from executor.algorithms.losses import policy_loss
from executor.experience import Samples
from executor.network import build_actor, build_critic
from executor.origin import origin
from lab.scenario import Scenario
from tests.executor.ranks import Ranks

Make = Callable[..., Scenario]
RESPONSES = (17, 2, 9, 30, 1, 12, 5, 23)
TEMPERATURE = 0.7


def samples() -> Samples:
    rng = np.random.default_rng(3)

    def rows(mean: float, spread: float) -> list[np.ndarray]:
        return [rng.normal(mean, spread, n).astype(np.float32) for n in RESPONSES]

    logprobs = rows(-4, 0.5)
    columns = {
        "advantages": rows(0, 1), "returns": rows(0, 1), "values": rows(0, 0.3),
        "reference_logprobs": [row + 0.2 * noise for row, noise in zip(logprobs, rows(0, 1), strict=True)],
    }  # fmt: skip
    prompts = [4 + i // 4 for i in range(len(RESPONSES))]
    asked = [rng.integers(4, 64, prompts[4 * i]) for i in range(2)]
    return Samples(
        step=0, policy_version=0, prompts=np.arange(len(RESPONSES)) // 4, num_prompt_tokens=np.asarray(prompts),
        tokens=[np.append(asked[i // 4], rng.integers(4, 64, n)) for i, n in enumerate(RESPONSES)],
        logprobs=logprobs, columns=columns, temperatures=np.full(len(RESPONSES), TEMPERATURE, dtype=np.float32),
    )  # fmt: skip


def scenario_of(scenario: Make, name: str, pack: str) -> Scenario:
    changes: dict[str, Any] = {
        "update": {"minibatch_samples": len(RESPONSES), "microbatch_tokens": 90, "pack": pack},
        "workload": {"prompts_per_step": 2, "samples_per_prompt": 4},
        "sampling": {"temperature": TEMPERATURE},
        "algorithm": {"ppo_epochs": 1, "kl_coef": 0.3},
    }
    return scenario(name, **changes)


def trained(rank: int, world: int, chosen: Scenario, role: str) -> tuple[dict[str, np.ndarray], dict[str, float], Any]:
    """Gradients that the optimizer was given, what was reported, and the actor's log-probs before the step."""
    from executor.trainer import Trainer

    trainer = Trainer(chosen.team(role, "train")[rank], rank, world, role, chosen, 0)
    trainer.ready()
    before = trainer.logprobs(samples()) if role == "actor" else None
    learned = trainer.update(0, samples())["learning"]
    return gradients(trainer), learned, before


def gradients(trainer: Any) -> dict[str, np.ndarray]:
    """After one step of Adam its first moment is (1 - beta1) times the clipped gradient."""
    optimizer = trainer.learner.engine.optimizer
    share = 1 - optimizer.param_groups[0]["betas"][0]
    named = trainer.learner.network.named_parameters()
    return {name: (optimizer.state[parameter]["exp_avg"] / share).numpy() for name, parameter in named}


def surrogate(new: torch.Tensor, i: int, batch: Samples, chosen: Scenario) -> torch.Tensor:
    """Of one sample's response tokens: PPO's clipped objective, for GRPO with the k3 penalty; summed."""
    algorithm, total = chosen.algorithm, torch.zeros(())
    for t, value in enumerate(new):
        old, advantage = batch.logprobs[i][t], batch.columns["advantages"][i][t]
        ratio = (value - float(old)).exp()
        low, high = 1 - algorithm.clip, 1 + algorithm.clip
        total = total - torch.min(ratio * float(advantage), ratio.clamp(low, high) * float(advantage))
        if algorithm.name == "grpo":
            away = float(batch.columns["reference_logprobs"][i][t]) - value
            total = total + algorithm.kl_coef * (away.exp() - away - 1)
    return total


def regression(new: torch.Tensor, i: int, batch: Samples, chosen: Scenario) -> torch.Tensor:
    old, returns = (torch.as_tensor(batch.columns[key][i]) for key in ("values", "returns"))
    near = old + (new - old).clamp(-chosen.algorithm.value_clip, chosen.algorithm.value_clip)
    return 0.5 * torch.stack([(new - returns) ** 2, (near - returns) ** 2]).amax(0).sum()


def written_out(chosen: Scenario, role: str) -> tuple[dict[str, np.ndarray], float, float, list[np.ndarray]]:
    """Clipped gradients, their norm before clipping, the loss, and what the network says of every response."""
    batch, outputs = samples(), []
    network = (build_actor if role == "actor" else build_critic)(*origin(chosen, role))
    loss = torch.zeros(())
    for i, tokens in enumerate(batch.tokens):
        ids, first = torch.from_numpy(tokens)[None], int(batch.num_prompt_tokens[i])
        if role == "actor":
            odds = (network(input_ids=ids).logits[0, first - 1 : -1] / TEMPERATURE).log_softmax(-1)
            new = odds[torch.arange(len(odds)), ids[0, first:]]
        else:
            new = network(ids, torch.ones_like(ids))[0, first - 1 : -1]
        loss = loss + (surrogate if role == "actor" else regression)(new, i, batch, chosen) / sum(RESPONSES)
        outputs.append(new.detach().numpy())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), chosen.optimizer.grad_clip)
    found = {name: parameter.grad.numpy() for name, parameter in network.named_parameters()}
    return found, float(norm), float(loss.detach()), outputs


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    with Ranks(1) as found:
        yield found


@pytest.mark.real
@pytest.mark.parametrize("pack", ["padded", "packed", "shared"])
@pytest.mark.parametrize(("name", "role"), [("quickstart", "actor"), ("ppo-tiny", "critic"), ("ppo-tiny", "actor")])
def test_a_step_in_micro_batches_has_the_gradient_of_the_loss_written_out(
    one: Ranks, scenario: Make, pack: str, name: str, role: str
) -> None:
    chosen = scenario_of(scenario, name, pack)
    ((found, learned, before),) = one.run(trained, chosen, role)
    expected, norm, loss, outputs = written_out(chosen, role)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        np.testing.assert_allclose(found[key], gradient, atol=2e-4 * max(1e-3, np.abs(gradient).max()), err_msg=key)
    prefix = "" if role == "actor" else "critic_"
    assert learned[f"{prefix}grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert learned["loss" if role == "actor" else "value_loss"] == pytest.approx(loss, rel=1e-4)
    if before is not None:
        gaps = [np.abs(one - two).max() for one, two in zip(before, outputs, strict=True)]
        assert max(gaps) < 1e-4
        engine = [np.abs(one - two).max() for one, two in zip(samples().logprobs, outputs, strict=True)]
        assert learned["logprob_gap"] == pytest.approx(max(engine), rel=1e-4)


def test_a_policy_sure_of_other_tokens_than_the_prompt_s_leaves_the_loss_finite() -> None:
    """Log-probs of prompt and padding tokens are in the tensor too, may be anything, and do not count."""
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    new = torch.tensor([[-200.0, -1.0, -2.0, -500.0]], requires_grad=True)
    zero = torch.zeros(1, 4)
    old = torch.tensor([[0.0, -1.0, -2.0, 0.0]])
    loss = policy_loss(new, old, zero + 1, mask, clip=0.2, reference=old, kl_coef=0.1)
    loss.total.backward()
    assert float(loss.total.detach()) == pytest.approx(-2.0)
    assert new.grad.tolist() == [[0.0, -1.0, -1.0, 0.0]]
