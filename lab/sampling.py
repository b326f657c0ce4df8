"""How tokens are drawn, how many answers are tried, and how both change the length of responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from lab.algorithm import LEARNING
from lab.policies.sampling import EntropyBand, Slopes, Temperature
from lab.records import Record

Heat = Annotated[float, Field(gt=0, le=100, description="divides the logits")]


class Moving(Record):
    """A temperature that moves from the first step to the last."""

    start: Heat
    end: Heat
    schedule: Literal["linear", "cosine"] = "linear"


def _form(value: Any) -> str:
    return "moving" if isinstance(value, dict | Moving) else "fixed"


class Arm(Record):
    """A temperature, and the share of the samples that get it."""

    temperature: Heat
    share: float = Field(gt=0, le=1, description="of the samples of a step; shares add to 1")


class Bandit(Record):
    """The shares of the mixture move, step by step, to the temperatures whose samples were rewarded best."""

    rule: Literal["ucb", "thompson"] = Field(
        default="thompson",
        description="ucb: most samples get the temperature with the highest bound; thompson: each as many as it has "
        "chances to be the best",
        json_schema_extra=LEARNING,
    )
    floor: float = Field(
        default=0.1, ge=0, le=1, description="share that every temperature keeps", json_schema_extra=LEARNING
    )
    discount: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="what a step's rewards count after another step",
        json_schema_extra=LEARNING,
    )


class EntropyWatch(Record):
    """Watches the entropy of what is drawn, as -log p of the drawn tokens, and makes it warmer or cooler."""

    low: float = Field(
        default=0.5, ge=0, le=100, description="nats per token; below it, warmer", json_schema_extra=LEARNING
    )
    high: float | None = Field(
        default=None, gt=0, le=100, description="nats per token; above it, cooler; null: never",
        json_schema_extra=LEARNING,
    )  # fmt: skip
    step: float = Field(
        default=0.05, gt=0, le=10, description="change of every temperature in one step", json_schema_extra=LEARNING
    )
    most: float = Field(
        default=0.5, gt=0, le=10, description="of all changes together, up or down", json_schema_extra=LEARNING
    )

    @property
    def band(self) -> EntropyBand:
        """The rule. A band without an upper end never cools."""
        high = float("inf") if self.high is None else self.high
        return EntropyBand(low=self.low, high=high, change=self.step, most=self.most)


class Point(Record):
    """A measured point: responses at this temperature are so many times as long as at temperature 1."""

    temperature: Heat
    factor: float = Field(gt=0, le=1000)


class LengthModel(Record):
    """How sampling changes the length of responses, stated or measured; without it, it changes none.

    Lengths are multiplied with exp(slope × (value - 1)) of each setting: at a value of 1 they are the workload's.
    """

    temperature: float = Field(default=0.0, ge=-10, le=10, description="change of ln(length) per unit of temperature")
    top_p: float = Field(default=0.0, ge=-10, le=10, description="change of ln(length) per unit of top_p")
    repetition_penalty: float = Field(
        default=0.0, ge=-10, le=10, description="change of ln(length) per unit of the repetition penalty"
    )
    measured: tuple[Point, ...] = Field(
        default=(), description="instead of the slope for temperature; linear between points, constant beyond them"
    )

    @model_validator(mode="after")
    def _one_model(self) -> LengthModel:
        heats = [point.temperature for point in self.measured]
        if heats != sorted(set(heats)):
            raise ValueError("temperatures of `measured` must rise from point to point")
        if heats and self.temperature:
            raise ValueError("`temperature` and `measured` say the same twice; remove one")
        return self

    @property
    def changes(self) -> bool:
        """Whether it changes any length at any setting."""
        return bool(self.temperature or self.top_p or self.repetition_penalty or self.measured)

    @property
    def by_temperature(self) -> bool:
        """Whether lengths depend on the temperature."""
        return bool(self.temperature or self.measured)

    @property
    def slopes(self) -> Slopes:
        heats = tuple(point.temperature for point in self.measured)
        return Slopes(
            temperature=self.temperature, top_p=self.top_p, repetition_penalty=self.repetition_penalty,
            temperatures=heats, factors=tuple(point.factor for point in self.measured),
        )  # fmt: skip


class Sampling(Record):
    """How tokens are drawn, and how many answers are tried for one that is trained on.

    Of itself sampling changes no work but by the number of answers; `lengths` says how it changes their length.
    """

    temperature: Annotated[Annotated[Heat, Tag("fixed")] | Annotated[Moving, Tag("moving")], Discriminator(_form)] = (
        Field(default=1.0, description="a number, or {start, end, schedule}: it moves")
    )
    mixture: tuple[Arm, ...] = Field(
        default=(), description="temperatures that the samples of a step share, instead of one; empty: none"
    )
    bandit: Bandit | None = Field(
        default=None, description="moves the shares of `mixture` by the rewards of earlier steps; null: they stay"
    )
    entropy: EntropyWatch | None = Field(
        default=None, description="changes temperatures by the entropy of earlier steps; null: they stay"
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="share of the probability that is drawn from")
    repetition_penalty: float = Field(default=1.0, gt=0, le=10, description="divides logits of tokens that came before")
    best_of: int = Field(
        default=1, ge=1, le=1000, description="answers generated and rewarded for each one that is trained on"
    )
    beams: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="beam search: so many sequences of a prompt run to the longest of them, the best samples_per_prompt "
        "are kept; they share the blocks of the prompt, not of what is generated",
    )
    lengths: LengthModel = Field(default=LengthModel(), description="how sampling changes the length of responses")

    @model_validator(mode="after")
    def _one_way(self) -> Sampling:
        if self.mixture and self.temperature != 1.0:
            raise ValueError("`temperature` and `mixture` exclude each other; remove one")
        if self.mixture and abs(sum(arm.share for arm in self.mixture) - 1) > 1e-6:
            raise ValueError("the shares of `mixture` do not add to 1")
        if self.bandit and len(self.mixture) < 2:
            raise ValueError("`bandit` chooses among the temperatures of `mixture`; name two or more there")
        if self.bandit and self.bandit.floor * len(self.mixture) > 1:
            raise ValueError("every temperature keeps `floor` of `bandit`: too much for so many in `mixture`")
        if self.entropy and self.entropy.high is not None and self.entropy.high <= self.entropy.low:
            raise ValueError("`high` of `entropy` is not above its `low`")
        if self.beams > 1 and (self.mixture or self.entropy):
            raise ValueError("`beams` are not drawn: `mixture` and `entropy` have no meaning with them")
        if self.lengths.by_temperature and (self.bandit or self.entropy):
            raise ValueError(
                "`lengths` go by temperatures that `bandit` and `entropy` choose during the run; remove one"
            )
        if self.best_of > 1 and self.beams > 1:
            raise ValueError("`best_of` and `beams` exclude each other: beam search finds the same answer every time")
        return self

    @property
    def plain(self) -> bool:
        """Whether tokens are drawn from the whole distribution at their temperature, as log-probs are read elsewhere."""
        return self.top_p == 1.0 and self.repetition_penalty == 1.0

    @property
    def decides(self) -> bool:
        """Whether temperatures depend on what earlier steps brought."""
        return self.bandit is not None or self.entropy is not None

    @property
    def fixed(self) -> float:
        """The one temperature of all steps. Raises ValueError where it moves or there are several."""
        if self.mixture or isinstance(self.temperature, Moving):
            raise ValueError("the temperature is not one number")
        return self.temperature

    @property
    def rule(self) -> Temperature:
        """Where the temperature stands at each step."""
        said = self.temperature
        if isinstance(said, Moving):
            return Temperature(start=said.start, end=said.end, schedule=said.schedule)
        return Temperature(start=said, end=said)
