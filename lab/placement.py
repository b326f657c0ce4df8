"""Who runs where: pools of devices, and the work placed on them."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from lab.errors import WrongValue
from lab.model import Dtype
from lab.records import Record
from lab.services import REWARDS, RemoteService, ScoreCache
from lab.units import Seconds

Role = Literal["actor", "critic", "reference", "reward"]
Work = Literal["generate", "train", "score"]
BYTE_WIDE = ("fp8", "int8")
"""dtypes of weights; what is computed with them, and kept of it, has 16 bits"""
KvDtype = Literal["float32", "bfloat16", "float16", "fp8"]


Placed = Literal[
    "actor.generate", "actor.train", "critic.train", "reward.train", "reference.score", "reward.score"
]  # fmt: skip
"""a role and its work, as a placement is written"""


Backend = Literal["vllm", "transformers", "trtllm"]
"""what an engine is"""


class Sharing(Record):
    """How a pool's devices are shared by the workers placed on it."""

    how: Literal["exclusive", "resident", "time_sliced"] = Field(
        default="exclusive",
        description="exclusive: every worker has devices of its own; resident: all are loaded and contend for the "
        "devices; time_sliced: the works take turns, and each change of what is loaded costs a switch",
    )
    switch: Literal["sleep", "offload", "reload"] | None = Field(
        default=None,
        description="with time_sliced, how a work gives way: sleep: engines move their weights to the host and drop their "
        "cache, the other works stay loaded; offload: trainers and scorers move their states to the host too; reload: "
        "all end, and start again from storage",
    )
    slices: tuple[tuple[Placed, ...], ...] | None = Field(
        default=None,
        description="with time_sliced, which works are loaded together, for example [[actor.generate], [actor.train, "
        "critic.train]]; null: every work takes its turn alone",
    )

    @model_validator(mode="after")
    def _switched(self) -> Sharing:
        sliced = self.how == "time_sliced"
        if sliced != (self.switch is not None):
            raise ValueError("`switch` is needed with `how: time_sliced`, and only there: sleep, offload or reload")
        if self.slices is not None and not sliced:
            raise ValueError("`slices` have a meaning with `how: time_sliced` only")
        named = [work for together in self.slices or () for work in together]
        if len(set(named)) < len(named):
            raise ValueError("a work is in one slice only")
        return self

    def slice_of(self, work: str) -> str:
        """The slice that a work (`actor.train`) is loaded in, named after all its works; empty where none has it."""
        if self.how != "time_sliced":
            return ""
        if self.slices is None:
            return work
        return next((" + ".join(together) for together in self.slices if work in together), "")


class Parallelism(Record):
    """How one worker's work is spread over its devices, which are numbered pipeline, context or data, tensor."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    """copies inside the worker (an engine's attention); the ranks of a trainer are workers of their own"""
    expert: int = 1
    """ranks that share the experts; in training they reach over several workers"""

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data


class Generate(Record):
    """Rollout engines on one pool."""

    pool: str
    engines: int = Field(
        default=1,
        ge=1,
        le=10**4,
        description="replicas, each with tensor_parallel × pipeline_parallel × data_parallel devices",
    )
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    pipeline_parallel: int = Field(
        default=1, ge=1, le=1024, description="stages, each with an equal part of the layers"
    )
    data_parallel: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="inside one engine: attention is copied, sequences and experts are shared out",
    )
    expert_parallel: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="of the tensor_parallel × data_parallel devices that share the experts, over how many whole experts "
        "are spread; 1: every expert is cut into pieces",
    )
    dtype: Dtype | None = Field(default=None, description="of the weights in the engine; null: the model's")
    kv_dtype: KvDtype | None = Field(
        default=None, description="of keys and values (kv_cache_dtype); null: the model's dtype"
    )
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads of each worker; no meaning on a GPU")
    backend: Backend = Field(
        default="vllm",
        description="what generates; transformers: one batch after the other, room for the longest sequence for each, "
        "whatever `rollout` says of batching, kv_layout and prefix_caching; trtllm is simulated, not executed",
    )
    speed: float = Field(
        default=1.0,
        gt=0,
        le=1e6,
        description="of each engine beside the others, as rollout.dispatch reckons with it; it makes none faster",
    )

    @property
    def parallelism(self) -> Parallelism:
        return Parallelism(
            tensor=self.tensor_parallel,
            pipeline=self.pipeline_parallel,
            data=self.data_parallel,
            expert=self.expert_parallel,
        )


def _number(value: object) -> object:
    """`true` is no number, though Python takes it for 1."""
    if isinstance(value, bool):
        raise WrongValue(path=(), problem=f"{str(value).lower()} is no number", remedy="write 0, 1, 2 or 3")
    return value


class Train(Record):
    """A trainer on one pool: data_parallel ranks of tensor × pipeline × context parallel devices each."""

    pool: str
    data_parallel: int = Field(default=1, ge=1, le=10**4)
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    pipeline_parallel: int = Field(
        default=1, ge=1, le=1024, description="stages of equal numbers of layers, one forward and one backward in turn"
    )
    context_parallel: int = Field(default=1, ge=1, le=1024, description="devices that share the tokens of a sequence")
    expert_parallel: int = Field(
        default=1,
        ge=1,
        le=10**4,
        description="of the data_parallel × context_parallel ranks, how many share the experts",
    )
    zero_stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_number)] = Field(
        default=0, description="DeepSpeed ZeRO stage"
    )
    offload: Literal["none", "optimizer"] = Field(
        default="none", description="optimizer: states and update in host memory"
    )
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads of each rank; no meaning on a GPU")

    @property
    def parallelism(self) -> Parallelism:
        """Of one rank."""
        return Parallelism(
            tensor=self.tensor_parallel,
            pipeline=self.pipeline_parallel,
            context=self.context_parallel,
            expert=self.expert_parallel,
        )


class Score(Record):
    """A frozen model that scores samples in forward passes."""

    pool: str
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    dtype: Dtype | None = Field(default=None, description="of weights and computation; null: the model's")
    replicas: int = Field(
        default=1,
        ge=1,
        le=10**4,
        description="copies, each with tensor_parallel devices; they share the samples of a step out, or serve one queue",
    )
    max_batch_samples: int = Field(default=32, ge=1, le=10**9, description="samples of one forward pass")
    max_wait: Seconds = Field(
        default=0.0,
        description="with scoring sample by sample, how long the first sample of a batch that is not full waits for "
        "others; 0: a free worker takes what is there",
    )
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads of the worker; no meaning on a GPU")

    @property
    def parallelism(self) -> Parallelism:
        return Parallelism(tensor=self.tensor_parallel)


class RewardScore(Score):
    """The reward: a model, or a function of prompt and response."""

    kind: Literal["model", "function", "remote"] = Field(
        default="model", description="function: on host threads, of its pool's machine; remote: a service elsewhere"
    )
    function: str | None = Field(
        default=None,
        description="a name of the library (task, length, contains, share, distinct, ended), or `module:name` of a function "
        "(prompt, response) -> number or dict of numbers; with the attribute `batched` it gets lists of all of these",
        json_schema_extra={"effect": "learning"},
    )
    arguments: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="further arguments of the function by name, for example {target: 24}",
        json_schema_extra={"effect": "learning"},
    )
    remote: RemoteService | None = Field(default=None, description="how the service answers; needed with kind: remote")
    shares_trunk: bool = Field(
        default=False,
        description="the reward is a head on the reference's trunk: the reference's passes, on the same devices, are its "
        "own as well",
    )
    cache: ScoreCache | None = Field(default=None, description="scores that are kept; null: all are computed")

    @model_validator(mode="after")
    def _remote_described(self) -> RewardScore:
        if (self.kind == "remote") != (self.remote is not None):
            raise ValueError("`remote` is needed with `kind: remote`, and only there")
        if self.shares_trunk and self.kind != "model":
            raise ValueError("`shares_trunk` is for `kind: model`: a head needs a trunk")
        if self.shares_trunk and self.cache is not None:
            raise ValueError("`cache` saves nothing with `shares_trunk`: the reference's pass is made anyway")
        return self

    @model_validator(mode="after")
    def _function_named(self) -> RewardScore:
        if (self.kind == "function") != (self.function is not None):
            raise ValueError("`function` is needed with `kind: function`, and only there")
        if self.function not in (None, *REWARDS) and not re.fullmatch(r"[\w.]+:\w+", str(self.function)):
            raise ValueError(f"{self.function!r} is none of {', '.join(REWARDS)}, nor of the form module:name")
        if self.arguments and self.function is None:
            raise ValueError("`arguments` are those of a `function`")
        return self


class Place(Record):
    """Placements by (role, work), written `role.work`. Work that is not placed runs where that model trains.

    What the algorithm has no use for may be left out, and is left alone where it stands.
    """

    actor_generate: tuple[Generate, ...] = Field(default=(), alias="actor.generate", description="engines may differ")
    actor_train: Train | None = Field(default=None, alias="actor.train")
    critic_train: Train | None = Field(default=None, alias="critic.train")
    reward_train: Train | None = Field(
        default=None, alias="reward.train", description="of the algorithm reward_model alone"
    )
    reference_score: Score | None = Field(default=None, alias="reference.score")
    reward_score: RewardScore | None = Field(default=None, alias="reward.score")

    @property
    def reward_function(self) -> bool:
        """Whether rewards come from a function or a service elsewhere instead of a model."""
        return self.reward_score is not None and self.reward_score.kind != "model"

    @property
    def reward_head(self) -> bool:
        """Whether the reward is a head on the reference's trunk, computed on the reference's devices."""
        return self.reward_score is not None and self.reward_score.shares_trunk


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
    parallelism: Parallelism = Parallelism()
    dtype: str = "bfloat16"
    """of its weights"""
    kv_dtype: str = "bfloat16"
    """of an engine's keys and values"""
    backend: Backend = "vllm"
    """of an engine"""
    speed: float = 1.0
    """of an engine beside the others, as dispatch reckons with it"""


def ranges(devices: tuple[str, ...], count: int, width: int) -> list[tuple[str, ...]]:
    """`count` groups of `width` devices each, wrapping around where a resident pool has fewer."""
    return [tuple(devices[(i * width + j) % len(devices)] for j in range(width)) for i in range(count)]
