"""vLLM in this process: an engine that says what every iteration did, and takes weights over gloo.

Importing this module imports vLLM, which takes seconds; only rollout workers do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine

from executor.transfer import WeightGroup
from lab.scenario import Scenario

BACKEND = "gloo"


@dataclass(kw_only=True)
class Iteration:
    """What vLLM's scheduler put into one iteration."""

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


class RecordingScheduler(Scheduler):
    """vLLM's own scheduler, which also keeps an `Iteration` for each of its decisions until they are taken."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iterations: list[Iteration] = []
        self._computed: dict[str, int] = {}

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        found = Iteration(
            running=len(self.running), waiting=len(self.waiting), kv_usage=self.kv_cache_manager.usage,
            preempted=len(output.preempted_req_ids or ()),
        )  # fmt: skip
        cached = output.scheduled_cached_reqs
        before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request, scheduled in output.num_scheduled_tokens.items():
            self._count(found, request, before[request], scheduled)
        for request in output.finished_req_ids:
            self._computed.pop(request, None)
        self.iterations.append(found)
        return output

    def _count(self, found: Iteration, request: str, before: int, scheduled: int) -> None:
        after, highest = before + scheduled, self._computed.get(request, 0)
        found.sequences += 1
        found.tokens += scheduled
        found.token_context += scheduled * before + scheduled * (scheduled + 1) // 2
        found.context_read += after
        found.recomputed_tokens += max(min(highest, after) - before, 0)
        if before < max(self.requests[request].num_prompt_tokens, highest):
            found.prefill_tokens += scheduled
        self._computed[request] = max(highest, after)

    def take(self) -> list[Iteration]:
        """The iterations since the last call."""
        taken, self.iterations = self.iterations, []
        return taken


@dataclass
class Rendezvous(WeightTransferInitInfo):
    """Where an engine meets the sender."""

    host: str
    port: int
    rank: int
    world_size: int


@dataclass
class Update(WeightTransferUpdateInfo):
    """One weight update: names and shapes travel with the tensors."""

    options: dict[str, Any] = field(default_factory=dict)


class GlooWeights(WeightTransferEngine[Rendezvous, Update]):
    """vLLM's side of the broadcast: weights in Hugging Face's layout, loaded as a checkpoint would be."""

    init_info_cls = Rendezvous
    update_info_cls = Update
    group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: Rendezvous) -> None:
        self.group = WeightGroup(init_info.host, init_info.port, init_info.rank, init_info.world_size)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        assert self.group is not None, "init_transfer_engine comes first"
        self.model.load_weights(self.group.receive())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.group = None


class SeededGenerator(torch.Generator):
    """A request's random numbers on a CPU, where PyTorch's own generator has no offset.

    vLLM draws a token even after a chunk of a prompt that is not its last, drops it, and sets the offset back by one
    draw. Here the drawn number stays used: still the same numbers for the same seed and the same chunks.
    """

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Leaves the state as it is."""


def start_engine(scenario: Scenario, folder: Path) -> LLMEngine:
    """An engine in this process with the network in `folder` and the scenario's settings."""
    torch.Generator = SeededGenerator  # type: ignore[misc]
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, GlooWeights)
    rollout = scenario.rollout
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype=scenario.model("actor").dtype, seed=scenario.seed,
        enforce_eager=True, max_model_len=scenario.workload.max_sequence_tokens + 1,
        max_num_seqs=rollout.max_num_seqs, max_num_batched_tokens=rollout.max_num_batched_tokens,
        enable_chunked_prefill=True, kv_cache_memory_bytes=int(rollout.kv_bytes or 0) or None,
        gpu_memory_utilization=rollout.kv_memory_fraction, block_size=rollout.block_tokens,
        enable_prefix_caching=rollout.prefix_caching, async_scheduling=False, scheduler_cls=RecordingScheduler,
        scheduler_reserve_full_isl=rollout.reserve_full_isl, watermark=rollout.watermark,
        logprobs_mode="processed_logprobs", disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
    )  # fmt: skip
    return LLMEngine.from_vllm_config(arguments.create_engine_config(), disable_log_stats=True)


def scheduler(engine: LLMEngine) -> RecordingScheduler:
    """The scheduler of an engine in this process."""
    found: RecordingScheduler = engine.engine_core.engine_core.scheduler
    return found
