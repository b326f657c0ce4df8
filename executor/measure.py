"""Measures what real operations of the executor's workers cost on this machine.

The very workers of a run are started, in Ray, and taken through a designed sweep of shapes that comes from no
scenario file, alone and beside a busy core. What comes back are the Measurements that profiles are fitted to.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray

from executor.experience import Samples
from executor.neighbour import Neighbour
from executor.rollout import Request, RolloutWorker
from executor.tokenizer import IDS
from executor.workers import HOST, Workers
from lab.measurement import Measurement, of_spans
from lab.scenario import Scenario
from lab.timeline import Span

Progress = Callable[[str, int], None]

MINIBATCH = 16
ENGINE = (
    (1, 8, 12),
    (2, 40, 12),
    (4, 16, 16),
    (8, 96, 16),
    (16, 12, 24),
    (24, 48, 16),
    (32, 16, 32),
    (48, 24, 16),
    (64, 12, 24),
    (32, 160, 10),
)
"""(sequences, prompt tokens, longest response): responses end one after the other, so all smaller batches occur too"""
SCORED = ((1, 24), (4, 32), (8, 64), (16, 24), (16, 96), (32, 44), (32, 84), (32, 120), (64, 48))
"""(samples, tokens of each)"""
TRAINED = (
    (16, 12, 12),
    (16, 24, 24),
    (16, 40, 40),
    (32, 32, 32),
    (16, 64, 64),
    (16, 96, 96),
    (16, 128, 128),
    (32, 112, 112),
    (16, 156, 156),
    (16, 164, 24),
    (16, 168, 64),
)
"""(samples, tokens of each, tokens of the last), in mini-batches of MINIBATCH samples; a short last one passes alone"""
MICROBATCH_TOKENS = 2560
SYNCS, SAVES = 6, 3


def measure(arch: str = "tiny-llama", quick: bool = True, progress: Progress | None = None) -> list[Measurement]:
    """Measurements of every op on one core of this machine; about 100 s where quick, else some five minutes more.

    Rounds alone and beside a busy core take turns, so that a slow minute of the machine does not fall on one of them;
    what is returned are medians of repeats. Quick measures one architecture in three rounds.
    """
    archs = [arch] if quick else [arch, *sorted({"tiny-llama", "small-llama"} - {arch})]
    told = progress or (lambda *_: None)
    found = [point for name in archs for point in _measure(name, 3 if quick else 6, told)]
    return found if quick else found + _measure_ranks(arch, told)


def _measure(arch: str, repeats: int, progress: Progress) -> list[Measurement]:
    found: list[Measurement] = []
    with Workers(scenario(arch)) as workers:
        workers.start()
        sweep = Sweep(workers, arch)
        progress(f"starting workers ({arch})", 0)
        sweep.setup()
        sweep.warm_up()
        alone_only = len(workers.scenario.hardware.select("local")) == 1
        with Neighbour(arch) as neighbour:
            for number in range(repeats):
                progress(f"measuring {arch} alone", number)
                found += sweep.all(neighbours=0)
                if alone_only or number == repeats - 1:
                    continue
                progress(f"measuring {arch} beside a busy core", number)
                neighbour.work()
                found += sweep.all(neighbours=1)
                neighbour.rest()
    return collapse(found)


def _measure_ranks(arch: str, progress: Progress) -> list[Measurement]:
    """What two ranks add to training: the all-reduce of gradients, each rank busy on a core of its own."""
    progress(f"measuring {arch} on two ranks", 0)
    with Workers(scenario(arch, ranks=2)) as workers:
        workers.start()
        sweep = Sweep(workers, arch)
        sweep.setup()
        infos = [info for shape in TRAINED[2:] for info in sweep.train(shape)]
        spans = [span for info in infos for span in info["spans"] if span.op == "grad_sync"]
    return collapse(of_spans(spans, model=arch, device="cpu-core", source="sweep"))


def scenario(arch: str, ranks: int = 1) -> Scenario:
    """The scenario whose workers are measured: PPO on all cores; its workload is never drawn."""
    model = {"like": "actor", "dtype": "float32"}
    data = {
        "name": f"measure-{arch}",
        "cluster": "local",
        "models": {"actor": {"arch": arch, "dtype": "float32"}, "critic": model, "reference": model},
        "algorithm": {"name": "ppo", "kl_coef": 0.01},
        "pools": {"all": "local"},
        "sharing": {"all": {"how": "resident"}},
        "place": {
            "actor.generate": [{"pool": "all"}],
            "actor.train": {"pool": "all", "data_parallel": ranks},
            "critic.train": {"pool": "all"},
            "reference.score": {"pool": "all", "max_batch_samples": 32},
            "reward.score": {"pool": "all", "kind": "function", "function": "task"},
        },
        "workload": {
            "prompts_per_step": 2 * MINIBATCH,
            "prompt_tokens": {"dist": "fixed", "value": 256},
            "response_tokens": {"dist": "fixed", "value": 256},
        },
        "rollout": {"kv_bytes": "128 MiB", "block_tokens": 32, "max_num_seqs": 64},
        "update": {"minibatch_samples": MINIBATCH, "microbatch_tokens": MICROBATCH_TOKENS},
        "optimizer": {"lr": 1e-6},
        "num_steps": 1,
    }
    return Scenario.model_validate_json(json.dumps(data))


class Sweep:
    """Takes the workers of a run through shapes and collects what they measured."""

    def __init__(self, workers: Workers, arch: str) -> None:
        self.arch, self.actors, self._step = arch, workers.actors, 0
        self.engine = workers.team("actor", "generate")[0]
        self.reference, self.reward = (workers.team(role, "score")[0] for role in ("reference", "reward"))
        self.ranks = workers.team("actor", "train")
        self.actor, self.critic = self.ranks[0], workers.team("critic", "train")[0]
        self._meeting = (HOST, workers.weight_port, 2)

    def setup(self) -> None:
        ray.get([actor.ready.remote() for actor in self.actors.values()])
        ray.get([end.connect.remote(*self._meeting) for end in (self.actor, self.engine)])

    def warm_up(self) -> None:
        """First calls allocate and import; they are no measurement."""
        self._generate((4, 16, 4))
        self._score((4, 16))
        self.train((MINIBATCH, 160, 160))  # the largest: later passes find its memory
        self._sync()

    def all(self, neighbours: int) -> list[Measurement]:
        """Every op once over all shapes; workers take turns, as in a run, so that none finds its caches warm."""
        methods: list[Callable[[Any], list[Any]]] = [self._generate, self._score, self.train]
        infos = []
        for shapes in zip_longest(ENGINE, SCORED, TRAINED):
            infos += [info for method, shape in zip(methods, shapes, strict=True) if shape for info in method(shape)]
        infos += [info for _ in range(SYNCS) for info in self._sync()]
        infos += [info for number in range(SAVES) for info in self._save(number)]
        spans = [span for info in infos for span in info["spans"]]
        found = of_spans(spans, model=self.arch, device="cpu-core", neighbours=neighbours, source="sweep")
        return found + [self._dispatch(info, neighbours) for info in infos if "wall_s" in info]

    def _generate(self, shape: tuple[int, int, int]) -> list[Any]:
        sequences, prompt, longest = shape
        self._step += 1
        lengths = np.linspace(max(2, longest // 2), longest, sequences).round().astype(int)
        rng = np.random.default_rng(self._step)  # fresh prompts: nothing is cached
        requests = [
            Request(prompt_index=i, prompt=rng.integers(8, len(IDS), prompt).tolist(), num_tokens=int(n), seed=i)
            for i, n in enumerate(lengths)
        ]
        return [ray.get(self.engine.__ray_call__.remote(_run_requests, self._step, requests))]

    def _score(self, shape: tuple[int, int]) -> list[Any]:
        self._step += 1
        samples = ray.put(self._samples(*shape))
        return [
            self._timed(worker.score, self._step, samples, results=2)[1] for worker in (self.reference, self.reward)
        ] + [self._timed(self.critic.values, self._step, samples, results=2)[1]]

    def train(self, shape: tuple[int, int, int]) -> list[Any]:
        self._step += 1
        samples = self._samples(*shape)
        numbers = [np.zeros(len(row), dtype=np.float32) for row in samples.logprobs]
        values = {"values": dict(enumerate(numbers))}
        columns = ({"rewards": np.linspace(0, 1, len(samples))}, {"reference_logprobs": samples.logprobs}, values)
        batch, prepared = self._timed(
            self.actor.advantage, self._step, ray.put(samples), *map(ray.put, columns), results=2
        )
        others = [rank.update.remote(self._step, batch) for rank in self.ranks[1:]]
        updates = [self._timed(trainer.update, self._step, batch)[0] for trainer in (self.actor, self.critic)]
        return [prepared, *updates, *ray.get(others)]

    def _sync(self) -> list[Any]:
        self._step += 1
        return list(
            ray.get([self.actor.send_weights.remote(self._step), self.engine.receive_weights.remote(self._step)])
        )

    def _save(self, number: int) -> list[Any]:
        with tempfile.TemporaryDirectory(prefix="lab-measure-") as folder:
            return list(
                ray.get([self.actor.save.remote(Path(folder), number), self.critic.save.remote(Path(folder), number)])
            )

    def _samples(self, number: int, tokens: int, last: int = 0) -> Samples:
        rng = np.random.default_rng(number * tokens)
        lengths = [tokens] * (number - 1) + [last or tokens]
        prompt = min(lengths) // 3
        return Samples(
            step=self._step, policy_version=self._step, prompts=np.arange(number),
            num_prompt_tokens=np.full(number, prompt),
            tokens=[rng.integers(8, len(IDS), length) for length in lengths],
            logprobs=[np.full(length - prompt, -4.0, dtype=np.float32) for length in lengths],
        )  # fmt: skip

    def _timed(self, method: Any, *arguments: Any, results: int = 1) -> tuple[Any, ...]:
        """Calls a worker's method; the info gets the wall time as the driver saw it. Data stays a reference."""
        start = time.perf_counter()
        called = method.options(num_returns=results).remote(*arguments)
        *data, reference = called if results > 1 else [called]
        info = ray.get(reference)
        return *data, info | {"wall_s": time.perf_counter() - start}

    def _dispatch(self, info: dict[str, Any], neighbours: int) -> Measurement:
        inside = sum(span.seconds for span in info["spans"] if not span.op)
        return Measurement(
            op="dispatch", quantities={"calls": 1.0, "bytes": 0.0}, seconds=max(info["wall_s"] - inside, 1e-6),
            model=self.arch, neighbours=neighbours, source="sweep",
        )  # fmt: skip


def _run_requests(worker: RolloutWorker, step: int, requests: list[Request]) -> dict[str, list[Span]]:
    """In the engine's process: a rollout of given requests instead of the scenario's."""
    with worker.recorder.stage("rollout", step) as notes:
        worker._run(step, requests, notes)
    return {"spans": worker.recorder.take()}


def collapse(measurements: Iterable[Measurement]) -> list[Measurement]:
    """One measurement for each op and quantities: the median of its repeats, their number in `repeats`."""
    groups: dict[tuple[Any, ...], list[Measurement]] = {}
    for point in measurements:
        key = (point.op, point.model, point.neighbours, *sorted(point.quantities.items()))
        groups.setdefault(key, []).append(point)
    return [
        Measurement(
            op=same[0].op, quantities=same[0].quantities, seconds=median(point.seconds for point in same),
            model=same[0].model, device=same[0].device, neighbours=same[0].neighbours, repeats=len(same), source=same[0].source,
        )
        for same in groups.values()
    ]  # fmt: skip
