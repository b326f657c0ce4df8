"""Doing updates again: the ranks of a role in fresh processes, from a checkpoint, through the records of the steps after it.

The same trainer, the same threads, the same order: on the same machine the numbers come out bit for bit.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from executor import checkpoint, records
from executor.experience import Samples
from executor.workers import HOST, environment, free_port
from lab.errors import InputError
from lab.scenario import Scenario

START = "the first weights"
MAX_REPEATED = 64
"""steps that are done again for one, at most"""


class Unrepeatable(Exception):
    """Why the updates of a step cannot be done again."""


def repeated(
    folder: Path, scenario: Scenario, digest: str, role: str, step: int
) -> tuple[str, dict[str, float | None]]:
    """What a role's trainer reports of a step, and where it started from. `digest`: of the records.

    Raises Unrepeatable where a record between is missing, or the nearest checkpoint lies too far back.
    """
    first = _first(folder, step)
    if step - first >= MAX_REPEATED:
        raise Unrepeatable(f"the checkpoint before it is {step - first} steps back, more than {MAX_REPEATED}")
    try:
        batches = [records.read(records.path_of(folder, k), digest) for k in range(first, step + 1)]
    except InputError as error:
        raise Unrepeatable(f"the steps since the checkpoint before it are needed: {error.problem}") from None
    source = checkpoint.folder_of(folder / "checkpoints", first - 1) if first else None
    ranks = range(len(scenario.team(role, "train")))
    port = free_port()
    with ProcessPoolExecutor(len(ranks), mp_context=get_context("spawn")) as processes:
        calls = [processes.submit(_update, scenario, role, rank, port, source, batches) for rank in ranks]
        numbers = [call.result() for call in calls]
    return (START if source is None else f"checkpoint {source.name}"), numbers[0]


def _first(folder: Path, step: int) -> int:
    """The step from which updates are done again: that after the latest checkpoint before `step` that is kept."""
    kept = [k for k in checkpoint.steps(folder / "checkpoints") if k < step]
    return kept[-1] + 1 if kept else 0


def _update(
    scenario: Scenario, role: str, rank: int, port: int, source: Path | None, batches: list[Samples]
) -> dict[str, float | None]:
    """The numbers of the last batch's update. In a process of its own: its environment is set before torch is loaded."""
    team = scenario.team(role, "train")
    os.environ.update(environment(team[rank].threads))
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(len(team)), LOCAL_SIZE=str(len(team)),
        MASTER_ADDR=HOST, MASTER_PORT=str(port),
    )  # fmt: skip
    from executor.trainer import Trainer

    trainer = Trainer(team[rank], rank, len(team), role, scenario, port)
    trainer.ready()
    if source is not None:
        trainer.restore(source, batches[0].step)
    learning: dict[str, float | None] = {}
    for samples in batches:
        learning = trainer.update(samples.step, samples)["learning"]
    return learning
