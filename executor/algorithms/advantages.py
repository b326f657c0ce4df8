"""Advantages of a step's samples, and the order of its pairs. Arrays only: no torch, no clock.

Numbers per response token of N samples stand in arrays [N, T] with zeros behind the end of each response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor.experience import Samples
from lab.algorithm import Dpo, Grpo, Ppo

Row = NDArray[np.float32]
Rows = NDArray[np.float64]
_TINY = 1e-6


def padded(rows: Sequence[NDArray[Any]]) -> Rows:
    """Rows of different lengths as one array [N, T] in float64, zeros behind their ends."""
    out = np.zeros((len(rows), max((len(row) for row in rows), default=0)))
    out[_inside(rows)] = np.concatenate([np.empty(0), *rows])
    return out


def unpadded(array: Rows, like: Sequence[NDArray[Any]]) -> list[Row]:
    """The rows of [N, T], each as long as its own in `like`."""
    ends = np.cumsum([len(row) for row in like])[:-1]
    return np.split(array[_inside(like)].astype(np.float32), ends)


def _inside(rows: Sequence[NDArray[Any]]) -> NDArray[np.bool_]:
    lengths = np.asarray([len(row) for row in rows], dtype=np.int64)
    return np.arange(lengths.max(initial=0))[None, :] < lengths[:, None]


def normalised_within(rewards: Rows, prompts: NDArray[np.int64]) -> Rows:
    """(r - mean) / (std + 1e-6) among the samples of each prompt, shape [N] (Shao et al. 2024, section 4.1).

    A prompt whose samples all got the same reward teaches nothing: its advantages are zero.
    """
    _, group, sizes = np.unique(prompts, return_inverse=True, return_counts=True)
    away = rewards - (np.bincount(group, rewards) / sizes)[group]
    spread = np.sqrt(np.bincount(group, away**2) / sizes)
    advantages: Rows = away / (spread + _TINY)[group]
    return advantages


def generalised(rewards: Rows, values: Rows, gamma: float, lam: float) -> tuple[Rows, Rows]:
    """Advantages and returns of every token of N responses, [N, T] (Schulman et al. 2016, equation 16).

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; the value after the last token is 0.
    The return is A_t + V_t.
    """
    from scipy.signal import lfilter  # y_t = x_t + gamma lam y_{t-1}, run backwards over all responses at once

    following = np.concatenate([values[:, 1:], np.zeros((len(values), 1))], axis=1)
    deltas = rewards + gamma * following - values
    advantages = lfilter([1.0], [1.0, -gamma * lam], deltas[:, ::-1], axis=1)[:, ::-1]
    return advantages, advantages + values


def token_rewards(
    rewards: NDArray[np.float64], logprobs: Sequence[Row], reference: Sequence[Row] | None, kl_coef: float
) -> Rows:
    """Each sample's reward at its last token, minus kl_coef (log p - log p_reference) at every token, [N, T]."""
    policy = padded(logprobs)
    out = np.zeros_like(policy) if reference is None else -kl_coef * (policy - padded(reference))
    out[np.arange(len(policy)), [len(row) - 1 for row in logprobs]] += rewards
    return out


def whitened(advantages: Sequence[Row]) -> list[Row]:
    """With mean 0 and deviation 1 over all tokens of the step."""
    every = np.concatenate(advantages)
    mean, scale = every.mean(), every.std() + _TINY
    return [((row - mean) / scale).astype(np.float32) for row in advantages]


def grpo(samples: Samples, algorithm: Grpo) -> Samples:
    """Every token of a response has the response's advantage; the KL to the reference is in the loss."""
    by_sample = normalised_within(samples.columns["rewards"], samples.prompts)
    rows = [np.full(len(row), a, dtype=np.float32) for row, a in zip(samples.logprobs, by_sample, strict=True)]
    return samples.with_columns(advantages=rows)


def ppo(samples: Samples, algorithm: Ppo) -> Samples:
    """Generalised advantages, whitened over all tokens of the step, and returns for the critic.

    The policy of the token rewards is the one that the update starts from, where its log-probs were computed anew.
    """
    columns = samples.columns
    policy = columns.get("old_logprobs", samples.logprobs)
    rewards = token_rewards(columns["rewards"], policy, columns.get("reference_logprobs"), algorithm.kl_coef)
    advantages, returns = generalised(rewards, padded(columns["values"]), algorithm.gamma, algorithm.lam)
    rows = whitened(unpadded(advantages, policy))
    return samples.with_columns(advantages=rows, returns=unpadded(returns, policy))


def dpo(samples: Samples, algorithm: Dpo) -> Samples:
    """Pairs put in order: the response with the higher reward first. Equal ones prefer neither, and weigh nothing."""
    rewards = samples.columns["rewards"].reshape(-1, 2)
    swapped = rewards[:, 1] > rewards[:, 0]
    order = np.arange(len(samples)).reshape(-1, 2)
    order[swapped] = order[swapped, ::-1]
    weights = np.repeat((rewards[:, 0] != rewards[:, 1]).astype(np.float32), 2)
    return samples.with_columns(weights=weights).take(order.ravel())


ADVANTAGES: dict[str, Callable[[Samples, Any], Samples]] = {"grpo": grpo, "ppo": ppo, "dpo": dpo}
"""by algorithm: what stage `advantage` adds to the samples of a step, once all scores are there"""


def joined(columns: Sequence[dict[str, Any]], num_samples: int) -> dict[str, Any]:
    """The columns of all scorers as one; what several ranks computed comes from each as rows by sample."""
    found: dict[str, Any] = {}
    for key, column in (item for part in columns for item in part.items()):
        found[key] = found.get(key, {}) | column if isinstance(column, dict) else column
    return {key: _in_order(c, num_samples) if isinstance(c, dict) else c for key, c in found.items()}


def _in_order(rows: dict[int, Any], num_samples: int) -> Any:
    """Rows by sample as a list of arrays, or as one array [N] where each is a number."""
    found = [rows[i] for i in range(num_samples)]
    return np.asarray(found) if found and isinstance(found[0], float | np.number) else found
