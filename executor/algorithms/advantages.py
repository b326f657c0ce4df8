"""Advantages of a step's samples. Arrays only: no torch, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor.experience import Samples
from lab.algorithm import Grpo, Ppo

Row = NDArray[np.float32]
_TINY = 1e-6


def normalised_within(rewards: NDArray[np.float64], prompts: NDArray[np.int64]) -> NDArray[np.float64]:
    """(r - mean) / (std + 1e-6) among the samples of each prompt, shape [N] (Shao et al. 2024, section 4.1).

    A prompt whose samples all got the same reward teaches nothing: its advantages are zero.
    """
    advantages = np.zeros_like(rewards)
    for prompt in np.unique(prompts):
        group = prompts == prompt
        advantages[group] = (rewards[group] - rewards[group].mean()) / (rewards[group].std() + _TINY)
    return advantages


def generalised(rewards: Row, values: Row, gamma: float, lam: float) -> tuple[Row, Row]:
    """Advantages and returns of one response, one number per token (Schulman et al. 2016, equation 16).

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; the value after the last token is 0.
    The return is A_t + V_t.
    """
    from scipy.signal import lfilter  # y_t = x_t + gamma lam y_{t-1}, run backwards

    deltas = rewards + gamma * np.append(values[1:], 0.0).astype(np.float64) - values
    advantages = lfilter([1.0], [1.0, -gamma * lam], deltas[::-1])[::-1]
    return advantages.astype(np.float32), (advantages + values).astype(np.float32)


def token_rewards(reward: float, logprobs: Row, reference: Row | None, kl_coef: float) -> Row:
    """The sample's reward at its last token, minus kl_coef (log p - log p_reference) at every token."""
    rewards = np.zeros(len(logprobs), dtype=np.float32)
    if reference is not None:
        rewards -= kl_coef * (logprobs - reference)
    rewards[-1] += reward
    return rewards


def grpo(samples: Samples, algorithm: Grpo) -> Samples:
    """Every token of a response has the response's advantage; the KL to the reference is in the loss."""
    by_sample = normalised_within(samples.columns["rewards"], samples.prompts)
    rows = [np.full(len(row), a, dtype=np.float32) for row, a in zip(samples.logprobs, by_sample, strict=True)]
    return samples.with_columns(advantages=rows)


def ppo(samples: Samples, algorithm: Ppo) -> Samples:
    """Generalised advantages, whitened over all tokens of the step, and returns for the critic."""
    references = samples.columns.get("reference_logprobs", [None] * len(samples))
    pairs = [
        generalised(
            token_rewards(reward, logprobs, reference, algorithm.kl_coef), values, algorithm.gamma, algorithm.lam
        )
        for reward, logprobs, reference, values in zip(
            samples.columns["rewards"], samples.logprobs, references, samples.columns["values"], strict=True
        )
    ]
    every = np.concatenate([advantages for advantages, _ in pairs])
    mean, scale = every.mean(), every.std() + _TINY
    rows = [((advantages - mean) / scale).astype(np.float32) for advantages, _ in pairs]
    return samples.with_columns(advantages=rows, returns=[returns for _, returns in pairs])


ADVANTAGES: dict[str, Callable[[Samples, Any], Samples]] = {"grpo": grpo, "ppo": ppo}


def joined(columns: Sequence[dict[str, Any]], num_samples: int) -> dict[str, Any]:
    """The columns of all scorers as one; values come from several ranks, each with its own samples by index."""
    found = {key: column for part in columns for key, column in part.items() if key != "values"}
    values = {i: row for part in columns for i, row in part.get("values", {}).items()}
    return found | ({"values": [values[i] for i in range(num_samples)]} if values else {})
