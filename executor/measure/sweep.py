"""Takes the workers of a run through the shapes of a grid and collects what they measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np
import ray

from executor.experience import Samples
from executor.measure import iterations, training
from executor.measure.grids import FITTED, HELD_OUT, MINIBATCH, Grid
from executor.tokenizer import IDS
from executor.workers import HOST, Workers
from lab.measurement import HELD_OUT as SOURCE_HELD_OUT
from lab.measurement import Measurement, of_spans

SYNCS, SAVES, THREADED = 3, 2, 3
Task = Callable[[], list[Measurement]]


class Sweep:
    """The workers of one scenario. `setup` makes them ready, `round` measures everything once."""

    def __init__(self, workers: Workers, arch: str) -> None:
        self.arch, self.actors, self._step, self.neighbours = arch, workers.actors, 0, 0
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
        self.in_process(self.engine, iterations.rollout, (4, 16, 4))
        self._score((4, 16))
        self.train((MINIBATCH, 160, 160))  # the largest: later passes find its memory
        self._sync(1.0)

    def round(self, neighbours: int) -> list[Measurement]:
        """Every op once over all shapes; workers take turns, as in a run, so that none finds its caches warm.

        Held-out points are measured where nothing else runs.
        """
        self.neighbours = neighbours
        engine = self._engine_tasks(FITTED, "sweep")
        engine += [] if neighbours else self._engine_tasks(HELD_OUT, SOURCE_HELD_OUT)
        scored = [lambda shape=shape: self._of(self._score(shape)) for shape in FITTED.scored]
        trained = [lambda shape=shape: self._of(self.train(shape)) for shape in FITTED.trained]
        trained += [lambda shape=shape: self._of(self._split(shape)) for shape in FITTED.split]
        order = np.random.default_rng(self._step)  # another one in every round: a slow minute falls on any points
        for tasks in (engine, scored, trained):
            order.shuffle(tasks)
        width = -(-len(engine) // len(trained))
        groups = [engine[i : i + width] for i in range(0, len(engine), width)]
        found = []
        for group, score, train in zip_longest(groups, scored, trained):
            for task in [*(group or []), *filter(None, (score, train))]:
                found += task()
        for _ in range(SYNCS):
            found += [point for share in training.SHARES for point in self._of(self._sync(share))]
        for _ in range(SAVES):
            found += self._tagged(self.in_process(self.actor, training.checkpoints, step=False))
        return found

    def threaded(self, number: int) -> list[Measurement]:
        """Large engine steps, scores and updates with so many threads each, and nothing beside them."""

        def taken(worker: Any, function: Callable[..., Any], data: Any) -> Any:
            self._step += 1
            arguments = (number, function, self._step, data)
            return self.in_process(worker, training.with_threads, *arguments, step=False)

        found = []
        for _ in range(THREADED):
            found += self._points("sweep", taken(self.engine, iterations.mixed, FITTED.mixed[0]))
            for shape in FITTED.threaded:
                spans = taken(self.reference, training.scored, ray.put(self.samples(*shape)))
                spans += taken(self.actor, training.updated, self.batch((*shape, shape[1]))[0])
                found += self._of([{"spans": spans}])
        kept = [point for point in found if point.op in ("engine_step", "logprob", "forward", "backward")]
        return [msgspec.structs.replace(point, threads=number) for point in kept]

    def adapted(self) -> list[Measurement]:
        """Updates of adapters."""
        batches = [self.batch((*shape, shape[1]))[0] for shape in FITTED.threaded]
        return self._of([self.in_process(self.actor, training.adapted, self.arch, *batches)])

    def joint(self, arch: str, shapes: Sequence[tuple[int, int, int]]) -> list[Measurement]:
        """Updates of all ranks at once, each on a core of its own: what they tell each other, and passes beside passes."""
        batches = [self.batch(shape)[0] for shape in shapes]
        self._step += 1
        called = [rank.__ray_call__.remote(training.joint, self._step, arch, *batches) for rank in self.ranks]
        found = [point for spans in ray.get(called) for point in self._of([{"spans": spans}])]
        return [_beside(point, len(self.ranks)) for point in found]

    def trained(self) -> list[Measurement]:
        """Every training shape once, on the actor and the critic."""
        infos = [info for shape in FITTED.trained for info in self.train(shape)]
        spans = [span for info in infos for span in info["spans"] if span.op]
        return self._of([{"spans": spans}])

    def _engine_tasks(self, grid: Grid, source: str) -> list[Task]:
        decode = [lambda shape=shape: self._iterations(source, iterations.decode, *shape) for shape in grid.decode]
        mixed = [lambda part=part: self._iterations(source, iterations.mixed, part) for part in grid.mixed]
        rollouts = [
            lambda shape=shape: self._of([self.in_process(self.engine, iterations.rollout, shape)], source)
            for shape in grid.rollouts
        ]
        return [*decode, *mixed, *rollouts]

    def _iterations(self, source: str, function: Callable[..., Any], *shape: Any) -> list[Measurement]:
        return self._points(source, self.in_process(self.engine, function, *shape))

    def _points(self, source: str, found: Sequence[iterations.Point]) -> list[Measurement]:
        return [
            Measurement(
                op="engine_step", quantities=quantities, seconds=seconds, model=self.arch, source=source, point=name,
                neighbours=self.neighbours,
            )
            for name, quantities, seconds in found
        ]  # fmt: skip

    def in_process(self, worker: Any, function: Callable[..., Any], *arguments: Any, step: bool = True) -> Any:
        """What a function returns in a worker's process: of the worker, the number of the step if asked, and these."""
        self._step += 1
        return ray.get(worker.__ray_call__.remote(function, *([self._step] if step else []), *arguments))

    def _of(self, infos: list[dict[str, Any]], source: str = "sweep") -> list[Measurement]:
        """Measurements in what workers return."""
        spans = [span for info in infos for span in info["spans"]]
        found = of_spans(spans, model=self.arch, device="cpu-core", neighbours=self.neighbours, source=source)
        return found + [self._dispatch(info, source) for info in infos if "wall_s" in info]

    def _tagged(self, points: list[Measurement]) -> list[Measurement]:
        about = {"model": self.arch, "neighbours": self.neighbours, "source": "sweep"}
        return [msgspec.structs.replace(point, **about) for point in points]

    def _score(self, shape: tuple[int, int]) -> list[Any]:
        self._step += 1
        samples = ray.put(self.samples(*shape))
        return [
            self._timed(worker.score, self._step, samples, results=2)[1] for worker in (self.reference, self.reward)
        ] + [self._timed(self.critic.values, self._step, samples, results=2)[1]]

    def _split(self, shape: tuple[int, int, int]) -> list[Any]:
        batch, _ = self.batch(shape)
        return [
            self.in_process(trainer, training.update, batch, MINIBATCH // 2) for trainer in (self.actor, self.critic)
        ]

    def train(self, shape: tuple[int, int, int]) -> list[Any]:
        batch, prepared = self.batch(shape)
        others = [rank.update.remote(self._step, batch) for rank in self.ranks[1:]]
        updates = [self._timed(trainer.update, self._step, batch)[0] for trainer in (self.actor, self.critic)]
        return [prepared, *updates, *ray.get(others)]

    def batch(self, shape: tuple[int, int, int]) -> tuple[Any, Any]:
        """A reference to samples with their advantages, and what their preparation measured."""
        self._step += 1
        samples = self.samples(*shape)
        numbers = [np.zeros(len(row), dtype=np.float32) for row in samples.logprobs]
        values = {"values": dict(enumerate(numbers))}
        columns = ({"rewards": np.linspace(0, 1, len(samples))}, {"reference_logprobs": samples.logprobs}, values)
        batch, prepared = self._timed(
            self.actor.advantage, self._step, ray.put(samples), *map(ray.put, columns), results=2
        )
        return batch, prepared

    def _sync(self, share: float) -> list[Any]:
        self._step += 1
        sent = self.actor.__ray_call__.remote(training.send, self._step, share)
        return list(ray.get([sent, self.engine.receive_weights.remote(self._step)]))

    def samples(self, number: int, tokens: int, last: int = 0) -> Samples:
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

    def _dispatch(self, info: dict[str, Any], source: str) -> Measurement:
        inside = sum(span.seconds for span in info["spans"] if not span.op)
        return Measurement(
            op="dispatch", quantities={"calls": 1.0, "bytes": 0.0}, seconds=max(info["wall_s"] - inside, 1e-6),
            model=self.arch, neighbours=self.neighbours, source=source,
        )  # fmt: skip


def _beside(point: Measurement, ranks: int) -> Measurement:
    """What a rank does on its own has the other ranks for neighbours; what they do together is what it is."""
    together = point.op in ("grad_sync", "update_host") or "gathers" in point.quantities
    return point if together else msgspec.structs.replace(point, neighbours=ranks - 1)
