"""The buffer's process fails: another takes its place, what waited in it is generated again, and batches that are being
trained on stay where they are, for they have left it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray

from executor.buffer import CALLS_AT_ONCE, Buffer
from lab.targets import BUFFER

if TYPE_CHECKING:
    from executor.stages import Stages
    from executor.workers import Workers


async def start(workers: Workers, stages: list[str]) -> Any:
    """A buffer's actor, once it answers; `stages` score samples as they come."""
    actor = workers.beside(BUFFER, Buffer, stages, near="actor", threads=CALLS_AT_ONCE)
    await _pid(actor)
    return actor


async def refill(workers: Workers, stages: Stages) -> tuple[int, int]:
    """Another buffer in the place of one that failed: samples that were lost with it, and the response tokens of those
    that had waited for the trainer."""
    assert stages.production is not None, "nothing else has a buffer"
    with suppress(Exception):  # it is dead
        ray.kill(workers.others[BUFFER])
    before = stages.production.fates.counts()["lost"]
    tokens = await stages.production.spilt(await start(workers, stages.served))
    return stages.production.fates.counts()["lost"] - before, tokens


async def _pid(actor: Any) -> int:
    pid: int = await actor.pid.remote()
    return pid
