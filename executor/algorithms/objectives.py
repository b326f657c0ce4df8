"""What each model minimises under each algorithm, on one micro-batch.

Importing this module imports torch; only trainers do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from executor.algorithms.losses import (
    Loss,
    divergence,
    imitation_loss,
    importance_weights,
    label_loss,
    pair_loss,
    policy_loss,
    value_loss,
)
from executor.experience import Samples

if TYPE_CHECKING:
    from executor.microbatch import Microbatch

Unit = Literal["token", "sample", "pair"]


@dataclass(frozen=True, kw_only=True)
class Material:
    """What a loss is computed from beside the network's output."""

    algorithm: Any
    samples: Samples
    """of the whole step, with all columns"""
    stale: bool = False
    """whether an older policy than the one trained drew them"""
    fresh: list[Any] | None = None
    """of each sample which response tokens the policy that is trained drew, where not all are of one age"""
    drift: float = 0.0
    """estimated KL(policy, reference) per sample, of KTO"""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss and what it is a mean of."""

    loss: Callable[[Tensor, Microbatch, Material], Loss]
    """of the network's output for a micro-batch: log-probs or values of response tokens, or one reward per sample"""
    unit: Unit
    """response tokens, samples or pairs of the mini-batch"""


def policy_gradient(output: Tensor, batch: Microbatch, material: Material) -> Loss:
    """PPO and GRPO. The ratio is of the log-probs that the engine recorded; or, where they were computed anew before the
    update, of those, and the truncated weight between the two multiplies.

    Without recomputation, the ratio of stale samples is truncated itself. `kl` is reported per token.
    """
    algorithm, columns = material.algorithm, material.samples.columns
    behaviour = old = batch.column(material.samples.logprobs)
    weights = None
    if "old_logprobs" in columns:
        old = batch.column(columns["old_logprobs"])
        weights = importance_weights(old, behaviour, batch.response, algorithm.importance_cap)
    reference = batch.column(columns["reference_logprobs"]) if "reference_logprobs" in columns else None
    loss = policy_loss(
        output, old, batch.column(columns["advantages"]), batch.response, clip=algorithm.clip,
        kl_coef=algorithm.kl_coef, reference=reference if algorithm.name == "grpo" else None, weights=weights,
        cap=_cap(batch, material) if weights is None else None, share=_share(batch, columns),
    )  # fmt: skip
    if reference is not None:
        loss.sums["kl"] = divergence(output, reference, batch.response)
    return loss


def regression(output: Tensor, batch: Microbatch, material: Material) -> Loss:
    """PPO's critic."""
    columns = material.samples.columns
    old, returns = batch.column(columns["values"]), batch.column(columns["returns"])
    share = _share(batch, columns)
    counted = batch.response if share is None else batch.response * share
    return value_loss(output, old, returns, counted, clip=material.algorithm.value_clip)


def _cap(batch: Microbatch, material: Material) -> float | Tensor | None:
    """What the ratio of each token is truncated at: where the policy that is trained drew it, at nothing."""
    cap: float = material.algorithm.importance_cap
    if material.fresh is None:
        return cap if material.stale else None
    return torch.where(batch.column(material.fresh) > 0, torch.inf, cap)


def _share(batch: Microbatch, columns: dict[str, Any]) -> Tensor | None:
    """How much each response token counts, [R], where samples count less with their age."""
    return batch.numbers(columns["counts"])[batch.owner] if "counts" in columns else None


def imitation(output: Tensor, batch: Microbatch, material: Material) -> Loss:
    """Fine-tuning on demonstrations."""
    return imitation_loss(output, batch.response)


def direct_preference(output: Tensor, batch: Microbatch, material: Material) -> Loss:
    """DPO, on pairs of a data set or on pairs that a reward has put in order."""
    scores, columns = _implied_rewards(output, batch, material), material.samples.columns
    weights = batch.numbers(columns["weights"])[0::2] if "weights" in columns else None
    if weights is not None and "counts" in columns:
        weights = weights * batch.numbers(columns["counts"])[0::2]
    return pair_loss(scores[0::2], scores[1::2], weights)


def labelled_response(output: Tensor, batch: Microbatch, material: Material) -> Loss:
    """KTO."""
    labels = batch.numbers(material.samples.columns["labels"])
    return label_loss(_implied_rewards(output, batch, material), labels, material.algorithm.beta * material.drift)


def ranking(output: Tensor, batch: Microbatch, material: Material) -> Loss:
    """A reward model's; the network says one number per sample."""
    return pair_loss(output[0::2], output[1::2])


def _implied_rewards(output: Tensor, batch: Microbatch, material: Material) -> Tensor:
    """beta (log p - log p_reference) of each sample, log-probs summed over the response, [n]."""
    reference = batch.column(material.samples.columns["reference_logprobs"])
    found: Tensor = material.algorithm.beta * batch.sums(output - reference)
    return found


OBJECTIVES: dict[tuple[str, str], Objective] = {
    ("ppo", "actor"): Objective(loss=policy_gradient, unit="token"),
    ("ppo", "critic"): Objective(loss=regression, unit="token"),
    ("grpo", "actor"): Objective(loss=policy_gradient, unit="token"),
    ("sft", "actor"): Objective(loss=imitation, unit="token"),
    ("dpo", "actor"): Objective(loss=direct_preference, unit="pair"),
    ("kto", "actor"): Objective(loss=labelled_response, unit="sample"),
    ("reward_model", "reward"): Objective(loss=ranking, unit="pair"),
}
"""by algorithm and role"""


def units(unit: Unit, samples: Samples, chosen: list[int]) -> int:
    """How many response tokens, samples or pairs some samples have, at least 1; pairs that prefer neither do not count."""
    if unit == "token":
        return sum(len(samples.tokens[i]) - int(samples.num_prompt_tokens[i]) for i in chosen)
    if unit == "sample":
        return len(chosen)
    weights = samples.columns.get("weights")
    return max(len(chosen) if weights is None else int(weights[chosen].sum()), 2) // 2


def reported(means: dict[str, float]) -> dict[str, float]:
    """Numbers of interest from means over units: what is a quotient of two of them is divided here.

    The effective sample size is (sum w)² / (N sum w²) (Kong 1992): the share of tokens that would say as much if all
    weighed the same.
    """
    found = dict(means)
    if "weight" in found:
        weight, squared = found.pop("weight"), found.pop("weight_squared")
        found["effective_sample_size"] = weight**2 / squared if squared else 0.0
    if "desired" in found:
        for name, share in (("chosen_score", found.pop("desired")), ("rejected_score", found.pop("undesired"))):
            found[name] = found[name] / share if share else 0.0
        found["margin"] = found["chosen_score"] - found["rejected_score"]
    return found
