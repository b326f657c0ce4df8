"""The rollout worker: an engine in a Ray actor, driven iteration by iteration."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from executor.beams import search
from executor.diversity import diversity
from executor.experience import Samples, merge
from executor.inference import Ended, Iteration, Request, start
from executor.origin import origin
from executor.prompts import Prompts
from executor.publishing import Board, Offered, fetches
from executor.receiving import Absent, Receiver
from executor.recorder import Recorder
from executor.turns import publish
from lab import drawing
from lab.data import tokenizer_folder
from lab.placement import Worker
from lab.policies.weight_sync import WeightsReady
from lab.scenario import Scenario
from lab.targets import loses_engines
from lab.tokenizing import tokenizer
from lab.wiring import batches
from lab.workload import uniform

if TYPE_CHECKING:
    from executor.inference import InferenceBackend
    from executor.outgoing import Outgoing
    from executor.producing import Producing
    from executor.seat import Seat

_SAMPLING_STREAM = 6  # apart from the streams in lab/workload.py and executor/tasks.py
PROBE_PROMPTS, PROBE_TOKENS = 2, 8
Sinks = Sequence[Any]
"""actors that are told of ended samples: `submit(step, indices, samples)`, indices among the samples of the step"""


class RolloutWorker:
    """Generates the samples of a step, and takes new weights between steps.

    Nothing heavy is imported before `ready`, so that whoever starts this actor stays light.
    """

    backend: InferenceBackend
    seat: Seat
    """in the rollout under way, where engines help each other"""
    outgoing: Outgoing | None = None
    """where samples go that are sent in a stage of their own"""
    _producing: Producing | None = None

    def __init__(self, worker: Worker, index: int, scenario: Scenario) -> None:
        """`index`: of this engine among all engines."""
        self.worker, self.index, self.scenario = worker, index, scenario
        self.recorder = Recorder(worker.name, worker.pool)
        self.receiver = Receiver(scenario, worker, index)
        self._spec, self._prompts = scenario.spec("actor"), Prompts(scenario)
        self._response_lengths = lru_cache(maxsize=8)(partial(drawing.response_lengths, scenario))
        self._kv_bytes_per_token = self._spec.kv_bytes_per_token(scenario.model("actor").dtype)

    def ready(self) -> dict[str, Any]:
        """Builds the network of version 0 and an engine around it."""
        with self.recorder.stage("setup", -1):
            self.load()
        return {"spans": self.recorder.take()}

    def load(self, published: Mapping[str, Any] | None = None) -> None:
        """An engine around the network of version 0, or with the weights that a trainer published since."""
        from executor.network import build_actor, save

        network = build_actor(*origin(self.scenario, "actor"))
        self._stop = stop_tokens(network.config.eos_token_id, self.scenario)
        if published is not None:
            publish(network, published, self.scenario)
        with tempfile.TemporaryDirectory(prefix="lab-actor-") as folder:
            save(network, folder)
            self.backend = start(self.scenario, self.worker, Path(folder))

    def release(self) -> None:
        """Ends the engine, which is built anew when it is loaded again."""
        self.backend.shutdown()
        del self.backend

    @property
    def policy_version(self) -> int:
        """Of the weights in the engine."""
        return self.receiver.held

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self.receiver.enter(version)

    def look_at(self, board: Board, host: str) -> None:
        """Where it finds weights that it fetches, and its own address."""
        self.receiver.look_at(board, host)

    def take_part(self, step: int, offered: Offered, timeout_s: float | None) -> dict[str, Any]:
        """Fetches what the trainer offers after a step, when the engine hears of it or looks, and says what it has then.

        So long after the publication it gives up, and keeps what it has.
        """
        with suppress(Absent):
            version = (step + 1) // batches(self.scenario)
            self.receiver.take_part(self.backend, self.recorder, version, offered, timeout_s)
            self.forget()
        return {"spans": self.recorder.take(), "held": self.receiver.held}

    def connect(self, host: str, port: int, world_size: int, rank: int = 1) -> None:
        """Meets the trainer's sender; blocks until every rank of every engine has. `rank` of the first of this one."""
        if fetches(self.scenario):
            self.receiver.meet(host, port, rank, world_size)
            return
        self.backend.connect(host, port, rank, world_size, lossy=loses_engines(self.scenario))
        if self._producing is not None:
            self._producing.met()

    def generate(
        self,
        step: int,
        policy_version: int,
        prompts: Sequence[int],
        about: Mapping[str, Any] | None = None,
        temperatures: NDArray[np.float64] | None = None,
        sinks: Sinks = (),
        *_: Any,
    ) -> tuple[Samples | None, dict[str, Any]]:
        """All samples of these prompts of a step; `about` is added to what the stage's span says.

        `temperatures` of each sample, [prompts, samples]; None: as the scenario says before anything is learned. Samples
        go to the sinks as soon as they have ended, and are all returned too; None where they are sent in a stage of their
        own. What more is given is only waited for.

        The info has `responses`: the prompt of each sample and the tokens of its response; and `diversity`.
        Raises RuntimeError where the engine has another version.
        """
        if policy_version != self.policy_version:
            raise RuntimeError(
                f"{self.worker.name} has policy version {self.policy_version}, step {step} asks for {policy_version}"
            )
        if self.outgoing is not None:
            self.outgoing.begin(step)
        with self.recorder.stage("rollout", step, policy_version) as notes:
            requests, searches = self._requests(step, prompts, temperatures), self.scenario.sampling.beams > 1
            samples = self._run(step, requests, notes, sinks, searches=searches)
            notes |= about or {}
        responses = (samples.prompts, np.asarray(samples.lengths) - samples.num_prompt_tokens)
        info: dict[str, Any] = {"spans": self.recorder.take(), "responses": responses, "made": len(samples)}
        info["diversity"] = diversity(samples)
        if self.outgoing is None:
            return samples, info
        self.outgoing.made(step, samples)
        return None, info

    def hand_over(self, *asked: Any) -> Iterator[Samples | dict[str, Any]]:
        """Samples of a step as they end, where the engine may be lost before the last: `executor.handing_over.generate`."""
        from executor.handing_over import generate

        yield from generate(self, *asked)

    def receive_weights(self, step: int, *_: Any, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """Takes what the sender broadcasts; the engine then holds version step + 1.

        KV blocks that older weights computed would still be hit, so the prefix cache is emptied as well.
        """
        version = (step + 1) // batches(self.scenario)
        self.receiver.hear(Offered(ready=WeightsReady(version=version, place="trainer", digest="")))
        self.receiver.load(self.backend, self.recorder)
        if reset_prefix_cache:
            self.forget()
        return {"spans": self.recorder.take()}

    def forget(self) -> None:
        """Empties the prefix cache. Raises RuntimeError where something in it is in use."""
        if not self.backend.reset_prefix_cache():
            raise RuntimeError(f"{self.worker.name} could not empty its prefix cache")

    def probe(self, step: int) -> Samples:
        """A few short samples under the weights in the engine, to compare log-probs with the trainer's; not recorded.

        They are drawn from the whole distribution, which is what a trainer computes, whatever rollouts draw from.
        """
        prompts = range(min(PROBE_PROMPTS, self.scenario.workload.prompts_per_step))
        short = [
            replace(request, num_tokens=PROBE_TOKENS, top_p=1.0, repetition_penalty=1.0, stop=())
            for request in self._requests(step, prompts)
            if request.sample == 0
        ]
        return self._run(step, short, {})

    def begin(self, version: int, buffer: Any, scorers: Sequence[Any] = ()) -> None:
        """Generates without a barrier from now on, with the weights of a version: what it makes goes to the `buffer`, and
        to `scorers` that take it as it comes."""
        from executor.producing import Producing

        self.receiver.enter(version)
        self._producing = Producing(self, buffer, scorers)

    @property
    def _loop(self) -> Producing:
        assert self._producing is not None, "it has begun"
        return self._producing

    def give(self, samples: Sequence[int], steps: Sequence[int], indices: Sequence[int]) -> None:
        """Samples to generate: their numbers, and their places in the workload."""
        self._loop.give(samples, steps, indices)

    def stop(self, samples: Sequence[int]) -> None:
        """These are wanted no more."""
        self._loop.stop(samples)

    def hear(self, offered: Any) -> None:
        """There are new weights, or there will be."""
        self._loop.hear(offered)

    def deliver_to(self, buffer: Any) -> None:
        """Another process stands in the place of the buffer."""
        self._loop.deliver_to(buffer)

    def news(self) -> list[Any]:
        """What the engine did since the last call, as soon as there is something. Raises what it failed with."""
        from executor.producing import LONGEST_S

        return self._loop.news.take(LONGEST_S)

    def finish(self) -> None:
        """No more is generated; the last `news` tell of what was done."""
        self._loop.finish()

    def requests_of(self, steps: Sequence[int], indices: Sequence[int]) -> list[Request]:
        """The samples at these places of the workload, in this order."""
        found: dict[tuple[int, int], Request] = {}
        places, tried = list(zip(steps, indices, strict=True)), self.scenario.num_tried
        for step in dict.fromkeys(steps):
            prompts = sorted({index // tried for k, index in places if k == step})
            for request in self._requests(step, prompts):
                found[step, request.prompt_index * tried + request.sample] = request
        return [found[place] for place in places]

    def merge(self, *parts: Samples) -> Samples:
        """The parts of all engines as the samples of one step."""
        return merge(parts)

    def _requests(
        self, step: int, prompts: Sequence[int], temperatures: NDArray[np.float64] | None = None
    ) -> list[Request]:
        """Prompts in order, the samples of a prompt adjacent."""
        scenario, chosen = self.scenario, np.asarray(prompts, dtype=np.int64)
        workload, sampling = scenario.workload, scenario.sampling
        shape = (drawing.issued(scenario), scenario.num_tried)
        texts = self._prompts.at(step, prompts)
        lengths = self._response_lengths(step, shape[0])
        heats = drawing.temperatures(scenario, step, shape)[chosen] if temperatures is None else temperatures
        seeds = uniform(scenario.seed, _SAMPLING_STREAM, step, chosen[:, None], np.arange(shape[1])[None, :])
        longest, stop = (workload.response_tokens.max, self._stop) if workload.end == "eos" else (0, ())
        return [
            Request(
                prompt_index=prompt, sample=sample, prompt=tokens, num_tokens=longest or int(lengths[prompt, sample]),
                seed=int(seeds[row, sample] * 2**31), temperature=float(heats[row, sample]), top_p=sampling.top_p,
                repetition_penalty=sampling.repetition_penalty, stop=stop,
            )
            for row, prompt in enumerate(prompts)
            for tokens in [texts[row]]
            for sample in range(shape[1])
        ]  # fmt: skip

    def _run(
        self,
        step: int,
        requests: Sequence[Request],
        notes: dict[str, Any],
        sinks: Sinks = (),
        *,
        searches: bool = False,
    ) -> Samples:
        """Runs the engine until all requests are done; `notes` gets what the stage span says.

        Where it `searches`, requests are the beams of their prompts, and only the best are samples.
        """
        finished: dict[int, Ended] = {}
        iterations: list[Iteration] = []
        for progress in search(self.backend, requests) if searches else self.backend.generate(requests):
            for found in progress.iterations:
                self._record(found, progress.start_s, progress.end_s)
            iterations += progress.iterations
            finished |= {ended.index: ended for ended in progress.ended}
            if progress.ended and (sinks or (self.outgoing is not None and self.outgoing.streams(step))):
                self._hand_on(step, requests, progress.ended, sinks)
        notes |= self._summary(requests, iterations, finished)
        kept = list(self._kept(requests)) if searches else range(len(requests))
        return self._samples(step, [requests[i] for i in kept], [finished[i] for i in kept], drawn=not searches)

    def _kept(self, requests: Sequence[Request]) -> Iterator[int]:
        """Of the beams of each prompt, best first, as many as there are samples to train on."""
        wanted = self.scenario.workload.samples_per_prompt
        yield from (i for i, request in enumerate(requests) if request.sample < wanted)

    def _hand_on(self, step: int, requests: Sequence[Request], ended: Sequence[Ended], sinks: Sinks) -> None:
        """Tells every sink of samples that have ended; by their place among all samples of the step."""
        mine = [requests[one.index] for one in ended]
        indices = [request.prompt_index * self.scenario.num_tried + request.sample for request in mine]
        samples = self._samples(step, mine, ended)
        for sink in sinks:
            sink.submit.remote(step, indices, samples)
        if self.outgoing is not None:
            self.outgoing.ended(step, samples)

    def _samples(
        self, step: int, requests: Sequence[Request], ended: Sequence[Ended], *, drawn: bool = True
    ) -> Samples:
        """What greedy decoding and searches find has no seed; log-probs of greedy tokens are read at 1."""
        heats = [request.temperature or 1.0 for request in requests]
        seeds = [request.seed if drawn and request.temperature else -1 for request in requests]
        pairs = list(zip(requests, ended, strict=True))
        return Samples(
            step=step,
            policy_version=self.policy_version,
            prompts=np.asarray([request.prompt_index for request in requests], dtype=np.int64),
            num_prompt_tokens=np.asarray([len(request.prompt) for request in requests], dtype=np.int64),
            tokens=[np.asarray([*request.prompt, *one.tokens], dtype=np.int64) for request, one in pairs],
            logprobs=[one.logprobs for one in ended],
            indices=np.asarray([request.sample for request in requests], dtype=np.int64),
            temperatures=np.asarray(heats, dtype=np.float32),
            seeds=np.asarray(seeds, dtype=np.int64),
        )

    def _record(self, found: Iteration, start_s: float, end_s: float) -> None:
        """One op span for an iteration."""
        self.recorder.op_between(
            found.op, start_s, end_s, tokens=found.tokens, sequences=found.sequences, running=found.running,
            waiting=found.waiting, kv_usage=found.kv_usage, preemptions=found.preempted,
            quantities=self._quantities(found),
        )  # fmt: skip

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
        self, requests: Sequence[Request], iterations: Sequence[Iteration], finished: Mapping[int, Ended]
    ) -> dict[str, Any]:
        prompts = sum(len(request.prompt) for request in requests)
        responses = sum(len(ended.tokens) for ended in finished.values())
        return {
            "tokens": prompts + responses,
            "samples": len(requests),
            "prompt_tokens": prompts,
            "response_tokens": responses,
            "iterations": len(iterations),
            "preemptions": sum(found.preempted for found in iterations),
            "cached_tokens": sum(ended.num_cached_tokens for ended in finished.values()),
            "recomputed_tokens": sum(found.recomputed_tokens for found in iterations),
            "quantities": {"calls": 1.0, "samples": float(len(requests)), "tokens": float(responses)},
        }


def stop_tokens(said: int | Sequence[int] | None, scenario: Scenario) -> tuple[int, ...]:
    """The token ids that end a response: as the network's configuration says, and as the tokenizer of the data does.

    A network that is drawn from a seed ends with the built-in characters; with another tokenizer these are not meant.
    """
    folder = tokenizer_folder(scenario) if scenario.data.source is not None else None
    end = tokenizer(folder).end if folder is not None else None
    known = () if said is None else (said,) if isinstance(said, int) else tuple(said)
    if end is None:
        return known
    return (end,) if origin(scenario, "actor").weights == "random" else (*known, *({end} - {*known}))
