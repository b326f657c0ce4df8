"""Losses of one micro-batch, as sums over response tokens; all tensors are [B, T] with the mask of response tokens.

Whoever calls divides by the number of response tokens of the whole mini-batch, so that neither packing nor ranks
change the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A sum to minimise, and sums of interest by name."""

    total: Tensor
    sums: dict[str, float]


def policy_loss(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip: float, reference: Tensor | None, kl_coef: float
) -> Loss:
    """Clipped surrogate (Schulman et al. 2017, equation 7); with a reference, plus kl_coef times the k3 estimate of
    the KL divergence, exp(q - p) - (q - p) - 1 (Schulman 2020; Shao et al. 2024, equation 4)."""
    ratio = torch.exp(new - old)
    clipped = ratio.clamp(1 - clip, 1 + clip)
    surrogate = -torch.minimum(ratio * advantages, clipped * advantages)
    total = (surrogate * mask).sum()
    if reference is not None:
        total = total + kl_coef * _k3(new, reference, mask)
    outside = ((ratio - 1).abs() > clip).float()
    return Loss(total=total, sums={"loss": _number(total), "clip_fraction": _number((outside * mask).sum())})


def value_loss(new: Tensor, old: Tensor, returns: Tensor, mask: Tensor, *, clip: float) -> Loss:
    """Half the larger of the squared errors of the value and of the value clipped around the old one."""
    clipped = old + (new - old).clamp(-clip, clip)
    total = (0.5 * torch.maximum((new - returns) ** 2, (clipped - returns) ** 2) * mask).sum()
    return Loss(total=total, sums={"value_loss": _number(total)})


def divergence(new: Tensor, reference: Tensor, mask: Tensor) -> float:
    """Sum over response tokens of the k3 estimate of KL(policy, reference)."""
    return _number(_k3(new.detach(), reference, mask))


def _k3(new: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Sum of exp(q - p) - (q - p) - 1; masked before the exponential, which may overflow where nothing is compared."""
    gap = (reference - new) * mask
    return (torch.exp(gap) - gap - 1).sum()


def _number(tensor: Tensor) -> float:
    return float(tensor.detach())
