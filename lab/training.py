"""How samples become optimizer steps."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lab.algorithm import LEARNING
from lab.records import Record


class Update(Record):
    """How a step's samples become optimizer steps."""

    minibatch_samples: int = Field(ge=1, description="samples (not prompts) of one optimizer step, over all ranks")
    microbatch_tokens: int | None = Field(
        default=None, ge=1, description="padded tokens of one forward and backward pass on one rank"
    )
    microbatch_samples: int | None = Field(
        default=None,
        ge=1,
        description="samples of one forward and backward pass on one rank; with or instead of tokens",
    )
    pack: Literal["padded", "packed", "shared"] = Field(
        default="padded",
        description="padded: samples of a pass are filled up to its longest; packed: they are laid end to end; shared: "
        "and the samples of a prompt share its tokens",
    )
    recompute: Literal["none", "full"] = Field(default="none", description="activation checkpointing of every layer")

    @property
    def products(self) -> float:
        """Products of a backward pass over those of its forward pass, all weights trained; one part is the forward pass
        again where activations are recomputed (Narayanan et al. 2021)."""
        return 3.0 if self.recompute == "full" else 2.0

    @model_validator(mode="after")
    def _limited(self) -> Update:
        if self.microbatch_tokens is None and self.microbatch_samples is None:
            raise ValueError("`microbatch_tokens` or `microbatch_samples` is needed: what one pass may hold")
        return self


class Optimizer(Record):
    """AdamW."""

    lr: float = Field(default=1e-6, gt=0, json_schema_extra=LEARNING)
    critic_lr: float | None = Field(default=None, gt=0, description="null: as lr", json_schema_extra=LEARNING)
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="of the rate after the warm-up: constant, or falling to 0 at the end of the run",
        json_schema_extra=LEARNING,
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        le=10**6,
        description="steps over which the rate rises to its full size",
        json_schema_extra=LEARNING,
    )
    grad_clip: float = Field(default=1.0, gt=0, description="largest gradient norm", json_schema_extra=LEARNING)
