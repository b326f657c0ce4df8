"""What is asked of the system: prompts, samples and their lengths, drawn from the seed alone.

A length depends only on (seed, step, prompt, sample): both worlds draw the same ones, and changing the number of
prompts or samples leaves the others as they were.
"""

from __future__ import annotations

import itertools
import math
from functools import cached_property, lru_cache
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from lab.errors import WrongValue
from lab.records import Record

_Z95 = 1.6448536269514722  # 95th percentile of the standard normal distribution
_ORDER_STREAM = 38


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


def _listed(value: object) -> object:
    """`12 15x3` is (12, 15, 15, 15)."""
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    try:
        parts = [part.partition("x") for part in value.split()]
        return tuple(int(length) for length, _, times in parts for _ in range(int(times or 1)))
    except ValueError:
        raise ValueError("not a list of lengths like `12 15x3 9`") from None


def _shortly(values: tuple[int, ...]) -> str:
    """As text, so that many rows stay a small file."""
    runs = [(length, len(list(run))) for length, run in itertools.groupby(values)]
    return " ".join(f"{length}x{times}" if times > 1 else str(length) for length, times in runs)


_Values = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    BeforeValidator(_listed, json_schema_input_type=str | tuple[int, ...]),
    PlainSerializer(_shortly, return_type=str),
]


class Listed(Record):
    """The lengths of a data set's rows in the order of its file, which both worlds read by `lab.workload.order`.

    The lab writes this where `data` names a file. `12 15x3` stands for 12, 15, 15, 15.
    """

    dist: Literal["listed"]
    values: _Values = Field(min_length=1, description="tokens, row by row; of pairs chosen and rejected in turn")
    held_out: _Values = Field(default=(), description="the same of the rows that only evaluations read")

    @cached_property
    def max(self) -> int:
        return max(max(self.values), max(self.held_out, default=0))

    @cached_property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    def draw(self, uniform: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.int64]:
        """With equal chance, for what is not read row by row."""
        held = np.asarray(self.held_out or self.values, dtype=np.int64)
        lengths: NDArray[np.int64] = held[np.minimum((uniform * len(held)).astype(np.int64), len(held) - 1)]
        return lengths

    def of(self, rows: NDArray[np.int64], each: int = 1) -> NDArray[np.int64]:
        """Tokens of these rows, which have `each` lengths: shape [rows, each]."""
        lengths: NDArray[np.int64] = self._array.reshape(-1, each)[rows]
        return lengths

    def unseen(self, number: int, each: int = 1) -> NDArray[np.int64]:
        """Tokens of the first held-out rows, shape [number, each]; from the first again where there are too few."""
        rows: NDArray[np.int64] = np.asarray(self.held_out, dtype=np.int64).reshape(-1, each)
        lengths: NDArray[np.int64] = rows[np.arange(number) % len(rows)]
        return lengths

    @cached_property
    def _array(self) -> NDArray[np.int64]:
        return np.asarray(self.values, dtype=np.int64)


def order(seed: int, step: int, per_step: int, num_rows: int, number: int | None = None) -> NDArray[np.int64]:
    """Which rows of a data set the prompts of a step are, shape [number]; per_step where None.

    Epoch after epoch, each in an order of its own that the seed draws; a step may end one and begin the next.
    """
    places = step * per_step + np.arange(number or per_step)
    epochs, within = places // num_rows, places % num_rows
    rows = np.empty(len(places), dtype=np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        rows[chosen] = _shuffled(seed, int(epoch), num_rows)[within[chosen]]
    return rows


@lru_cache(maxsize=4)
def _shuffled(seed: int, epoch: int, num_rows: int) -> NDArray[np.int64]:
    return np.argsort(uniform(seed, _ORDER_STREAM, epoch, np.arange(num_rows), 0), kind="stable")


Lengths = Annotated[Fixed | Lognormal | Empirical | Listed, Field(discriminator="dist")]


class Workload(Record):
    """The work of one step. In the frameworks `prompts_per_step` is train_batch_size (verl), rollout_batch_size (OpenRLHF)."""

    prompts_per_step: int = Field(ge=1, le=10**6, description="prompts (not samples) in one step")
    samples_per_prompt: int = Field(
        default=1, ge=1, le=10**4, description="responses to each prompt: n, group size, num_generations"
    )
    prompt_tokens: Lengths
    response_tokens: Lengths
    end: Literal["drawn", "eos"] = Field(
        default="drawn",
        description="drawn: responses are exactly as long as response_tokens says, in both worlds; eos: in execution the "
        "model ends them, at response_tokens.max at the latest, and a simulation takes the drawn lengths for its "
        "length model: name lengths of an earlier run (dist: empirical) to predict one",
        json_schema_extra={"effect": "learning"},
    )

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def max_sequence_tokens(self) -> int:
        return self.prompt_tokens.max + self.response_tokens.max

    def prompt_lengths(self, seed: int, step: int, num_prompts: int | None = None) -> NDArray[np.int64]:
        """Tokens of each prompt of a step, shape [num_prompts]; prompts_per_step where None."""
        prompts = np.arange(num_prompts or self.prompts_per_step)
        if isinstance(listed := self.prompt_tokens, Listed):
            return listed.of(order(seed, step, self.prompts_per_step, len(listed.values), num_prompts))[:, 0]
        return self.prompt_tokens.draw(uniform(seed, 1, step, prompts, 0), uniform(seed, 2, step, prompts, 0))

    def response_lengths(
        self, seed: int, step: int, num_prompts: int | None = None, num_samples: int | None = None
    ) -> NDArray[np.int64]:
        """Tokens of each response of a step, shape [num_prompts, num_samples].

        Where None: prompts_per_step, samples_per_prompt.
        """
        prompts = np.arange(num_prompts or self.prompts_per_step)[:, None]
        samples = np.arange(num_samples or self.samples_per_prompt)[None, :]
        if isinstance(listed := self.response_tokens, Listed):
            each = self.samples_per_prompt
            return listed.of(order(seed, step, self.prompts_per_step, len(listed.values) // each, num_prompts), each)
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
