"""How tokens are drawn, how many answers are tried, and how both change the length of responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from lab.policies.sampling import Slopes, Temperature
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
        if self.best_of > 1 and self.beams > 1:
            raise ValueError("`best_of` and `beams` exclude each other: beam search finds the same answer every time")
        return self

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
