"""vLLM: an engine that says what every iteration did, and takes weights over gloo.

Scheduler and sampling parameters live in this process. So does the network, unless it is cut over several ranks, which
are processes of vLLM's own (`executor.engine_worker`).

Importing this module imports vLLM, which takes seconds; only rollout workers do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine

from executor.inference import Ended, Iteration, Progress, Request
from executor.transfer import WeightGroup
from lab.placement import Worker
from lab.scenario import Scenario

BACKEND = "gloo"


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
    """of the engine's first rank"""
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
        rank = init_info.rank + get_tensor_model_parallel_rank()
        self.group = WeightGroup(init_info.host, init_info.port, rank, init_info.world_size)

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


def register() -> None:
    """Makes the transfer over gloo known to vLLM, in this process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, GlooWeights)


def start_engine(scenario: Scenario, folder: Path, tensor_parallel: int = 1) -> LLMEngine:
    """An engine with the network in `folder` and the scenario's settings."""
    register()
    rollout = scenario.rollout
    kv_bytes = int(rollout.kv_bytes or 0) // tensor_parallel
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype=scenario.model("actor").dtype, seed=scenario.seed,
        enforce_eager=True, max_model_len=scenario.workload.max_sequence_tokens + 1,
        max_num_seqs=rollout.max_num_seqs, max_num_batched_tokens=rollout.max_num_batched_tokens,
        enable_chunked_prefill=True, kv_cache_memory_bytes=kv_bytes or None,
        gpu_memory_utilization=rollout.kv_memory_fraction, block_size=rollout.block_tokens,
        enable_prefix_caching=rollout.prefix_caching, async_scheduling=False, scheduler_cls=RecordingScheduler,
        scheduler_reserve_full_isl=rollout.reserve_full_isl, watermark=rollout.watermark,
        logprobs_mode="processed_logprobs", max_logprobs=scenario.spec("actor").vocabulary, disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend=BACKEND), tensor_parallel_size=tensor_parallel,
        distributed_executor_backend="mp" if tensor_parallel > 1 else None,
        worker_cls="executor.engine_worker.EngineWorker",
    )  # fmt: skip
    return LLMEngine.from_vllm_config(arguments.create_engine_config(), disable_log_stats=True)


def scheduler(engine: LLMEngine) -> RecordingScheduler:
    """The scheduler of an engine, which lives in this process."""
    found: RecordingScheduler = engine.engine_core.engine_core.scheduler
    return found


class VllmBackend:
    """A vLLM engine behind `InferenceBackend`."""

    def __init__(self, scenario: Scenario, worker: Worker, folder: Path) -> None:
        self.engine = start_engine(scenario, folder, worker.parallelism.tensor)
        self.scheduler = scheduler(self.engine)
        self._vocabulary = scenario.spec("actor").vocabulary

    def generate(self, requests: Sequence[Request]) -> Iterator[Progress]:
        """Runs the engine until all requests have ended; one progress for each of its iterations."""
        for i, request in enumerate(requests):
            self.engine.add_request(str(i), {"prompt_token_ids": request.prompt}, self.parameters(request))
        while self.engine.has_unfinished_requests():
            start = time.monotonic()
            outputs = self.engine.step()
            end = time.monotonic()
            found = [iteration for iteration in self.scheduler.take() if iteration.tokens]
            ended = [_ended(output, requests) for output in outputs if output.finished]
            yield Progress(start_s=start, end_s=end, iterations=found, ended=ended)

    def parameters(self, request: Request) -> SamplingParams:
        """What vLLM is told of a request. Log-probs come flat, unless there are candidates beside the token drawn."""
        candidates = min(request.num_candidates, self._vocabulary)
        return SamplingParams(
            temperature=request.temperature, top_p=request.top_p, repetition_penalty=request.repetition_penalty,
            seed=request.seed, logprobs=candidates, flat_logprobs=not candidates, max_tokens=request.num_tokens,
            ignore_eos=True, stop_token_ids=list(request.stop), detokenize=False, skip_clone=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip

    def connect(self, host: str, port: int, rank: int, world_size: int) -> None:
        """Every rank of the engine meets the sender: the first as `rank`, the others after it."""
        info = {"host": host, "port": port, "rank": rank, "world_size": world_size}
        self.engine.collective_rpc("init_weight_transfer_engine", args=(info,))

    def receive_weights(self) -> None:
        """Loads what the sender broadcasts, on every rank its part."""
        self.engine.collective_rpc("start_weight_update")
        self.engine.collective_rpc("update_weights", args=({},))
        self.engine.collective_rpc("finish_weight_update")

    def reset_prefix_cache(self) -> bool:
        """Forgets the KV blocks of older weights."""
        return bool(self.engine.reset_prefix_cache())

    def shutdown(self) -> None:
        """Ends the engine and its ranks' processes."""
        self.engine.engine_core.shutdown()


def _ended(output: Any, requests: Sequence[Request]) -> Ended:
    index, completion = int(output.request_id.split("-")[0]), output.outputs[0]
    wanted, found = requests[index].num_candidates, completion.logprobs
    candidates: list[tuple[int, float]] = []
    if wanted:
        logprobs = [at[token].logprob for token, at in zip(completion.token_ids, found, strict=True)]
        candidates = sorted(((token, one.logprob) for token, one in found[0].items()), key=lambda pair: -pair[1])
    else:
        logprobs = found.logprobs
    return Ended(
        index=index, tokens=list(completion.token_ids), logprobs=np.asarray(logprobs, dtype=np.float32),
        num_cached_tokens=int(output.num_cached_tokens or 0), candidates=tuple(candidates[:wanted]),
    )  # fmt: skip
