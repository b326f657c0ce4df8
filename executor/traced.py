"""Takes traces from vLLM: its engine with a small network in this process, or its scheduler classes without a model.

Importing this module imports vLLM, which takes seconds.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from executor.engine_limits import BLOCK_MULTIPLE
from executor.inputs import MAX_POSITIONS
from executor.network import build_actor, save
from executor.replay import EngineSettings, ReplayRequest, Scheduled, Source, TracedIteration
from lab.model import ModelSpec

OUTPUT_TOKEN = 1_000_000
"""the scheduler alone is fed token ids from here on, every one of them new: no two outputs share a block"""
NETWORK = ModelSpec(hidden=64, layers=2, heads=2, kv_heads=2, head_dim=32, intermediate=128, vocabulary=64)
"""what the engine runs where nothing but its schedule matters"""
_folders: list[tempfile.TemporaryDirectory[str]] = []


class _Traced(Scheduler):
    """A scheduler of vLLM that notes what it decided."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iteration = 0
        self.trace: list[TracedIteration] = []
        self._preempted: list[int] = []

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._preempted = []
        before = {request.request_id for request in self.running}
        output = super().schedule(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        pool = self.kv_cache_manager.block_pool
        self.trace.append(
            TracedIteration(
                iteration=self.iteration,
                scheduled=[Scheduled(number(i), n, computed[i]) for i, n in output.num_scheduled_tokens.items()],
                running=len(self.running),
                waiting=len(self.waiting),
                blocks=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
                preempted=self._preempted,
                hits=[(number(i), computed[i]) for i in output.num_scheduled_tokens if i not in before],
            )
        )
        return output

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._preempted.append(number(request.request_id))
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.trace[-1].finished.append(number(request.request_id))
        return super()._free_request(request, *args, **kwargs)


class TracedScheduler(_Traced):
    """The synchronous scheduler, traced."""


class TracedAsyncScheduler(_Traced, AsyncScheduler):
    """The asynchronous scheduler, traced."""


def number(request_id: str) -> int:
    """Index of a request; the engine appends characters of its own to the id."""
    return int(request_id.split("-")[0])


def arguments(folder: Path, settings: EngineSettings) -> EngineArgs:
    """vLLM's arguments for the network in `folder`."""
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", seed=0, enforce_eager=True,
        max_model_len=min(settings.capacity, MAX_POSITIONS), max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens, enable_chunked_prefill=True,
        num_gpu_blocks_override=settings.num_blocks, kv_cache_memory_bytes=1 << 26,
        block_size=max(settings.block_tokens, BLOCK_MULTIPLE), enable_prefix_caching=settings.prefix_caching,
        scheduler_reserve_full_isl=settings.reserve_full_isl, watermark=settings.watermark, async_scheduling=False,
        scheduler_cls=TracedScheduler, disable_log_stats=True, use_tqdm_on_load=False,
    )  # fmt: skip


def replay_engine(
    folder: Path, settings: EngineSettings, requests: Sequence[ReplayRequest]
) -> tuple[list[TracedIteration], list[tuple[int, ...]]]:
    """The trace of the real engine, synchronous, in this process, and the token ids of every response.

    `folder` holds a network; VLLM_ENABLE_V1_MULTIPROCESSING has to be 0. Blocks are a multiple of 32 tokens on a CPU.
    """
    if settings.async_scheduling:
        raise ValueError("the real engine is replayed with synchronous scheduling only")
    engine = LLMEngine.from_vllm_config(arguments(folder, settings).create_engine_config(), disable_log_stats=True)
    scheduler: TracedScheduler = engine.engine_core.engine_core.scheduler
    outputs: dict[int, tuple[int, ...]] = {}

    def add(index: int, request: ReplayRequest) -> None:
        parameters = SamplingParams(max_tokens=request.response, ignore_eos=True, detokenize=False)
        engine.add_request(str(index), {"prompt_token_ids": list(request.prompt)}, parameters)

    def step() -> None:
        for output in engine.step():
            if output.finished:
                outputs[int(output.request_id)] = tuple(output.outputs[0].token_ids)

    _drive(scheduler, requests, add, step)
    engine.engine_core.shutdown()
    return scheduler.trace, [outputs[index] for index in range(len(requests))]


def replay_scheduler(
    config: VllmConfig, settings: EngineSettings, requests: Sequence[ReplayRequest]
) -> list[TracedIteration]:
    """The trace of vLLM's scheduler without a model, as its own tests drive it.

    `config` comes from `arguments(...).create_engine_config()`; what `settings` say replaces its values. With
    asynchronous scheduling, the outcome of an iteration arrives after the next call of the scheduler
    (EngineCore.step_with_batch_queue with its queue of two).
    """
    scheduler = _scheduler(config, settings)
    tokens = itertools.count(OUTPUT_TOKEN)
    hasher = get_request_block_hasher(settings.block_tokens, sha256) if settings.prefix_caching else None
    in_flight: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []

    def add(index: int, request: ReplayRequest) -> None:
        parameters = SamplingParams(max_tokens=request.response, ignore_eos=True)
        scheduler.add_request(Request(
            request_id=str(index), prompt_token_ids=list(request.prompt), sampling_params=parameters,
            pooling_params=None, block_hasher=hasher,
        ))  # fmt: skip

    def step() -> None:
        output = scheduler.schedule()
        in_flight.append((output, _sampled(scheduler, output, tokens)))
        if len(in_flight) > settings.async_scheduling:
            scheduler.update_from_output(*in_flight.pop(0))

    _drive(scheduler, requests, add, step)
    return scheduler.trace


def _drive(
    scheduler: _Traced,
    requests: Sequence[ReplayRequest],
    add: Callable[[int, ReplayRequest], None],
    step: Callable[[], None],
) -> None:
    """Calls the scheduler while a request is unfinished; its number jumps to the next arrival where none is."""
    _refuse(scheduler.max_model_len, requests)
    order = sorted(range(len(requests)), key=lambda index: requests[index].arrival)
    while order or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests():
            scheduler.iteration = max(scheduler.iteration, requests[order[0]].arrival)
        while order and requests[order[0]].arrival <= scheduler.iteration:
            index = order.pop(0)
            add(index, requests[index])
        step()
        scheduler.iteration += 1


def _refuse(longest: int, requests: Sequence[ReplayRequest]) -> None:
    for index, request in enumerate(requests):
        if len(request.prompt) + request.response > longest:
            raise ValueError(f"request {index} is longer than the {longest} tokens that the KV blocks hold")


def _scheduler(config: VllmConfig, settings: EngineSettings) -> _Traced:
    config, block = copy.copy(config), settings.block_tokens
    config.scheduler_config, config.cache_config = copy.copy(config.scheduler_config), copy.copy(config.cache_config)
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = settings.capacity
    config.scheduler_config.max_num_seqs = settings.max_num_seqs
    config.scheduler_config.max_num_batched_tokens = settings.max_num_batched_tokens
    config.scheduler_config.max_num_scheduled_tokens = settings.max_num_batched_tokens
    config.scheduler_config.scheduler_reserve_full_isl = settings.reserve_full_isl
    config.scheduler_config.watermark = settings.watermark
    config.scheduler_config.async_scheduling = settings.async_scheduling
    config.cache_config.num_gpu_blocks = settings.num_blocks
    config.cache_config.block_size = block
    config.cache_config.enable_prefix_caching = settings.prefix_caching
    if settings.prefix_caching:
        init_none_hash(sha256)
    attention = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kind = TracedAsyncScheduler if settings.async_scheduling else TracedScheduler
    return kind(
        vllm_config=config, block_size=block, structured_output_manager=StructuredOutputManager(config),
        kv_cache_config=KVCacheConfig(
            num_blocks=settings.num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)]
        ),
    )  # fmt: skip


def _sampled(scheduler: Scheduler, output: SchedulerOutput, tokens: itertools.count[int]) -> ModelRunnerOutput:
    """A new token for every request whose known tokens were all scheduled."""
    ids = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[i].is_prefill_chunk else [next(tokens)] for i in ids]
    return ModelRunnerOutput(
        req_ids=ids, req_id_to_index={i: index for index, i in enumerate(ids)}, sampled_token_ids=sampled
    )


def play_with(source: Source, settings: EngineSettings, requests: Sequence[ReplayRequest]) -> list[TracedIteration]:
    """The trace of a workload; the network and the configuration are made once per process."""
    if source == "engine":
        return replay_engine(_network(), settings, requests)[0]
    return replay_scheduler(_configuration(), settings, requests)


@cache
def _network() -> Path:
    """A folder with a small network, kept until the process ends."""
    _folders.append(tempfile.TemporaryDirectory(prefix="lab-traced-"))
    save(build_actor(NETWORK, 0), _folders[-1].name)
    return Path(_folders[-1].name)


@cache
def _configuration() -> VllmConfig:
    settings = EngineSettings(max_num_seqs=16, max_num_batched_tokens=512, num_blocks=32, block_tokens=BLOCK_MULTIPLE)
    return arguments(_network(), settings).create_engine_config()
