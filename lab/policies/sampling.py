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


def best_of(rewards: npt.ArrayLike) -> Ints:
    """The answer taken of each prompt's N; rewards are (num_prompts, N), and the first of equal ones is taken."""
    return np.asarray(np.argmax(np.asarray(rewards, float), axis=1))
