"""How the temperature moves, how a batch mixes temperatures and learns which to prefer, and which of several answers is
taken."""

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
class Slopes:
    """How sampling changes the length of responses: change of ln(length) per unit of each setting, from 1 on."""

    temperature: float = 0.0
    top_p: float = 0.0
    repetition_penalty: float = 0.0
    temperatures: tuple[float, ...] = ()
    """rising; where there are any, `factors` at these replace the slope for temperature"""
    factors: tuple[float, ...] = ()


def length_factor(
    slopes: Slopes, temperatures: npt.ArrayLike, top_p: float = 1.0, repetition_penalty: float = 1.0
) -> Floats:
    """What lengths drawn at settings of 1 are multiplied with, for each of these temperatures."""
    heats = np.asarray(temperatures, float)
    others = math.exp(slopes.top_p * (top_p - 1) + slopes.repetition_penalty * (repetition_penalty - 1))
    if slopes.temperatures:
        return np.asarray(np.interp(heats, slopes.temperatures, slopes.factors) * others)
    return np.asarray(np.exp(slopes.temperature * (heats - 1)) * others)


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
class EntropyBand:
    """Keeps the entropy of what is drawn (nats per token) within a band by making it warmer or cooler."""

    low: float = 0.5
    """below it the answers grow alike: warmer"""
    high: float = math.inf
    """above it they grow random: cooler"""
    change: float = 0.05
    """of the temperature, in one step"""
    most: float = 0.5
    """of the change, in all, in either direction"""


def steered(rule: EntropyBand, offset: float, entropy: float) -> float:
    """What is next added to every temperature: one change away from `offset` at most, and within `most`."""
    step = rule.change if entropy < rule.low else -rule.change if entropy > rule.high else 0.0
    return min(max(offset + step, -rule.most), rule.most)


@dataclass(frozen=True, kw_only=True)
class Arms:
    """What choosing each arm brought so far; older tries may count less than one. Rewards are scaled to 0 … 1."""

    num_tried: Floats
    total_reward: Floats

    @classmethod
    def untried(cls, num: int) -> Arms:
        return cls(num_tried=np.zeros(num), total_reward=np.zeros(num))

    def with_rewards(self, arms: npt.ArrayLike, rewards: npt.ArrayLike, discount: float = 1.0) -> Arms:
        """After these arms brought these rewards, what came before counting `discount` times as much."""
        index, size = np.asarray(arms, np.int64), len(self.num_tried)
        gained = np.bincount(index, np.asarray(rewards, float), minlength=size)
        return Arms(
            num_tried=discount * self.num_tried + np.bincount(index, minlength=size),
            total_reward=discount * self.total_reward + gained,
        )


def ucb(arms: Arms) -> int:
    """UCB1 (Auer et al. 2002), with discounted tries that of Garivier & Moulines (2011): every arm once, then the
    highest mean + sqrt(2 ln tries / own tries)."""
    if not arms.num_tried.all():
        return int(np.argmin(arms.num_tried))
    spread = np.sqrt(2 * np.log(max(arms.num_tried.sum(), 1.0)) / arms.num_tried)
    return int(np.argmax(arms.total_reward / arms.num_tried + spread))


def thompson(arms: Arms, seed: int, num_draws: int) -> Floats:
    """How often each arm has the highest of its draws from Beta(1 + rewards, 1 + tries - rewards), as a share.

    Drawing once for every sample (Thompson 1933) gives a batch in these shares. The draws depend on seed and tries.
    """
    rng = np.random.default_rng([seed, round(float(arms.num_tried.sum()))])
    won = np.clip(arms.total_reward, 0, arms.num_tried)
    draws = rng.beta(1 + won, 1 + arms.num_tried - won, size=(num_draws, len(won)))
    return np.asarray(np.bincount(draws.argmax(axis=1), minlength=len(won)) / num_draws)


def shares(rule: str, arms: Arms, floor: float, seed: int, num_samples: int) -> Floats:
    """Share of the samples of a step that each arm gets: all keep `floor`, the rest goes where the rule puts it.

    `ucb` puts it on one arm, `thompson` on each as often as it wins. Shares add to 1.
    """
    chosen = np.eye(len(arms.num_tried))[ucb(arms)] if rule == "ucb" else thompson(arms, seed, num_samples)
    return np.asarray(floor + (1 - floor * len(chosen)) * chosen)


def best_of(rewards: npt.ArrayLike) -> Ints:
    """The answer taken of each prompt's N; rewards are (num_prompts, N), and the first of equal ones is taken."""
    return np.asarray(np.argmax(np.asarray(rewards, float), axis=1))
