"""The algorithms: their settings, the roles each needs and the stages of one step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.config import JsonDict

from lab.records import Record

LEARNING: JsonDict = {"effect": "learning"}


class PolicyGradient(Record):
    """What PPO and GRPO share."""

    ppo_epochs: int = Field(
        default=1, ge=1, description="passes over the samples of a step (ppo_epochs, num_iterations)"
    )
    kl_coef: float = Field(default=0.05, ge=0, description="weight of the KL to the reference; 0 starts no reference")
    clip: float = Field(
        default=0.2, gt=0, lt=1, description="the ratio is clipped to [1 - clip, 1 + clip]", json_schema_extra=LEARNING
    )

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0


class Grpo(PolicyGradient):
    """Group-relative policy optimisation (Shao et al. 2024): advantages are rewards normalised within a prompt."""

    name: Literal["grpo"]

    @property
    def roles(self) -> tuple[str, ...]:
        return ("actor", "reward", *(["reference"] if self.needs_reference else []))


class Ppo(PolicyGradient):
    """PPO with a critic (Schulman et al. 2017) and generalised advantage estimation (Schulman et al. 2016)."""

    name: Literal["ppo"]
    gamma: float = Field(default=1.0, gt=0, le=1, description="discount", json_schema_extra=LEARNING)
    lam: float = Field(default=0.95, ge=0, le=1, description="lambda of GAE", json_schema_extra=LEARNING)
    value_clip: float = Field(default=0.2, gt=0, description="clip range of the value loss", json_schema_extra=LEARNING)

    @property
    def roles(self) -> tuple[str, ...]:
        return ("actor", "critic", "reward", *(["reference"] if self.needs_reference else []))


Algorithm = Annotated[Grpo | Ppo, Field(discriminator="name")]
