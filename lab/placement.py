"""Who runs where: pools of devices, and the work placed on them."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from lab.records import Record

Role = Literal["actor", "critic", "reference", "reward"]
Work = Literal["generate", "train", "score"]


class Sharing(Record):
    """How a pool's devices are shared by the workers placed on it."""

    how: Literal["exclusive", "resident"] = Field(
        default="exclusive",
        description="exclusive: every worker has devices of its own; resident: all are loaded and contend for the devices",
    )


class Generate(Record):
    """Rollout engines on one pool."""

    pool: str
    engines: int = Field(
        default=1, ge=1, le=10**4, description="replicas of the engine, each with tensor_parallel devices"
    )
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads of each worker; no meaning on a GPU")


class Train(Record):
    """A data- and tensor-parallel trainer on one pool."""

    pool: str
    data_parallel: int = Field(default=1, ge=1, le=10**4)
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    zero_stage: Literal[0, 1, 2, 3] = Field(default=0, description="DeepSpeed ZeRO stage")
    offload: Literal["none", "optimizer"] = Field(
        default="none", description="optimizer: states and update in host memory"
    )
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads of each rank; no meaning on a GPU")


class Score(Record):
    """A frozen model that scores samples in forward passes."""

    pool: str
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    max_batch_samples: int = Field(default=32, ge=1, description="samples of one forward pass")
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads of the worker; no meaning on a GPU")


class RewardScore(Score):
    """The reward: a model, or a function of prompt and response."""

    kind: Literal["model", "function"] = "model"
    function: str | None = Field(
        default=None,
        description="`task`: the reward of the built-in task; or `module:name` of a function (prompt, response) -> float",
        json_schema_extra={"effect": "learning"},
    )

    @model_validator(mode="after")
    def _function_named(self) -> RewardScore:
        if (self.kind == "function") != (self.function is not None):
            raise ValueError("`function` is needed with `kind: function`, and only there")
        if self.function not in (None, "task") and not re.fullmatch(r"[\w.]+:\w+", str(self.function)):
            raise ValueError(f"{self.function!r} is neither `task` nor of the form module:name")
        return self


class Place(Record):
    """Placements by (role, work), written `role.work`. Work that is not placed runs where that model trains."""

    actor_generate: tuple[Generate, ...] = Field(alias="actor.generate", min_length=1, description="engines may differ")
    actor_train: Train = Field(alias="actor.train")
    critic_train: Train | None = Field(default=None, alias="critic.train")
    reference_score: Score | None = Field(default=None, alias="reference.score")
    reward_score: RewardScore = Field(alias="reward.score")


class Worker(Record):
    """One process (or group of tensor-parallel ranks) that does one kind of work on its own devices.

    `name` is `role.work[i]`; lanes of a Gantt chart and resources of spans are named after it.
    """

    name: str
    role: Role
    work: Work
    pool: str
    devices: tuple[str, ...]
    threads: int = 1


def ranges(devices: tuple[str, ...], count: int, width: int) -> list[tuple[str, ...]]:
    """`count` groups of `width` devices each, wrapping around where a resident pool has fewer."""
    return [tuple(devices[(i * width + j) % len(devices)] for j in range(width)) for i in range(count)]
