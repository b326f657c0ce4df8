"""What is asked of the system: prompts, samples and their lengths, drawn from the seed alone.

A length depends only on (seed, step, prompt, sample): both worlds draw the same ones, and changing the number of
prompts or samples leaves the others as they were.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from lab.errors import WrongValue
from lab.records import Record

_Z95 = 1.6448536269514722  # 95th percentile of the standard normal distribution


def possible(mean: float, p95: float) -> None:
    """Raises ValueError where no lognormal distribution has this mean and 95th percentile."""
    high = mean * math.exp(_Z95**2 / 2)
    if not mean <= p95 <= high:
        raise ValueError(f"no lognormal with mean {mean:g} has p95 {p95:g}; it lies in [{mean:g}, {high:.4g}]")


def spread_of(mean: float, p95: float) -> float:
    """The s of a lognormal: from mean = exp(mu + s²/2) and p95 = exp(mu + 1.645 s), s = z - sqrt(z² - 2 ln(p95/mean))."""
    return _Z95 - math.sqrt(max(_Z95**2 - 2 * math.log(p95 / mean), 0.0))


class Fixed(Record):
    """Every length is `value` tokens."""

    dist: Literal["fixed"]
    value: int = Field(ge=1, le=10**7, description="tokens")

    @property
    def max(self) -> int:
        return self.value

    @property
    def mean(self) -> float:
        return float(self.value)

    def draw(self, uniform: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.full(uniform.shape, self.value, dtype=np.int64)


class Lognormal(Record):
    """Lognormal lengths with this mean and 95th percentile before they are rounded and cut at `max`."""

    dist: Literal["lognormal"]
    mean: float = Field(gt=0, description="tokens")
    p95: float = Field(gt=0, description="tokens")
    max: int = Field(ge=1, le=10**7, description="tokens; longer draws are cut here")

    @model_validator(mode="after")
    def _possible(self) -> Lognormal:
        possible(self.mean, self.p95)
        if self.mean > self.max:
            problem = f"a mean of {self.mean:g} is above the longest, {self.max}"
            raise WrongValue(path=("mean",), problem=problem, remedy=f"set max to {math.ceil(self.p95)} or more")
        return self

    @property
    def sigma(self) -> float:
        return spread_of(self.mean, self.p95)

    def draw(self, uniform: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.int64]:
        normal = np.sqrt(-2 * np.log(uniform)) * np.cos(2 * np.pi * other)  # Box & Muller 1958
        values = np.exp(math.log(self.mean) - self.sigma**2 / 2 + self.sigma * normal)
        lengths: NDArray[np.int64] = np.clip(np.rint(values), 1, self.max).astype(np.int64)
        return lengths


class Empirical(Record):
    """Lengths drawn with equal chance from `values`."""

    dist: Literal["empirical"]
    values: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, description="tokens")

    @property
    def max(self) -> int:
        return max(self.values)

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    def draw(self, uniform: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.int64]:
        index = np.minimum((uniform * len(self.values)).astype(np.int64), len(self.values) - 1)
        lengths: NDArray[np.int64] = np.asarray(self.values, dtype=np.int64)[index]
        return lengths


Lengths = Annotated[Fixed | Lognormal | Empirical, Field(discriminator="dist")]


class Workload(Record):
    """The work of one step. In the frameworks `prompts_per_step` is train_batch_size (verl), rollout_batch_size (OpenRLHF)."""

    prompts_per_step: int = Field(ge=1, le=10**6, description="prompts (not samples) in one step")
    samples_per_prompt: int = Field(
        default=1, ge=1, le=10**4, description="responses to each prompt: n, group size, num_generations"
    )
    prompt_tokens: Lengths
    response_tokens: Lengths

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def max_sequence_tokens(self) -> int:
        return self.prompt_tokens.max + self.response_tokens.max

    def prompt_lengths(self, seed: int, step: int, num_prompts: int | None = None) -> NDArray[np.int64]:
        """Tokens of each prompt of a step, shape [num_prompts]; prompts_per_step where None."""
        prompts = np.arange(num_prompts or self.prompts_per_step)
        return self.prompt_tokens.draw(uniform(seed, 1, step, prompts, 0), uniform(seed, 2, step, prompts, 0))

    def response_lengths(
        self, seed: int, step: int, num_prompts: int | None = None, num_samples: int | None = None
    ) -> NDArray[np.int64]:
        """Tokens of each response of a step, shape [num_prompts, num_samples].

        Where None: prompts_per_step, samples_per_prompt.
        """
        prompts = np.arange(num_prompts or self.prompts_per_step)[:, None]
        samples = np.arange(num_samples or self.samples_per_prompt)[None, :]
        return self.response_tokens.draw(
            uniform(seed, 3, step, prompts, samples), uniform(seed, 4, step, prompts, samples)
        )


def uniform(
    seed: int,
    stream: int,
    step: int | NDArray[np.int64],
    prompts: NDArray[np.int64],
    samples: NDArray[np.int64] | int,
) -> NDArray[np.float64]:
    """Numbers in (0, 1) that depend on the five coordinates alone (SplitMix64, Steele, Lea & Flood 2014)."""
    state: NDArray[np.uint64] = np.asarray(seed & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in (stream, step, prompts, samples):
            state = _mix(np.asarray(part, dtype=np.uint64) + _mix(state))
    numbers: NDArray[np.float64] = ((state >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    return numbers


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = np.asarray(state, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
