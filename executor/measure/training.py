"""Weights, checkpoints and optimizers of more than one size; all of this runs in a trainer's own process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from executor.experience import Samples
from executor.measure.plan import scenario
from executor.scoring import ReferenceWorker
from executor.trainer import Trainer
from lab.measurement import Measurement
from lab.timeline import Span

SHARES = (0.25, 1.0)
"""of the tensors that a weight transfer sends"""
ADAPTER_REPEATS, JOINT_REPEATS = 3, 3
JOINT_STAGES = (0, 1)
"""of ZeRO, where gradients are averaged between passes; the others average them inside"""


def send(trainer: Trainer, step: int, share: float) -> dict[str, Any]:
    """Sends the first part of the weights to the engine, as the trainer sends all of them."""
    items = list(trainer.learner.weights().items())
    with trainer.recorder.stage("weight_sync", step), trainer.recorder.op("transfer") as notes:
        assert trainer.offering.sender is not None, "they have met"
        size = trainer.offering.sender.send(items[: max(1, round(share * len(items)))])
        notes |= {"bytes": size, "quantities": {"calls": 1.0, "bytes": size}}
    return {"spans": trainer.recorder.take()}


def update(trainer: Trainer, step: int, batch: Samples, minibatch: int) -> dict[str, Any]:
    """An update in mini-batches of another size than the scenario's."""
    own = trainer.scenario
    split = own.update.model_copy(update={"minibatch_samples": minibatch})
    trainer.scenario = own.model_copy(update={"update": split})
    try:
        return trainer.update(step, batch)
    finally:
        trainer.scenario = own


def checkpoints(trainer: Trainer) -> list[Measurement]:
    """Writes and reads back a checkpoint of the weights alone, and one with the optimizer's state."""
    from executor.checkpoint import Rank, verify_part
    from executor.saving import shard_of
    from executor.shard import Shard, read, write

    found: list[Measurement] = []
    rank = Rank(role=trainer.role, rank=0, world=1)
    whole = shard_of(trainer.learner, rank)
    with tempfile.TemporaryDirectory(prefix="lab-measure-") as folder:
        for name, shard in (("weights", Shard(weights=whole.weights, tensors={}, numbers={})), ("all", whole)):
            path = Path(folder) / name
            start = time.perf_counter()
            size = write(path, rank, shard, {})
            middle = time.perf_counter()
            verify_part(path, rank)
            read(path, rank)
            end = time.perf_counter()
            quantities = {"calls": 1.0, "bytes": size}
            found += [
                Measurement(op="checkpoint", quantities=quantities, seconds=middle - start),
                Measurement(op="checkpoint_read", quantities=quantities, seconds=end - middle),
            ]
    return found


def at_size(trainer: Trainer, step: int, batch: Samples, arch: str, repeats: int) -> dict[str, Any]:
    """Spans of updates of another architecture in the same process, and Measurements of its checkpoints."""
    from executor.learner import Learner

    own = trainer.learner
    trainer.learner = Learner(scenario(arch), *_as(trainer))
    try:
        spans = [span for number in range(repeats + 1) for span in trainer.update(step + number, batch)["spans"]]
        written = [point for _ in range(repeats) for point in checkpoints(trainer)]
    finally:
        trainer.learner = own
    return {"spans": [span for span in spans if span.step > step], "checkpoints": written}


def joint(trainer: Trainer, step: int, arch: str, *batches: Samples) -> list[Span]:
    """Spans of this rank's updates of an architecture together with the other ranks, without ZeRO and with its first
    stage by turns, every batch JOINT_REPEATS times; all ranks have to call this."""
    from executor.learner import Learner

    own = trainer.learner
    plans = [scenario(arch, trainer.world, (stage, 0)) for stage in JOINT_STAGES]
    learners = [Learner(plan, *_as(trainer)) for plan in plans]
    spans: list[Span] = []
    try:
        for number, batch in ((number, batch) for number in range(1 + JOINT_REPEATS) for batch in batches):
            for learner in learners:
                trainer.learner = learner
                found = trainer.update(step + len(spans), batch)["spans"]
                spans += found if number else []  # the first time allocates
    finally:
        trainer.learner = own
    return spans


def adapted(trainer: Trainer, step: int, arch: str, *batches: Samples) -> dict[str, Any]:
    """Spans of updates of adapters in the same process, every batch ADAPTER_REPEATS times."""
    from executor.learner import Learner

    own = trainer.learner
    trainer.learner = Learner(scenario(arch, adapters=True), *_as(trainer))
    try:
        numbers = range(step, step + 1 + ADAPTER_REPEATS)
        spans = [span for number in numbers for batch in batches for span in trainer.update(number, batch)["spans"]]
    finally:
        trainer.learner = own
    return {"spans": [span for span in spans if span.step > step and span.op in ("forward", "backward")]}


def scored(worker: ReferenceWorker, step: int, samples: Samples) -> list[Span]:
    """Spans of a scoring call."""
    spans: list[Span] = worker.score(step, samples)[1]["spans"]
    return spans


def updated(trainer: Trainer, step: int, batch: Samples) -> list[Span]:
    """Spans of an update."""
    spans: list[Span] = trainer.update(step, batch)["spans"]
    return spans


def with_threads(worker: Any, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns that computes with so many threads: their number is the calling thread's own."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        return function(worker, *arguments)
    finally:
        torch.set_num_threads(before)


def _as(trainer: Trainer) -> tuple[Any, ...]:
    """What a learner is given after its scenario."""
    return trainer.role, trainer.rank, trainer.world, trainer.worker.threads, trainer.recorder
