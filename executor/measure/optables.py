"""What torch.profiler saw in one pass of every kind: operators with shapes, times and FLOPs.

The functions run in the workers' own processes. A profiled pass is slower than others and is no measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from executor.experience import Samples
from executor.measure import iterations
from executor.rollout import RolloutWorker
from executor.scoring import ReferenceWorker
from executor.trainer import Trainer

Row = dict[str, Any]


@contextmanager
def profiled(kind: str, rows: list[Row]) -> Iterator[None]:
    """Appends to `rows` one row for each operator and shapes of its inputs."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities, record_shapes=True, with_flops=True) as found:
        yield
    for event in found.key_averages(group_by_input_shape=True):
        rows.append(
            {
                "kind": kind, "operator": event.key, "shapes": str(event.input_shapes), "calls": int(event.count),
                "self_cpu_us": float(event.self_cpu_time_total), "cpu_us": float(event.cpu_time_total),
                "self_device_us": float(event.self_device_time_total), "flops": float(event.flops or 0),
            }
        )  # fmt: skip


def engine(worker: RolloutWorker, step: int) -> list[Row]:
    """A prefill of 8 prompts of 64 tokens, and the decode iterations after it."""
    rows: list[Row] = []
    with profiled("rollout", rows):
        iterations.decode(worker, step, 8, 64)
    return rows


def scoring(worker: ReferenceWorker, step: int, samples: Samples) -> list[Row]:
    rows: list[Row] = []
    with profiled("logprob", rows):
        worker.score(step, samples)
    worker.recorder.take()
    return rows


def training(trainer: Trainer, samples: Samples) -> list[Row]:
    """Forward, backward and optimizer step of one micro-batch, each on its own."""
    rows: list[Row] = []
    learner = trainer.learner
    batch = learner.groups(samples, range(len(samples)))[0]
    learner.engine.set_gradient_accumulation_boundary(True)
    with profiled("forward", rows):
        loss = learner.output(batch).mean()
    with profiled("backward", rows):
        learner.engine.backward(loss)
    with profiled("optimizer", rows):
        learner._apply()
    return rows
