"""Losses of one micro-batch, as sums; whoever calls divides by the number of units of the whole mini-batch, so that
neither packing nor ranks change the gradient.

Losses over tokens take tensors of one shape with a mask of what counts; losses over samples or pairs take one score of
each, [N] or [P].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A sum to minimise, and sums of interest by name."""

    total: Tensor
    sums: dict[str, float]


def policy_loss(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip: float, reference: Tensor | None, kl_coef: float,
    weights: Tensor | None = None, cap: float | Tensor | None = None, share: Tensor | None = None,
) -> Loss:  # fmt: skip
    """Clipped surrogate (Schulman et al. 2017, equation 7); with a reference, plus kl_coef times the k3 estimate of
    the KL divergence, exp(q - p) - (q - p) - 1 (Schulman 2020; Shao et al. 2024, equation 4).

    `weights` multiply the surrogate (decoupled objective, Hilton et al. 2022, equation 3); a `cap` truncates the ratio
    (Ionides 2008), which for positive advantages the clip does already, and for negative ones leaves tokens beyond it
    without a gradient. `clip_fraction` counts every ratio outside the range, whether the clip binds or not.
    `weight` and `weight_squared` are of the whole weight of each token, ratio and `weights`. A token counts by its `share`,
    of 1 where nothing is said.
    """
    ratio = torch.exp((new - old) * mask)
    kept = ratio if cap is None else ratio.clamp(max=cap)
    surrogate = -torch.minimum(kept * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    whole = (kept.detach() if weights is None else kept.detach() * weights).double()
    counted = surrogate * mask if share is None else surrogate * mask * share
    total = (counted if weights is None else counted * weights).sum()
    if reference is not None:
        total = total + kl_coef * _k3(new, reference, mask, share)
    outside = ((ratio - 1).abs() > clip).float()
    sums = {"loss": total, "clip_fraction": (outside * mask).sum()}
    sums |= {"weight": (whole * mask).sum(), "weight_squared": (whole**2 * mask).sum()}
    return Loss(total=total, sums={name: _number(value) for name, value in sums.items()})


def importance_weights(proximal: Tensor, behaviour: Tensor, mask: Tensor, cap: float) -> Tensor:
    """min(p_proximal / p_behaviour, cap) of each token: of the policy that an update starts from over that which drew."""
    return torch.exp((proximal - behaviour) * mask).clamp(max=cap)


def value_loss(new: Tensor, old: Tensor, returns: Tensor, mask: Tensor, *, clip: float) -> Loss:
    """Half the larger of the squared errors of the value and of the value clipped around the old one."""
    clipped = old + (new - old).clamp(-clip, clip)
    total = (0.5 * torch.maximum((new - returns) ** 2, (clipped - returns) ** 2) * mask).sum()
    return Loss(total=total, sums={"value_loss": _number(total)})


def imitation_loss(new: Tensor, mask: Tensor) -> Loss:
    """Negative log-likelihood of the response tokens."""
    total = -(new * mask).sum()
    return Loss(total=total, sums={"loss": _number(total)})


def pair_loss(chosen: Tensor, rejected: Tensor, weights: Tensor | None = None) -> Loss:
    """-log sigmoid(chosen - rejected) of the scores of pairs, [P] (Bradley & Terry 1952); a pair that prefers neither has
    weight 0, else 1.

    Of rewards it fits a reward model (Ouyang et al. 2022, equation 1); of beta (log p - log p_reference), summed over the
    response, it is DPO (Rafailov et al. 2023, equation 7). Accuracy counts equal scores as half.
    """
    margins = chosen - rejected
    weights = torch.ones_like(margins) if weights is None else weights
    total = -(logsigmoid(margins) * weights).sum()
    right = (margins.detach().sign() + 1) / 2
    of = {"accuracy": right, "margin": margins, "chosen_score": chosen, "rejected_score": rejected}
    sums = {name: _number((values * weights).sum()) for name, values in of.items()}
    return Loss(total=total, sums={"loss": _number(total)} | sums)


def label_loss(scores: Tensor, labels: Tensor, drift: float) -> Loss:
    """1 - sigmoid(score - drift) of desired samples, 1 - sigmoid(drift - score) of the others, [N] (Ethayarajh et al.
    2024, equation 7, both kinds weighing 1); score is beta (log p - log p_reference) summed over the response, drift is
    beta times the KL estimate."""
    total = (1 - torch.sigmoid((scores - drift) * (2 * labels - 1))).sum()
    sums = {"loss": total, "desired": labels.sum(), "undesired": (1 - labels).sum()}
    sums |= {"chosen_score": (scores * labels).sum(), "rejected_score": (scores * (1 - labels)).sum()}
    return Loss(total=total, sums={name: _number(value) for name, value in sums.items()})


def divergence(new: Tensor, reference: Tensor, mask: Tensor) -> float:
    """Sum over tokens of the k3 estimate of KL(policy, reference)."""
    return _number(_k3(new.detach(), reference, mask))


def _k3(new: Tensor, reference: Tensor, mask: Tensor, share: Tensor | None = None) -> Tensor:
    """Sum of exp(q - p) - (q - p) - 1; masked before the exponential, which may overflow where nothing is compared."""
    gap = (reference - new) * mask
    found = torch.exp(gap) - gap - 1
    return found.sum() if share is None else (found * share).sum()


def _number(tensor: Tensor) -> float:
    return float(tensor.detach())
