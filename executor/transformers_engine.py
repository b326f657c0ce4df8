"""An engine on the transformers library alone: one batch after the other, with a KV cache of whole rows.

No vLLM is needed. The next batch begins when the last response of one has ended; a row whose response has ended leaves
the batch. Importing this module imports transformers, which takes seconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from executor.inference import Ended, InferenceBackend, Iteration, Progress, Request
from executor.transfer import WeightGroup
from lab.placement import Worker
from lab.policies.weight_sync import Running
from lab.scenario import Scenario
from lab.workload import uniform

_DRAWS = 20
"""the stream of the random numbers that choose tokens"""


class TransformersBackend(InferenceBackend):
    """A network behind `InferenceBackend`; token t of a request is chosen by a number that depends on seed and t alone."""

    def __init__(self, scenario: Scenario, worker: Worker, folder: Path) -> None:
        torch.set_num_threads(worker.threads)
        network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._network = network.eval().requires_grad_(False)
        row = scenario.workload.max_sequence_tokens * scenario.spec("actor").kv_bytes_per_token("float32")
        fitting = int(scenario.rollout.kv_bytes // row) if scenario.rollout.kv_bytes else scenario.rollout.max_num_seqs
        self._size = min(max(fitting, 1), scenario.rollout.max_num_seqs)
        self._waiting = deque[tuple[int, Request]]()
        self._rows: Rows | None = None

    def submit(self, requests: Sequence[Request], ids: Sequence[int]) -> None:
        """They wait for the next batch."""
        self._waiting += zip(ids, requests, strict=True)

    @torch.inference_mode()
    def advance(self) -> Progress:
        """One pass over the batch, which is made of those that waited longest where there is none: as many as sequences
        and KV memory allow."""
        start = time.monotonic()
        if self._rows is None:
            if not self._waiting:
                return Progress(start_s=start, end_s=start, iterations=[], ended=[])
            number = min(self._size, len(self._waiting))
            self._rows = Rows([self._waiting.popleft() for _ in range(number)])
        rows = self._rows
        logits = self._network(**rows.inputs(), use_cache=True, logits_to_keep=1).logits[:, -1]
        done = rows.iteration(len(self._waiting), self._size)
        ended = rows.advance(logits)
        self._tidy()
        return Progress(start_s=start, end_s=time.monotonic(), iterations=[done], ended=ended)

    def abort(self, ids: Sequence[int]) -> dict[int, int]:
        """Rows leave the batch, and what waits the queue."""
        chosen = set(ids)
        found = {number: 0 for number, _ in self._waiting if number in chosen}
        self._waiting = deque(pair for pair in self._waiting if pair[0] not in chosen)
        if self._rows is not None:
            found |= self._rows.drop(chosen)
            self._tidy()
        return found

    def running(self) -> list[Running]:
        """The rows of the batch."""
        return [] if self._rows is None else self._rows.running()

    @property
    def unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._waiting) + (0 if self._rows is None else len(self._rows))

    def hold(self) -> None:
        """Between two calls it stands still anyway."""

    def go_on(self, forget: bool) -> None:
        """Later prompts find nothing of earlier ones, so that there is nothing else to forget."""
        if forget and self._rows is not None:
            self._rows.forget()

    def _tidy(self) -> None:
        if self._rows is not None and not len(self._rows):
            self._rows = None

    def connect(self, host: str, port: int, rank: int, world_size: int, *, lossy: bool = False) -> None:
        """Meets the sender of weights."""
        self._group = WeightGroup(host, port, rank, world_size, lossy=lossy)

    def receive_weights(self) -> float:
        """Takes what the sender pushes; adapters come merged into their matrices."""
        before = self._group.unpacker.seconds
        self.load_weights(self._group.receive())
        return self._group.unpacker.seconds - before

    def load_weights(self, items: Iterable[tuple[str, Tensor]]) -> None:
        """Takes whole tensors by Hugging Face's names."""
        own = dict(self._network.named_parameters())
        for name, tensor in items:
            own[name].copy_(tensor)

    def reset_prefix_cache(self) -> bool:
        """There is none."""
        return True

    def shutdown(self) -> None:
        """Drops the network."""
        del self._network


class Rows:
    """The requests of a batch that have not ended, padded on the left, and their KV cache."""

    def __init__(self, asked: Sequence[tuple[int, Request]]) -> None:
        """`asked`: requests and their numbers."""
        self._indices, self._mine = [number for number, _ in asked], [request for _, request in asked]
        self._longest = max(len(request.prompt) for request in self._mine)
        self._lengths = torch.tensor([len(request.prompt) for request in self._mine])
        self._mask = (torch.arange(self._longest) >= (self._longest - self._lengths)[:, None]).long()
        self._tokens: list[list[int]] = [[] for _ in self._mine]
        self._logprobs: list[list[float]] = [[] for _ in self._mine]
        self.forget()

    def forget(self) -> None:
        """The next pass computes keys and values of all tokens."""
        self._next = torch.tensor([
            [0] * (self._longest - len(request.prompt)) + request.prompt + tokens
            for request, tokens in zip(self._mine, self._tokens, strict=True)
        ])  # fmt: skip
        self._cache, self._begins = DynamicCache(), True

    def __len__(self) -> int:
        return len(self._indices)

    def running(self) -> list[Running]:
        """Of each row the request's number, and its tokens."""
        parts = zip(self._indices, self._mine, self._tokens, strict=True)
        return [
            Running(sample=number, prompt_tokens=len(request.prompt), response_tokens=len(tokens))
            for number, request, tokens in parts
        ]

    def drop(self, numbers: Collection[int]) -> dict[int, int]:
        """The rows of these requests leave; the response tokens that each has."""
        found = {one.sample: one.response_tokens for one in self.running() if one.sample in numbers}
        if found:
            self._keep([row for row, number in enumerate(self._indices) if number not in found])
        return found

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
        lengths, prefill = self._lengths.numpy(), self._begins
        total = int(lengths.sum())
        return Iteration(
            sequences=len(self), tokens=total if prefill else len(self), prefill_tokens=total if prefill else 0,
            recomputed_tokens=total - len(self) if prefill and self._tokens[0] else 0,
            token_context=int((lengths * (lengths + 1) // 2).sum()) if prefill else total, context_read=total,
            running=len(self), waiting=waiting, kv_usage=len(self) / room,
        )  # fmt: skip

    def advance(self, logits: Tensor) -> list[Ended]:
        """Draws a token for every row from logits [rows, vocabulary]; returns those that have ended, and drops them."""
        mine = list(self._mine)
        logprobs = distributions(logits, mine, self._tokens)
        chosen = self._drawn(logprobs, mine)
        values = logprobs.gather(1, chosen[:, None]).squeeze(1).tolist()
        for row, (token, value) in enumerate(zip(chosen.tolist(), values, strict=True)):
            self._tokens[row].append(token)
            self._logprobs[row].append(value)
        over = [row for row, request in enumerate(mine) if _over(request, self._tokens[row])]
        ended = [self._ended(row, logprobs[row]) for row in over]
        self._next, self._lengths, self._begins = chosen[:, None], self._lengths + 1, False
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
        self._indices, self._mine = [self._indices[row] for row in rows], [self._mine[row] for row in rows]
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
