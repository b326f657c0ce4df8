"""Scenario: a complete, immutable statement of one experiment."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from lab.algorithm import LEARNING, Algorithm
from lab.cluster import Cluster, ClusterChoice, local_cluster
from lab.data import Data
from lab.drawing import tried
from lab.errors import WrongValue
from lab.evaluation import Evaluate
from lab.experience import Experience
from lab.faults import Checkpoint, Fault
from lab.hf_config import names_config, quantized
from lab.hf_config import read as read_config
from lab.library import Device, closest, device
from lab.library import model as library_model
from lab.library import models as library_models
from lab.lora import Lora
from lab.model import Dtype, ModelSpec
from lab.placement import BYTE_WIDE, Generate, Place, RewardScore, Role, Score, Sharing, Train, Work, Worker, ranges
from lab.publication import WeightSync
from lab.records import Record
from lab.rollout import Rollout
from lab.sampling import Sampling
from lab.scaling import Scale, Scaled
from lab.schedule import Buffer, Schedule
from lab.training import Optimizer, Update
from lab.workload import Workload


def _form(value: Any) -> str:
    return "named" if isinstance(value, str) else "described"


Arch = Annotated[Annotated[str, Tag("named")] | Annotated[ModelSpec, Tag("described")], Discriminator(_form)]


def _config_file(name: str, info: ValidationInfo) -> Path:
    """The file or folder that `arch` names. Raises WrongValue with the library's model of that name, if any."""
    places: list[Path] = [(info.context or {}).get("folder", Path()) / name, Path(name)]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        close = [] if name.endswith(".json") else closest(name, library_models())
        meant = f"did you mean `{'` or `'.join(close)}` of the model library?" if close else ""
        problem = "no such file beside the scenario or in the working folder"
        remedy = meant or "name an existing config.json, or a model of the library"
        raise WrongValue(path=(), problem=problem, remedy=remedy)
    return found


class Model(Record):
    """One of the four models: a library entry, the shape of a `config.json`, or like another one."""

    arch: Arch | None = Field(
        default=None,
        description="an entry of the model library, the path of a Hugging Face config.json, or dimensions written out",
    )
    like: str | None = Field(
        default=None, description="another role whose architecture and weights this one starts from"
    )
    dtype: Dtype = Field(default="bfloat16", description="of weights and computation")
    weights: str = Field(
        default="random", description="random (from the seed), or a folder with safetensors", json_schema_extra=LEARNING
    )
    tokenizer: str | None = Field(
        default=None,
        description="a folder with the tokenizer.json that reads files of `data`; null: that of the folder `weights`, or "
        "the built-in characters",
        json_schema_extra=LEARNING,
    )

    @field_validator("arch", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        """A path is replaced by the shape it holds, so that a scenario and its digest do not depend on other files."""
        if not isinstance(value, str):
            if value is not None and not isinstance(value, dict | ModelSpec):
                remedy = "write the name of a model, the path of a config.json, or dimensions (`hidden: …`)"
                raise WrongValue(path=(), problem="neither a name, nor a path, nor dimensions", remedy=remedy)
            return value
        if not names_config(value):
            library_model(value)
            return value
        return read_config(_config_file(value, info))

    @model_validator(mode="before")
    @classmethod
    def _dtype_said(cls, data: Any, info: ValidationInfo) -> Any:
        """Weights that are published in fewer bits are not taken for the default's without a word."""
        arch = data.get("arch") if isinstance(data, dict) and "dtype" not in data else None
        if isinstance(arch, str) and names_config(arch):
            with suppress(ValueError):  # told with its key by the check of `arch`
                if told := quantized(_config_file(arch, info)):
                    raise told
        return data

    @model_validator(mode="after")
    def _one_shape(self) -> Model:
        if (self.arch is None) == (self.like is None):
            raise ValueError("exactly one of `arch` and `like` is needed")
        return self


class TrainedModel(Model):
    """A model that is trained."""

    lora: Lora | None = Field(default=None, description="train low-rank adapters only; null: all weights")


class FrozenModel(Model):
    """A model that only scores."""

    @property
    def lora(self) -> None:
        """It has no adapters: nothing of it is trained."""


class Models(Record):
    """The models by role; roles that the algorithm does not use are not needed."""

    actor: TrainedModel | None = None
    critic: TrainedModel | None = None
    reference: FrozenModel | None = None
    reward: TrainedModel | None = Field(default=None, description="not needed where the reward is a function")


class Scenario(Record):
    """One experiment. Batch sizes say in their names whether they count prompts, samples or tokens."""

    name: str = Field(
        min_length=1,
        max_length=100,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="letters, digits and . _ - only, the first a letter or digit; runs are kept under it",
        json_schema_extra={"effect": "label"},
    )
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    cluster: ClusterChoice = Field(description="`local`: this machine; or sites with nodes, fabric and storage")
    models: Models
    algorithm: Algorithm
    pools: dict[str, str] = Field(min_length=1, description="name -> devices, for example train[0:6]")
    sharing: dict[str, Sharing] = Field(default_factory=dict, description="by pool; exclusive where not named")
    place: Place
    data: Data = Data()
    workload: Workload
    rollout: Rollout = Rollout()
    sampling: Sampling = Sampling()
    update: Update
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    buffer: Buffer = Buffer()
    weight_sync: WeightSync = WeightSync()
    experience: Experience | None = Field(default=None, description="null: samples go with the calls, at no cost")
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    scaling: dict[Scaled, Scale] = Field(
        default_factory=dict, description="by work; all that are placed where not named"
    )
    faults: tuple[Fault, ...] = Field(default=(), description="what fails, at a time or by chance")
    num_steps: int = Field(ge=1, le=10**6)

    @model_validator(mode="after")
    def _coherent(self) -> Scenario:
        from lab.coherence import check  # the rules that span several keys, kept apart from the shape

        check(self)
        return self

    @cached_property
    def hardware(self) -> Cluster:
        """The cluster, with `local` replaced by this machine."""
        return local_cluster() if self.cluster == "local" else self.cluster

    @property
    def digest(self) -> str:
        """SHA-256 over the canonical JSON of every key, defaults included; 16 hex digits. Of a file of data its content
        counts, not where it lies."""
        said = self.model_dump(mode="json", by_alias=True) | {"data": self.data.known()}
        text = json.dumps(said, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def replace(self, changes: dict[str, Any]) -> Scenario:
        """A copy with top-level keys replaced, checked like a file. Raises pydantic's ValidationError."""
        data = self.model_dump(mode="json", by_alias=True) | changes
        return Scenario.model_validate_json(json.dumps(data))

    def spec(self, role: str) -> ModelSpec:
        """The architecture of a role's model, `like` followed."""
        if role not in self._specs:
            chosen = self.model(role)
            named = library_model(chosen.arch) if isinstance(chosen.arch, str) else chosen.arch
            self._specs[role] = named or self.spec(str(chosen.like))
        return self._specs[role]

    @cached_property
    def _specs(self) -> dict[str, ModelSpec]:
        """Architectures by role, once they were asked for."""
        return {}

    def model(self, role: str) -> TrainedModel | FrozenModel:
        chosen: TrainedModel | FrozenModel | None = getattr(self.models, role, None)
        if chosen is None:
            raise ValueError(f"the scenario has no model for the role {role!r}")
        return chosen

    @cached_property
    def devices(self) -> dict[str, tuple[str, ...]]:
        """Device ids of each pool."""
        return {pool: self.hardware.select(expression) for pool, expression in self.pools.items()}

    @cached_property
    def workers(self) -> dict[str, Worker]:
        """Every worker of the scenario by name, in the order of the Gantt's lanes."""
        found: list[Worker] = []
        taken: dict[tuple[str, str], int] = {}

        def add(role: Role, work: Work, part: Generate | Train | Score, count: int) -> None:
            together = self._together(part.pool, f"{role}.{work}")
            devices, start = self.devices[part.pool], taken.get(together, 0)
            first = sum(worker.role == role and worker.work == work for worker in found)
            turned = devices[start % len(devices) :] + devices[: start % len(devices)]
            for i, group in enumerate(ranges(turned, count, part.parallelism.devices), start=first):
                found.append(self._worker(f"{role}.{work}[{i}]", role, work, part, group))
            if self.claims_devices(part):
                taken[together] = start + count * part.parallelism.devices

        for part in self.place.actor_generate if self.algorithm.rolls_out else ():
            add("actor", "generate", part, part.engines)
        for role, score in self.scored.items():
            if role == "reward" and self.place.reward_head:
                trunks = [worker for worker in found if worker.role == "reference"]
                heads = [(f"reward.score[{i}]", trunk.devices) for i, trunk in enumerate(trunks)]
                found += [self._worker(name, role, "score", score, devices) for name, devices in heads]
            else:
                add(role, "score", score, score.replicas)
        for role, train in self.trained.items():
            add(role, "train", train, train.data_parallel)
        return {worker.name: worker for worker in found}

    def _together(self, pool: str, work: str) -> tuple[str, str]:
        """Who is dealt the devices of a pool one after the other: all its workers, or those of one time slice."""
        return pool, self.sharing[pool].slice_of(work) if pool in self.sharing else ""

    @property
    def scored(self) -> dict[Role, Score]:
        """By role: how the frozen models (or the function) are placed whose scores the algorithm needs."""
        place, algorithm = self.place, self.algorithm
        parts: dict[Role, Score | None] = {"reference": place.reference_score, "reward": place.reward_score}
        needed = [role for role in algorithm.roles if role not in algorithm.trains]
        return {role: part for role, part in parts.items() if role in needed and part is not None}

    @property
    def trained(self) -> dict[Role, Train]:
        """By role: how the models are placed that the algorithm trains."""
        place = self.place
        parts: dict[Role, Train | None] = {
            "actor": place.actor_train, "critic": place.critic_train, "reward": place.reward_train,
        }  # fmt: skip
        return {role: part for role, part in parts.items() if role in self.algorithm.trains and part is not None}

    def claims_devices(self, part: Generate | Train | Score) -> bool:
        """Whether work needs devices of its pool: not a head on another model, nor a reward function among GPUs, which
        computes on the host, nor calls of a service elsewhere."""
        if not isinstance(part, RewardScore) or part.kind == "model":
            return not (isinstance(part, RewardScore) and part.shares_trunk)
        return part.kind == "function" and self.device_of(part.pool).kind != "gpu"

    def on_host(self, worker: Worker) -> bool:
        """Whether a worker computes on the host of its pool's GPUs: a reward function, or calls of a service elsewhere."""
        if worker.work != "score" or worker.role != "reward" or not self.place.reward_function:
            return False
        return self.device_of(worker.pool).kind == "gpu"

    def device_of(self, pool: str) -> Device:
        """What the devices of a pool are; a pool lies on one node."""
        return device(self.hardware.node_of(self.devices[pool][0]).device)

    def _worker(
        self, name: str, role: Role, work: Work, part: Generate | Train | Score, devices: tuple[str, ...]
    ) -> Worker:
        chosen: Model | None = getattr(self.models, role)
        own = chosen.dtype if chosen is not None else "float32"  # a reward function has no model
        said = part.kv_dtype if isinstance(part, Generate) else None
        kept = said or (own if own not in BYTE_WIDE else self._wide(part.pool))
        dtype = None if isinstance(part, Train) else part.dtype
        speed, backend = (part.speed, part.backend) if isinstance(part, Generate) else (1.0, "vllm")
        return Worker.model_construct(
            name=name, role=role, work=work, pool=part.pool, devices=devices, threads=part.threads,
            parallelism=part.parallelism, dtype=dtype or own, kv_dtype=kept, speed=speed, backend=backend,
        )  # fmt: skip

    def _wide(self, pool: str) -> str:
        """What 8-bit weights are computed with: bfloat16 where the device has it."""
        kept = self.device_of(pool)
        return "float16" if kept.kind == "gpu" and "bfloat16" not in kept.flops else "bfloat16"

    def train(self, role: str) -> Train:
        """How a role is trained. Raises ValueError where it is not."""
        for name, found in self.trained.items():
            if name == role:
                return found
        raise ValueError(f"the role {role!r} is not trained")

    @property
    def num_tried(self) -> int:
        """Responses generated to each prompt: with best_of or beams more than the samples_per_prompt that are kept."""
        return tried(self)

    @property
    def pass_tokens(self) -> int:
        """Tokens, padding included, that one pass may hold: as said, and no more than so many of the longest samples."""
        update, longest = self.update, self.workload.max_sequence_tokens
        limits = [update.microbatch_tokens, update.microbatch_samples and update.microbatch_samples * longest]
        return min(limit for limit in limits if limit)

    def trainable_parameters(self, role: str) -> int:
        """Parameters that an optimizer step changes: all of them, or those of the adapters."""
        spec, lora = self.spec(role), self.model(role).lora
        return spec.parameters if lora is None else lora.parameters(spec)

    def team(self, role: str, work: str) -> tuple[Worker, ...]:
        """The workers of one (role, work), in order of their index."""
        return self._teams.get((role, work), ())

    @cached_property
    def _teams(self) -> dict[tuple[str, str], tuple[Worker, ...]]:
        found: dict[tuple[str, str], list[Worker]] = {}
        for worker in self.workers.values():
            found.setdefault((worker.role, worker.work), []).append(worker)
        return {key: tuple(team) for key, team in found.items()}
