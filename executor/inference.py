"""What an engine is to the rollout worker: requests go in, iterations and ended responses come out. No heavy import."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lab.placement import Worker
from lab.policies.weight_sync import Running
from lab.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class Request:
    """One response to generate."""

    prompt_index: int
    """of the prompt within its step"""
    sample: int = 0
    """among those of its prompt"""
    prompt: list[int]
    num_tokens: int
    """of the response: exactly so many, or at most with `stop`"""
    seed: int
    temperature: float = 1.0
    """divides the logits; 0: the likeliest token every time"""
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop: tuple[int, ...] = ()
    """token ids that end the response, and are its last token; none: it has `num_tokens`"""
    num_candidates: int = 0
    """likeliest next tokens that are wanted beside the one drawn; for searches"""


@dataclass(kw_only=True)
class Iteration:
    """What went into one pass of an engine."""

    sequences: int = 0
    tokens: int = 0
    """scheduled, prefill and decode"""
    prefill_tokens: int = 0
    """of prompts, and of sequences that are computed again after a preemption"""
    recomputed_tokens: int = 0
    token_context: int = 0
    """sum over scheduled tokens of the context each attends to"""
    context_read: int = 0
    """sum over sequences of the context that is read from the KV cache"""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    preempted: int = 0

    @property
    def op(self) -> str:
        return "prefill" if self.prefill_tokens else "decode"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A response that has ended."""

    index: int
    """its request's number, as `submit` was told; with `generate` the place among those given"""
    tokens: list[int]
    logprobs: NDArray[np.float32]
    """of each token under the distribution that it was drawn from: at the temperature, after top_p and penalty"""
    num_cached_tokens: int = 0
    """of the prompt, that were not computed"""
    candidates: tuple[tuple[int, float], ...] = ()
    """with `num_candidates`: ids and log-probs of the likeliest first tokens, best first"""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One call of an engine."""

    start_s: float
    """of the monotonic clock"""
    end_s: float
    iterations: Sequence[Iteration]
    ended: Sequence[Ended]


class InferenceBackend(Protocol):
    """An engine with one network. Draws depend on a request's seed alone, not on what runs beside it."""

    def submit(self, requests: Sequence[Request], ids: Sequence[int]) -> None:
        """Requests join the queue, each under a number that nobody in the engine has."""
        ...

    def advance(self) -> Progress:
        """Calls the engine once, which makes one pass; of an empty one nothing."""
        ...

    def abort(self, ids: Sequence[int]) -> dict[int, int]:
        """These leave, whether they run or wait; the response tokens that each has. Numbers that nobody has are left
        out."""
        ...

    def running(self) -> list[Running]:
        """What runs, with the tokens that it has: what waits and has none is not among it."""
        ...

    @property
    def unfinished(self) -> int:
        """Requests that run or wait."""
        ...

    def hold(self) -> None:
        """Stands still between two passes, so that weights can be loaded; what runs stays as it is."""
        ...

    def go_on(self, forget: bool) -> None:
        """Goes on after `hold`. `forget`: keys and values of all that runs are computed anew by the next pass; else they
        stay, and only those that later prompts would find again are forgotten."""
        ...

    def generate(self, requests: Sequence[Request]) -> Iterator[Progress]:
        """Runs the engine until all requests have ended; one progress for each call of it."""
        self.submit(requests, range(len(requests)))
        while self.unfinished:
            yield self.advance()

    def connect(self, host: str, port: int, rank: int, world_size: int, *, lossy: bool = False) -> None:
        """Meets the sender of weights; blocks until every end has. `rank` of the first of its processes; `lossy`: ends
        may be lost."""
        ...

    def receive_weights(self) -> float:
        """Takes what the sender pushes; the seconds that unpacking it took."""
        ...

    def load_weights(self, items: Iterable[tuple[str, Any]]) -> None:
        """Takes whole tensors by Hugging Face's names, some or all."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forgets what older weights computed; False where something is in use."""
        ...

    def shutdown(self) -> None:
        """Ends the engine and its processes."""
        ...


BACKENDS = {
    "vllm": ("executor.engine", "VllmBackend"),
    "transformers": ("executor.transformers_engine", "TransformersBackend"),
}
"""by name: module and class; importing the module imports the library. What is missing here is refused by name"""


def start(scenario: Scenario, worker: Worker, folder: Path) -> InferenceBackend:
    """The engine that a worker stands for, with the network in `folder`."""
    module, name = BACKENDS[worker.backend]
    kind: Any = getattr(importlib.import_module(module), name)
    found: InferenceBackend = kind(scenario, worker, folder)
    return found
