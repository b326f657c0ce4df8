"""The rollout worker: a vLLM engine in a Ray actor, driven iteration by iteration."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from executor.experience import Samples, merge
from executor.origin import origin
from executor.recorder import Recorder
from executor.tasks import TASKS
from lab.placement import Worker
from lab.scenario import Scenario
from lab.workload import uniform

if TYPE_CHECKING:
    from executor.engine import Iteration

_SAMPLING_STREAM = 6  # apart from the streams in lab/workload.py and executor/tasks.py
PROBE_PROMPTS, PROBE_TOKENS = 2, 8


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sample to generate."""

    prompt_index: int
    prompt: list[int]
    num_tokens: int
    """of the response, imposed"""
    seed: int


class RolloutWorker:
    """Generates the samples of a step, and takes new weights between steps.

    Nothing heavy is imported before `ready`, so that whoever starts this actor stays light.
    """

    def __init__(self, worker: Worker, index: int, scenario: Scenario) -> None:
        """`index`: of this engine among all engines."""
        self.worker, self.index, self.scenario = worker, index, scenario
        self.recorder = Recorder(worker.name, worker.pool)
        self.policy_version = 0
        self._spec = scenario.spec("actor")
        self._kv_bytes_per_token = self._spec.kv_bytes_per_token(scenario.model("actor").dtype)

    def ready(self) -> dict[str, Any]:
        """Builds the network of version 0 and an engine around it."""
        with self.recorder.stage("setup", -1):
            from executor import engine
            from executor.network import build_actor, save

            with tempfile.TemporaryDirectory(prefix="lab-actor-") as folder:
                save(build_actor(*origin(self.scenario, "actor")), folder)
                self.engine = engine.start_engine(self.scenario, Path(folder))
            self._scheduler = engine.scheduler(self.engine)
        return {"spans": self.recorder.take()}

    def connect(self, host: str, port: int, world_size: int) -> None:
        """Meets the trainer's sender; blocks until every engine has."""
        info = {"host": host, "port": port, "rank": 1 + self.index, "world_size": world_size}
        self.engine.collective_rpc("init_weight_transfer_engine", args=(info,))

    def generate(
        self, step: int, policy_version: int, prompts: Sequence[int], about: Mapping[str, Any] | None = None
    ) -> tuple[Samples, dict[str, Any]]:
        """All samples of these prompts of a step; `about` is added to what the stage's span says.

        The info has `responses`: the prompt of each sample and the tokens of its response. Raises RuntimeError where the
        engine has another version.
        """
        if policy_version != self.policy_version:
            raise RuntimeError(
                f"{self.worker.name} has policy version {self.policy_version}, step {step} asks for {policy_version}"
            )
        with self.recorder.stage("rollout", step, policy_version) as notes:
            samples = self._run(step, self._requests(step, prompts), notes)
            notes |= about or {}
        responses = (samples.prompts, np.asarray(samples.lengths) - samples.num_prompt_tokens)
        return samples, {"spans": self.recorder.take(), "responses": responses}

    def receive_weights(self, step: int, *, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """Takes what the sender broadcasts; the engine then holds version step + 1.

        KV blocks that older weights computed would still be hit, so the prefix cache is emptied as well.
        """
        with self.recorder.stage("weight_sync", step, step + 1):
            with self.recorder.op("transfer"):
                self.engine.collective_rpc("start_weight_update")
                self.engine.collective_rpc("update_weights", args=({},))
                self.engine.collective_rpc("finish_weight_update")
            if reset_prefix_cache and not self.engine.reset_prefix_cache():
                raise RuntimeError(f"{self.worker.name} could not empty its prefix cache")
            self.policy_version = step + 1
        return {"spans": self.recorder.take()}

    def probe(self, step: int) -> Samples:
        """A few short samples under the weights in the engine, to compare log-probs with the trainer's; not recorded."""
        requests = self._requests(step, range(min(PROBE_PROMPTS, self.scenario.workload.prompts_per_step)))
        short = [
            Request(prompt_index=item.prompt_index, prompt=item.prompt, num_tokens=PROBE_TOKENS, seed=item.seed)
            for item in requests[:: self.scenario.workload.samples_per_prompt]
        ]
        return self._run(step, short, {})

    def merge(self, *parts: Samples) -> Samples:
        """The parts of all engines as the samples of one step."""
        return merge(parts)

    def _requests(self, step: int, prompts: Sequence[int]) -> list[Request]:
        """Prompts in order, the samples of a prompt adjacent."""
        seed, workload, task = self.scenario.seed, self.scenario.workload, TASKS[self.scenario.data.task]
        prompt_lengths, lengths = workload.prompt_lengths(seed, step), workload.response_lengths(seed, step)
        samples = np.arange(workload.samples_per_prompt)
        seeds = uniform(seed, _SAMPLING_STREAM, step, np.asarray(prompts, dtype=np.int64)[:, None], samples[None, :])
        return [
            Request(
                prompt_index=prompt, prompt=task.prompt(seed, step, prompt, int(prompt_lengths[prompt])),
                num_tokens=int(lengths[prompt, sample]), seed=int(seeds[row, sample] * 2**31),
            )
            for row, prompt in enumerate(prompts)
            for sample in samples
        ]  # fmt: skip

    def _run(self, step: int, requests: Sequence[Request], notes: dict[str, Any]) -> Samples:
        """Runs the engine until all requests are done; `notes` gets what the stage span says."""
        for i, request in enumerate(requests):
            self.engine.add_request(str(i), {"prompt_token_ids": request.prompt}, self._sampling(request))
        finished: dict[int, Any] = {}
        iterations: list[Iteration] = []
        while self.engine.has_unfinished_requests():
            start = time.monotonic()
            outputs = self.engine.step()
            end = time.monotonic()
            iterations += self._record(start, end)
            finished |= {int(output.request_id.split("-")[0]): output for output in outputs if output.finished}
        notes |= self._summary(requests, iterations, finished)
        return _samples(step, self.policy_version, requests, [finished[i] for i in range(len(requests))])

    def _sampling(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=self.scenario.sampling.fixed, seed=request.seed, logprobs=0, max_tokens=request.num_tokens,
            ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip

    def _record(self, start: float, end: float) -> list[Iteration]:
        """One op span for each iteration that the scheduler decided meanwhile; empty ones are left out."""
        iterations = [found for found in self._scheduler.take() if found.tokens]
        for found in iterations:
            self.recorder.op_between(
                found.op, start, end, tokens=found.tokens, sequences=found.sequences, running=found.running,
                waiting=found.waiting, kv_usage=found.kv_usage, preemptions=found.preempted,
                quantities=self._quantities(found),
            )  # fmt: skip
        return iterations

    def _quantities(self, found: Iteration) -> dict[str, float]:
        return {
            "sequences": float(found.sequences),
            "tokens": float(found.tokens),
            "linear_flops": self._spec.linear_flops(found.tokens, head_tokens=found.sequences),
            "attention_flops": self._spec.attention_flops(found.token_context),
            "kv_bytes": found.context_read * self._kv_bytes_per_token,
            "layers": float(self._spec.layers),
            "activations": float(found.tokens * self._spec.layers * self._spec.hidden),
            "prefill_steps": float(found.prefill_tokens > 0),
        }

    def _summary(
        self, requests: Sequence[Request], iterations: Sequence[Iteration], finished: dict[int, Any]
    ) -> dict[str, Any]:
        responses = sum(request.num_tokens for request in requests)
        return {
            "tokens": sum(len(request.prompt) for request in requests) + responses,
            "samples": len(requests),
            "prompt_tokens": sum(len(request.prompt) for request in requests),
            "response_tokens": responses,
            "iterations": len(iterations),
            "preemptions": sum(found.preempted for found in iterations),
            "cached_tokens": sum(int(output.num_cached_tokens or 0) for output in finished.values()),
            "recomputed_tokens": sum(found.recomputed_tokens for found in iterations),
            "quantities": {"calls": 1.0, "samples": float(len(requests)), "tokens": float(responses)},
        }


def _samples(step: int, version: int, requests: Sequence[Request], outputs: Sequence[Any]) -> Samples:
    completions = [output.outputs[0] for output in outputs]
    return Samples(
        step=step,
        policy_version=version,
        prompts=np.asarray([request.prompt_index for request in requests]),
        num_prompt_tokens=np.asarray([len(request.prompt) for request in requests]),
        tokens=[
            np.asarray([*request.prompt, *completion.token_ids], dtype=np.int64)
            for request, completion in zip(requests, completions, strict=True)
        ],
        logprobs=[
            np.asarray(
                [found[token].logprob for token, found in zip(completion.token_ids, completion.logprobs, strict=True)],
                dtype=np.float32,
            )
            for completion in completions
        ],
    )
