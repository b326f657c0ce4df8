"""How the temperature moves, how a batch mixes temperatures, and which of several answers is taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """A schedule from `start` at the first step to `end` at the last."""

    start: float = 1.0
    end: float = 1.0
    schedule: str = "constant"
    """entry of `SCHEDULES`"""


def temperature(rule: Temperature, step: int, num_steps: int) -> float:
    """The temperature of a step, counted from 0."""
    done = min(max(step / (num_steps - 1), 0.0), 1.0) if num_steps > 1 else 0.0
    part = SCHEDULES[rule.schedule](done)
    return rule.start * (1 - part) + rule.end * part


SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 0.0,
    "linear": lambda done: done,
    "cosine": lambda done: (1 - math.cos(math.pi * done)) / 2,
}
"""by name: share of the steps done to share of the way from `start` to `end`; both from 0 to 1, never falling"""


@dataclass(frozen=True, kw_only=True)
class EntropyBand:
    """Steer by the policy's entropy (nats per token) instead of by the step."""

    low: float = 0.5
    """below it the answers grow alike: warmer"""
    high: float = 3.0
    """above it they grow random: cooler"""
    change: float = 0.05
    lowest: float = 0.6
    highest: float = 1.2


def steered(rule: EntropyBand, current: float, entropy: float) -> float:
    """The next temperature, one change away at most and within its limits."""
    step = rule.change if entropy < rule.low else -rule.change if entropy > rule.high else 0.0
    return min(max(current + step, rule.lowest), rule.highest)


def mixture(shares: Sequence[float], num_samples: int) -> Ints:
    """Which arm (for example a temperature) each sample of a batch gets: counts within one of the shares, interleaved.

    The counts are those of the largest remainders; equal ones go to the first.
    """
    exact = np.asarray(shares, float) / sum(shares) * num_samples
    counts = np.floor(exact + 1e-9).astype(np.int64)
    counts[np.argsort(-(exact - counts), kind="stable")[: num_samples - counts.sum()]] += 1
    arms = np.repeat(np.arange(len(counts)), counts)
    place = np.concatenate([(np.arange(count) + 0.5) / count for count in counts if count] or [np.empty(0)])
    return np.asarray(arms[np.argsort(place, kind="stable")])


@dataclass(frozen=True, kw_only=True)
class Arms:
    """What choosing each arm brought so far. Rewards are scaled to 0 … 1."""

    num_tried: Ints
    total_reward: Floats

    @classmethod
    def untried(cls, num: int) -> Arms:
        return cls(num_tried=np.zeros(num, np.int64), total_reward=np.zeros(num))

    def with_rewards(self, arms: npt.ArrayLike, rewards: npt.ArrayLike) -> Arms:
        """After these arms brought these rewards."""
        index, size = np.asarray(arms, np.int64), len(self.num_tried)
        tried = self.num_tried + np.bincount(index, minlength=size)
        return Arms(
            num_tried=tried,
            total_reward=self.total_reward + np.bincount(index, np.asarray(rewards, float), minlength=size),
        )


def ucb(arms: Arms) -> int:
    """UCB1 (Auer et al. 2002): every arm once, then the highest mean + sqrt(2 ln tries / own tries)."""
    if not arms.num_tried.all():
        return int(np.argmin(arms.num_tried))
    spread = np.sqrt(2 * np.log(arms.num_tried.sum()) / arms.num_tried)
    return int(np.argmax(arms.total_reward / arms.num_tried + spread))


def thompson(arms: Arms, seed: int) -> int:
    """The arm with the highest draw from Beta(1 + rewards, 1 + tries − rewards); the draw depends on seed and tries."""
    rng = np.random.default_rng([seed, int(arms.num_tried.sum())])
    won = np.clip(arms.total_reward, 0, arms.num_tried)
    return int(np.argmax(rng.beta(1 + won, 1 + arms.num_tried - won)))


def best_of(rewards: npt.ArrayLike) -> Ints:
    """The answer taken of each prompt's N; rewards are (num_prompts, N), and the first of equal ones is taken."""
    return np.asarray(np.argmax(np.asarray(rewards, float), axis=1))
