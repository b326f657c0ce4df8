"""An engine on the transformers library alone: one batch after the other, with a KV cache of whole rows.

No vLLM is needed. The next batch begins when the last response of one has ended; a row whose response has ended leaves
the batch. Importing this module imports transformers, which takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from executor.inference import Ended, Iteration, Progress, Request
from executor.transfer import WeightGroup
from lab.placement import Worker
from lab.scenario import Scenario
from lab.workload import uniform

_DRAWS = 20
"""the stream of the random numbers that choose tokens"""


class TransformersBackend:
    """A network behind `InferenceBackend`; token t of a request is chosen by a number that depends on seed and t alone."""

    def __init__(self, scenario: Scenario, worker: Worker, folder: Path) -> None:
        torch.set_num_threads(worker.threads)
        network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._network = network.eval().requires_grad_(False)
        row = scenario.workload.max_sequence_tokens * scenario.spec("actor").kv_bytes_per_token("float32")
        fitting = int(scenario.rollout.kv_bytes // row) if scenario.rollout.kv_bytes else scenario.rollout.max_num_seqs
        self._rows = min(max(fitting, 1), scenario.rollout.max_num_seqs)

    def generate(self, requests: Sequence[Request]) -> Iterator[Progress]:
        """Runs all requests, as many at once as sequences and KV memory allow; one progress for each pass."""
        for first in range(0, len(requests), self._rows):
            indices = range(first, min(first + self._rows, len(requests)))
            yield from self._batch(requests, indices, len(requests) - indices.stop)

    @torch.inference_mode()
    def _batch(self, requests: Sequence[Request], indices: Sequence[int], waiting: int) -> Iterator[Progress]:
        rows = Rows(requests, indices)
        while len(rows):
            start = time.monotonic()
            logits = self._network(**rows.inputs(), use_cache=True, logits_to_keep=1).logits[:, -1]
            done = rows.iteration(waiting, self._rows)
            ended = rows.advance(logits)
            yield Progress(start_s=start, end_s=time.monotonic(), iterations=[done], ended=ended)

    def connect(self, host: str, port: int, rank: int, world_size: int) -> None:
        """Meets the sender of weights."""
        self._group = WeightGroup(host, port, rank, world_size)

    def receive_weights(self) -> None:
        """Takes what the sender broadcasts; adapters come merged into their matrices."""
        own = dict(self._network.named_parameters())
        for name, tensor in self._group.receive():
            own[name].copy_(tensor)

    def reset_prefix_cache(self) -> bool:
        """There is none."""
        return True

    def shutdown(self) -> None:
        """Drops the network."""
        del self._network


class Rows:
    """The requests of a batch that have not ended, padded on the left, and their KV cache."""

    def __init__(self, requests: Sequence[Request], indices: Sequence[int]) -> None:
        self._requests, self._indices = requests, list(indices)
        mine = [requests[i] for i in indices]
        self._longest = max(len(request.prompt) for request in mine)
        self._lengths = torch.tensor([len(request.prompt) for request in mine])
        self._next = torch.tensor([[0] * (self._longest - len(one.prompt)) + one.prompt for one in mine])
        self._mask = (torch.arange(self._longest) >= (self._longest - self._lengths)[:, None]).long()
        self._cache = DynamicCache()
        self._tokens: list[list[int]] = [[] for _ in mine]
        self._logprobs: list[list[float]] = [[] for _ in mine]

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def _mine(self) -> list[Request]:
        return [self._requests[i] for i in self._indices]

    def inputs(self) -> dict[str, Any]:
        """What the network reads next: all prompts at first, then the tokens drawn last."""
        width = self._next.shape[1]
        positions = (self._mask.cumsum(1) - 1).clamp(min=0)[:, -width:]
        return {
            "input_ids": self._next, "attention_mask": self._mask, "position_ids": positions,
            "past_key_values": self._cache,
        }  # fmt: skip

    def iteration(self, waiting: int, room: int) -> Iteration:
        """The pass over `inputs`, as the lab counts it; padding is no work."""
        lengths, prefill = self._lengths.numpy(), not self._tokens[0]
        total = int(lengths.sum())
        return Iteration(
            sequences=len(self), tokens=total if prefill else len(self), prefill_tokens=total if prefill else 0,
            token_context=int((lengths * (lengths + 1) // 2).sum()) if prefill else total, context_read=total,
            running=len(self), waiting=waiting, kv_usage=len(self) / room,
        )  # fmt: skip

    def advance(self, logits: Tensor) -> list[Ended]:
        """Draws a token for every row from logits [rows, vocabulary]; returns those that have ended, and drops them."""
        mine = self._mine
        logprobs = distributions(logits, mine, self._tokens)
        chosen = self._drawn(logprobs, mine)
        values = logprobs.gather(1, chosen[:, None]).squeeze(1).tolist()
        for row, (token, value) in enumerate(zip(chosen.tolist(), values, strict=True)):
            self._tokens[row].append(token)
            self._logprobs[row].append(value)
        over = [row for row, request in enumerate(mine) if _over(request, self._tokens[row])]
        ended = [self._ended(row, logprobs[row]) for row in over]
        self._next, self._lengths = chosen[:, None], self._lengths + 1
        self._mask = torch.cat([self._mask, torch.ones_like(self._next)], dim=1)
        if over:
            self._keep([row for row in range(len(self)) if row not in set(over)])
        return ended

    def _drawn(self, logprobs: Tensor, mine: Sequence[Request]) -> Tensor:
        """By inverting the cumulative distribution; the likeliest where the temperature is 0."""
        seeds = np.asarray([request.seed for request in mine], dtype=np.int64)
        places = np.asarray([len(tokens) for tokens in self._tokens], dtype=np.int64)
        numbers = torch.from_numpy(uniform(0, _DRAWS, seeds, places, 0))
        cumulative = logprobs.double().exp().cumsum(1)
        chosen = torch.searchsorted(cumulative, (numbers * cumulative[:, -1])[:, None], right=True).squeeze(1)
        greedy = torch.tensor([request.temperature == 0 for request in mine])
        return torch.where(greedy, logprobs.argmax(1), chosen.clamp(max=logprobs.shape[1] - 1))

    def _ended(self, row: int, logprobs: Tensor) -> Ended:
        number = min(self._mine[row].num_candidates, len(logprobs))
        best = logprobs.topk(number) if number else None
        pairs = [] if best is None else zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return Ended(
            index=self._indices[row], tokens=self._tokens[row], candidates=tuple(pairs),
            logprobs=np.asarray(self._logprobs[row], dtype=np.float32),
        )  # fmt: skip

    def _keep(self, rows: list[int]) -> None:
        chosen = torch.tensor(rows, dtype=torch.long)
        self._indices = [self._indices[row] for row in rows]
        self._tokens, self._logprobs = [self._tokens[row] for row in rows], [self._logprobs[row] for row in rows]
        self._next, self._mask, self._lengths = self._next[chosen], self._mask[chosen], self._lengths[chosen]
        if rows:
            self._cache.batch_select_indices(chosen)


def _over(request: Request, tokens: Sequence[int]) -> bool:
    return len(tokens) == request.num_tokens or tokens[-1] in request.stop


def distributions(logits: Tensor, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> Tensor:
    """Log-probs [rows, vocabulary] that tokens are drawn from: penalty, then temperature, then top_p, as in vLLM.

    `tokens` of the responses so far, which the penalty divides or multiplies together with those of the prompts
    (Keskar et al. 2019). Nothing but the likeliest tokens that hold `top_p` of the probability is left.
    """
    logits = logits.float()
    if any(request.repetition_penalty != 1 for request in requests):
        logits = _penalised(logits, requests, tokens)
    heats = torch.tensor([request.temperature or 1.0 for request in requests])
    logprobs = torch.log_softmax(logits / heats[:, None], dim=-1)
    limits = torch.tensor([request.top_p if request.temperature else 1.0 for request in requests])
    if bool((limits < 1).any()):
        ordered, order = logprobs.sort(dim=-1)
        below = ordered.exp().cumsum(-1) <= (1 - limits)[:, None]
        below[:, -1] = False
        removed = torch.zeros_like(below).scatter(1, order, below) & (limits < 1)[:, None]
        logprobs = torch.log_softmax(logprobs.masked_fill(removed, float("-inf")), dim=-1)
    return logprobs


def _penalised(logits: Tensor, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> Tensor:
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for row, (request, response) in enumerate(zip(requests, tokens, strict=True)):
        seen[row, [*request.prompt, *response]] = True
    penalties = torch.tensor([request.repetition_penalty for request in requests])[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / penalties, logits * penalties), logits)
