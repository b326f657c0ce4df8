"""vLLM: an engine that says what every iteration did, and takes weights over gloo.

Scheduler and sampling parameters live in this process. So does the network, unless it is cut over several ranks, which
are processes of vLLM's own (`executor.engine_worker`).

Importing this module imports vLLM, which takes seconds; only rollout workers do.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
from vllm.model_executor.model_loader.reload.layerwise import (
    LOADING_LAYERS,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine

from executor.inference import Ended, InferenceBackend, Iteration, Progress, Request
from executor.transfer import WeightGroup
from lab.placement import Worker
from lab.policies.weight_sync import Running
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
    lossy: bool = False
    """ends may be lost"""


@dataclass
class Update(WeightTransferUpdateInfo):
    """One weight update: names and shapes travel with the tensors."""

    items: Any = None
    """named tensors, where they do not come from the sender"""


class GlooWeights(WeightTransferEngine[Rendezvous, Update]):
    """vLLM's side of the broadcast: weights in Hugging Face's layout, loaded as a checkpoint would be."""

    init_info_cls = Rendezvous
    update_info_cls = Update
    group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: Rendezvous) -> None:
        rank = init_info.rank + get_tensor_model_parallel_rank()
        lossy = init_info.lossy
        self.group = WeightGroup(init_info.host, init_info.port, rank, init_info.world_size, lossy=lossy)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        items = update_info.items
        if items is None:
            assert self.group is not None, "init_transfer_engine comes first"
            items = self.group.receive()
        try:
            self.model.load_weights(items)
        except BaseException:
            put_back(self.model)
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.group = None


def put_back(model: torch.nn.Module) -> None:
    """After a load that broke off: layers of which not all has come have what they had, and the next load is not added
    to what came."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            _place_kernel_tensors(layer, info)
        info.reset()
    LOADING_LAYERS.clear()


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


class VllmBackend(InferenceBackend):
    """A vLLM engine behind `InferenceBackend`."""

    def __init__(self, scenario: Scenario, worker: Worker, folder: Path) -> None:
        self.engine = start_engine(scenario, folder, worker.parallelism.tensor)
        self.scheduler = scheduler(self.engine)
        self._vocabulary, self._num_ranks = scenario.spec("actor").vocabulary, worker.parallelism.tensor
        self._asked: dict[int, Request] = {}

    def submit(self, requests: Sequence[Request], ids: Sequence[int]) -> None:
        """Requests join the engine's queue."""
        for number, request in zip(ids, requests, strict=True):
            self._asked[number] = request
            self.engine.add_request(str(number), {"prompt_token_ids": request.prompt}, self.parameters(request))

    def advance(self) -> Progress:
        """One iteration."""
        start = time.monotonic()
        outputs = self.engine.step()
        end = time.monotonic()
        found = [iteration for iteration in self.scheduler.take() if iteration.tokens]
        ended = [self._ended(output) for output in outputs if output.finished]
        return Progress(start_s=start, end_s=end, iterations=found, ended=ended)

    def abort(self, ids: Sequence[int]) -> dict[int, int]:
        """The scheduler lets them go before its next iteration."""
        made = {number_of(one.request_id): one.num_output_tokens for one in self.scheduler.requests.values()}
        gone = [number for number in ids if self._asked.pop(number, None) is not None]
        self.engine.abort_request([str(number) for number in gone])
        return {number: made.get(number, 0) for number in gone}

    def running(self) -> list[Running]:
        """In the order in which the scheduler has them; those that were preempted have tokens too."""
        waiting = [one for one in self.scheduler.requests.values() if one not in self.scheduler.running]
        held = [*self.scheduler.running, *(one for one in waiting if one.num_output_tokens)]
        return [
            Running(
                sample=number_of(one.request_id), prompt_tokens=one.num_prompt_tokens,
                response_tokens=one.num_output_tokens,
            )
            for one in held
        ]  # fmt: skip

    @property
    def unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._asked)

    def hold(self) -> None:
        """Pauses the scheduler and leaves it what it has."""
        self.engine.sleep(level=0, mode="keep")

    def go_on(self, forget: bool) -> None:
        """With `forget` all that runs is preempted, so that the prefix cache can be emptied; else no block is found again
        by its content, whoever uses it."""
        if forget:
            self.engine.reset_prefix_cache(reset_running_requests=True)
        else:
            self._lose_hashes()
        self.engine.wake_up(tags=["scheduling"])

    def _lose_hashes(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        pool.cached_block_hash_to_block = BlockHashToBlockMap()
        pool.cached_block_hashes_by_block.clear()
        for block in pool.blocks:
            block.reset_hash()

    def parameters(self, request: Request) -> SamplingParams:
        """What vLLM is told of a request. Log-probs come flat, unless there are candidates beside the token drawn."""
        candidates = min(request.num_candidates, self._vocabulary)
        return SamplingParams(
            temperature=request.temperature, top_p=request.top_p, repetition_penalty=request.repetition_penalty,
            seed=request.seed, logprobs=candidates, flat_logprobs=not candidates, max_tokens=request.num_tokens,
            ignore_eos=True, stop_token_ids=list(request.stop), detokenize=False, skip_clone=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip

    def connect(self, host: str, port: int, rank: int, world_size: int, *, lossy: bool = False) -> None:
        """Every rank of the engine meets the sender: the first as `rank`, the others after it."""
        info = {"host": host, "port": port, "rank": rank, "world_size": world_size, "lossy": lossy}
        self.engine.collective_rpc("init_weight_transfer_engine", args=(info,))

    def receive_weights(self) -> float:
        """Loads what the sender pushes, on every rank its part."""
        before = max(self.engine.collective_rpc("unpacking_seconds"))
        self._update({})
        return float(max(self.engine.collective_rpc("unpacking_seconds")) - before)

    def load_weights(self, items: Iterable[tuple[str, Any]]) -> None:
        """Loads named tensors, on every rank its part; to other processes they go all at once."""
        self._update({"items": list(items) if self._num_ranks > 1 else items})

    def _update(self, about: dict[str, Any]) -> None:
        self.engine.collective_rpc("start_weight_update")
        self.engine.collective_rpc("update_weights", args=(about,))
        self.engine.collective_rpc("finish_weight_update")

    def reset_prefix_cache(self) -> bool:
        """Forgets the KV blocks of older weights."""
        return bool(self.engine.reset_prefix_cache())

    def shutdown(self) -> None:
        """Ends the engine and its ranks' processes."""
        self.engine.engine_core.shutdown()

    def _ended(self, output: Any) -> Ended:
        number, completion = number_of(output.request_id), output.outputs[0]
        wanted, found = self._asked.pop(number).num_candidates, completion.logprobs
        candidates: list[tuple[int, float]] = []
        if wanted:
            logprobs = [at[token].logprob for token, at in zip(completion.token_ids, found, strict=True)]
            candidates = sorted(((token, one.logprob) for token, one in found[0].items()), key=lambda pair: -pair[1])
        else:
            logprobs = found.logprobs
        return Ended(
            index=number, tokens=list(completion.token_ids), logprobs=np.asarray(logprobs, dtype=np.float32),
            num_cached_tokens=int(output.num_cached_tokens or 0), candidates=tuple(candidates[:wanted]),
        )  # fmt: skip


def number_of(request_id: str) -> int:
    """What a request was submitted under; the engine adds characters of its own."""
    return int(request_id.split("-")[0])
