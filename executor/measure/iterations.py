"""Iterations of the rollout engine at the points of a grid; all of this runs in the engine's own process.

Every point names what it repeats, for example `decode 16x64` or `mixed 4x32+8x32`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from executor.inference import Request
from executor.measure.grids import Mixed
from executor.rollout import RolloutWorker
from executor.tokenizer import IDS
from lab.measurement import Measurement
from lab.timeline import Span

DECODES = 5
"""iterations that repeat a point of decoding: the context grows by one token meanwhile"""
WARM = 8
"""tokens of a prompt that goes first: an iteration after other processes ran finds its caches cold, whatever it holds"""

Point = tuple[str, dict[str, float], float]
"""(name, quantities, seconds) of one iteration"""


def rollout(worker: RolloutWorker, step: int, shape: tuple[int, int, int]) -> dict[str, list[Span]]:
    """A whole rollout of (sequences, prompt tokens, longest response) as in a run; its spans."""
    sequences, prompt, longest = shape
    lengths = np.linspace(max(2, longest // 2), longest, sequences).round().astype(int)
    rng = np.random.default_rng(step)  # fresh prompts: nothing is cached
    requests = [
        Request(prompt_index=i, prompt=_prompt(rng, prompt), num_tokens=int(n), seed=i) for i, n in enumerate(lengths)
    ]
    with worker.recorder.stage("rollout", step) as notes:
        worker._run(step, requests, notes)
    return {"spans": worker.recorder.take()}


def decode(worker: RolloutWorker, step: int, sequences: int, context: int) -> list[Point]:
    """The iteration that takes the prompts, and DECODES in which every sequence gets one token."""
    rng = np.random.default_rng(step)
    _drain(worker, "w", [_prompt(rng, WARM)])
    _add(worker, "d", [_prompt(rng, context) for _ in range(sequences)], 1 + DECODES)
    prefill = [(f"prefill {sequences}x{context}", *found) for found in _iterations(worker)]
    return prefill + [
        (f"decode {sequences}x{context}", *found) for _ in range(DECODES) for found in _iterations(worker)
    ]


def mixed(worker: RolloutWorker, step: int, grid: Mixed) -> list[Point]:
    """One iteration for each of the prompts, beside sequences that decode meanwhile."""
    rng = np.random.default_rng(step)
    common = _prompt(rng, max(cached for _, _, cached in grid.prompts))
    _drain(worker, "c", [common + _prompt(rng, WARM)])
    if grid.decoding:
        background = [_prompt(rng, grid.context - 2) for _ in range(grid.decoding)]
        _add(worker, "d", background, 3 + 2 * len(grid.prompts))
        list(_iterations(worker))
    found: list[Point] = []
    for number, (new, tokens, cached) in enumerate(grid.prompts):
        _add(worker, f"p{number}", [common[:cached] + _prompt(rng, tokens - cached) for _ in range(new)], 1)
        name = f"mixed {grid.decoding}x{grid.context}+{new}x{tokens}" + (f" after {cached}" if cached else "")
        found += [(name, *measured) for measured in _iterations(worker)]
        list(_iterations(worker))  # the one after forgets the finished ones
    _drain(worker)
    return found


def _vllm(worker: RolloutWorker) -> Any:
    """The backend, whose engine is driven here step by step."""
    return worker.backend


def _iterations(worker: RolloutWorker) -> Iterator[tuple[dict[str, float], float]]:
    """One call of the engine: quantities and seconds of what it did."""
    if not _vllm(worker).engine.has_unfinished_requests():
        return
    start = time.monotonic()
    _vllm(worker).engine.step()
    end = time.monotonic()
    for found in _vllm(worker).scheduler.take():
        if found.tokens:
            yield worker._quantities(found), end - start


def _add(worker: RolloutWorker, name: str, prompts: Sequence[list[int]], num_tokens: int) -> None:
    for i, prompt in enumerate(prompts):
        request = Request(prompt_index=i, prompt=prompt, num_tokens=num_tokens, seed=i)
        parameters = _vllm(worker).parameters(request)
        _vllm(worker).engine.add_request(f"{name}{i}", {"prompt_token_ids": prompt}, parameters)


def _drain(worker: RolloutWorker, name: str = "", prompts: Sequence[list[int]] = ()) -> None:
    """Runs until nothing is left, after adding these prompts for one token each."""
    _add(worker, name, prompts, 1)
    while _vllm(worker).engine.has_unfinished_requests():
        list(_iterations(worker))


def _prompt(rng: Any, tokens: int) -> list[int]:
    found: list[int] = rng.integers(8, len(IDS), max(tokens, 0)).tolist()
    return found


def sleep(worker: RolloutWorker) -> tuple[list[Measurement], list[str]]:
    """Times an engine's sleep and wake, where its platform can sleep; else a note that says so."""
    from vllm.platforms import current_platform

    if not current_platform.is_sleep_mode_available():
        return [], [f"engine_sleep, engine_wake: vLLM cannot sleep on {current_platform.device_name}; not measured"]
    size = worker._spec.weight_bytes(worker.scenario.model("actor").dtype)
    found = []
    for op, call in (("engine_sleep", _vllm(worker).engine.sleep), ("engine_wake", _vllm(worker).engine.wake_up)) * 2:
        start = time.monotonic()
        call()
        quantities = {"calls": 1.0, "bytes": size}
        found.append(Measurement(op=op, quantities=quantities, seconds=time.monotonic() - start, source="sweep"))
    return found, []
