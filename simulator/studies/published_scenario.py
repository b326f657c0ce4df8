"""A published run as a Scenario: its layout from the source, everything else from the stated tables."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from lab.library import device as library_device
from lab.library import model as library_model
from lab.model import DTYPE_BYTES, ModelSpec
from lab.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a source states of a run, and what is assumed beside it."""

    arch: str | dict[str, Any]
    """an entry of the model library, or dimensions"""
    device: str
    machine: int
    """devices of one machine, which `fabric` joins through `nics` ports"""
    fabric: str
    nics: int
    engines: int
    """replicas of tensor × pipeline devices; 0: the trainer's ranks generate, without an engine"""
    tensor: int = 1
    pipeline: int = 1
    engine_dtype: str | None = None
    eager: bool = False
    """the engine launches every kernel from the host, without CUDA graphs"""
    trainer: dict[str, Any]
    """`lab.placement.Train` without its pool"""
    critic_trainer: dict[str, Any] | None = None
    """the critic's, where there is one"""
    critic_apart: bool = False
    """the critic has devices of its own, and is trained beside the actor"""
    prompts: int
    samples: int
    prompt: int
    """tokens of each prompt"""
    response: float
    """mean tokens of a response, at most `longest`"""
    longest: int
    spread: float
    """standard deviation of the logarithm of the response lengths, before they are cut; 0: all are as long as the mean"""
    fraction: float
    """share of device memory that an engine may use"""
    max_num_seqs: int = 256
    scored: int = 1
    """forward passes over all samples on the actor's devices, beside those of the update"""
    scorers: int = 0
    """devices on which a model of this size scores all samples meanwhile (reference or reward); 0: none"""
    pass_tokens: int
    """of one forward and backward pass of one rank; `score_tokens`: of one forward pass that only scores"""
    score_tokens: int
    critic_tokens: int = 0
    minibatch: int
    recompute: bool
    overlapped: bool = False
    """rollout of the next step runs beside everything else of this one"""
    generate_batch: int = 0
    """samples at once on each rank, where the trainer's ranks generate"""
    assumed: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Devices of the trainer."""
        return spread_over(self.trainer)

    @property
    def serving(self) -> int:
        """Devices of the engines; where there are none, of one that stands for them."""
        return max(self.engines, 1) * self.tensor * self.pipeline


def spread_over(trainer: dict[str, Any]) -> int:
    """Devices of a trainer."""
    parts = ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel")
    return math.prod(int(trainer.get(part, 1)) for part in parts)


def responses(run: Run) -> dict[str, Any]:
    """The response lengths as `lab.workload` has them."""
    if not run.spread or run.response >= run.longest:
        return {"dist": "fixed", "value": round(min(run.response, run.longest))}
    return lognormal(run.response, run.spread, run.longest)


QUANTILES = 512


def lognormal(mean: float, spread: float, longest: int) -> dict[str, Any]:
    """A lognormal whose mean after being cut at `longest` is `mean`; its parameters as `lab.workload.Lognormal` has them.

    E[min(X, c)] = m·Φ((ln c − μ − s²)/s) + c·(1 − Φ((ln c − μ)/s)), with m = exp(μ + s²/2); solved by bisection.
    Raises ValueError where the mean is not below `longest`.
    """
    if not mean < longest:
        raise ValueError(f"a mean of {mean:g} tokens is not below {longest}")
    low, high = math.log(mean) - spread**2 / 2, math.log(longest) + 8 * spread
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _cut_mean(middle, spread, longest) < mean else (low, middle)
    uncut = math.exp(low + spread**2 / 2)
    if uncut > longest:  # a scenario's mean is not above its maximum: told by equally likely lengths instead
        places = [(i + 0.5) / QUANTILES for i in range(QUANTILES)]
        drawn = [min(max(round(math.exp(low + spread * NormalDist().inv_cdf(p))), 1), longest) for p in places]
        return {"dist": "empirical", "values": drawn}
    return {"dist": "lognormal", "mean": uncut, "p95": math.exp(low + 1.6448536269514722 * spread), "max": longest}


def _cut_mean(mu: float, s: float, longest: int) -> float:
    below = _normal((math.log(longest) - mu - s**2) / s)
    return math.exp(mu + s**2 / 2) * below + longest * (1 - _normal((math.log(longest) - mu) / s))


def _normal(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def serving(run: Run) -> Scenario:
    """One rollout of the run on all of its engines; a trainer of one device stands beside them, to send weights."""
    nodes = [_node("serve", run, run.serving), _node("train", run, 1), _node("spare", run, 1)]
    place = {
        "actor.generate": [
            {"pool": "serve", "engines": max(run.engines, 1), "tensor_parallel": run.tensor, "pipeline_parallel": run.pipeline}
            | ({"dtype": run.engine_dtype} if run.engine_dtype else {})
        ],
        "actor.train": {"pool": "train"},
    }  # fmt: skip
    update = {"minibatch_samples": run.prompts * run.samples, "microbatch_tokens": 1 << 40}
    changes = {"rollout": {"max_num_seqs": run.max_num_seqs, "kv_bytes": kv_bytes(run)}, "update": update}
    return _scenario(run, run.arch, nodes, place, changes)


def training(run: Run, role: str = "actor") -> Scenario:
    """One update of the run on its trainer; its engines stand beside it.

    All samples are as long as the mean, which is as near to packed ones as equal rows come. A pipeline is paced by its
    fullest stage: where stages differ by a layer, all get as many as that one.
    """
    own = run.critic_trainer if role == "critic" and run.critic_trainer else run.trainer
    nodes = [_node("train", run, spread_over(own)), _node("serve", run, run.serving), _node("spare", run, 1)]
    engine = {"pool": "serve", "engines": max(run.engines, 1), "tensor_parallel": run.tensor, "pipeline_parallel": run.pipeline,
              "dtype": "fp8" if "fp8" in library_device(run.device).flops else None}  # fmt: skip
    place: dict[str, Any] = {"actor.generate": [engine], "actor.train": {"pool": "train", **own}}
    if role == "critic":
        place |= {"actor.train": {"pool": "spare"}, "critic.train": {"pool": "train", **own}}
    run = replace(run, response=round(run.response), spread=0.0)
    tokens = run.critic_tokens if role == "critic" else run.pass_tokens
    update = {
        "minibatch_samples": run.minibatch, "microbatch_tokens": tokens,
        "recompute": "full" if run.recompute else "none",
    }  # fmt: skip
    return _scenario(run, _even(run), nodes, place, {"rollout": {"kv_bytes": _room(run)}, "update": update}, role)


def _scenario(
    run: Run,
    arch: Any,
    nodes: list[dict[str, Any]],
    place: dict[str, Any],
    changes: dict[str, Any],
    role: str = "actor",
) -> Scenario:
    critic = role == "critic" or run.samples == 1  # without one there would be nothing to compare a lone sample with
    spare: dict[str, Any] = {"reward.score": {"pool": "serve", "kind": "function", "function": "task"}}
    if critic:
        spare["critic.train"] = {"pool": "spare"}
    record: dict[str, Any] = {
        "name": "published",
        "cluster": {"sites": [{"nodes": nodes, "fabric": {"link": run.fabric}}]},
        "models": {"actor": {"arch": arch}} | ({"critic": {"arch": arch}} if critic else {}),
        "algorithm": {"name": "ppo" if critic else "grpo", "kl_coef": 0},
        "pools": {node["name"]: node["name"] for node in nodes},
        "sharing": {node["name"]: {"how": "resident"} for node in nodes},
        "place": spare | place,
        "workload": {
            "prompts_per_step": run.prompts, "samples_per_prompt": run.samples,
            "prompt_tokens": {"dist": "fixed", "value": run.prompt},
            "response_tokens": responses(run),
        },
        "num_steps": 1,
    }  # fmt: skip
    return Scenario.model_validate_json(json.dumps(record | changes))


def _node(name: str, run: Run, width: int) -> dict[str, Any]:
    """Machines with so many devices in all."""
    link, count = library_device(run.device).default_link, -(-width // run.machine)
    return {"name": name, "count": count, "device": run.device, "devices": min(width, run.machine), "intra": link,
            "nics": run.nics}  # fmt: skip


def _room(run: Run) -> str:
    """KV cache for all samples at once, so that the engines beside a trainer need little simulating."""
    tokens = run.prompts * run.samples * (run.prompt + run.longest + 16) // max(run.engines, 1) + 4096
    return f"{spec_of(run).kv_bytes_per_token('bfloat16') * tokens * run.tensor} B"


def _even(run: Run) -> Any:
    """The architecture, with as many layers as its fullest pipeline stage makes of all stages."""
    stages, spec = int(run.trainer.get("pipeline_parallel", 1)), spec_of(run)
    if spec.layers % stages == 0:
        return run.arch
    layers = -(-spec.layers // stages) * stages
    return spec.model_dump(mode="json", exclude_none=True) | {"layers": layers}


def scenario_lengths(scenario: Scenario) -> list[int]:
    """Tokens of every sample of the one step, prompt and response."""
    seed, work = scenario.seed, scenario.workload
    lengths = work.prompt_lengths(seed, 0)[:, None] + work.response_lengths(seed, 0)
    return [int(n) for n in lengths.ravel()]


def kv_bytes(run: Run) -> str:
    """What `fraction` of an engine's devices leaves beside its weights, as the engine finds it when the trainer sleeps."""
    spec = spec_of(run)
    device = library_device(run.device)
    memory = device.usable_bytes or device.memory_bytes
    weights = spec.parameters * DTYPE_BYTES[run.engine_dtype or "bfloat16"]
    return f"{int(run.fraction * memory * run.tensor * run.pipeline - weights)} B"


def spec_of(run: Run) -> ModelSpec:
    """The architecture."""
    return library_model(run.arch) if isinstance(run.arch, str) else ModelSpec.model_validate(run.arch)
