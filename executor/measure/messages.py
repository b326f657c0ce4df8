"""What a call between processes takes from the cores: the seconds of both ends, whatever else they could have done meanwhile."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray

from executor.calls import value
from lab.measurement import Measurement

BURST, BURSTS, ROUNDS = 5, 20, 5
"""calls in a row, as many as a prompt whose samples have ended causes in a run without a barrier"""
PAUSE_S = 0.03
"""between two bursts: both ends find their caches cold then. Back to back a call takes 1.1 ms, after 10 ms of rest 2 ms"""
WARM = 20
"""calls that go first"""
NUMBERS = list(range(8))
"""what is told with each"""


class Listener:
    """Answers with what it is told."""

    async def tell(self, numbers: list[int]) -> list[int]:
        return numbers

    async def spent_s(self) -> float:
        """Of its process, on cores."""
        return time.process_time()


def messages() -> list[Measurement]:
    """Calls of an actor, one after the other, from a process that awaits each; this one."""
    actor: Any = ray.remote(Listener).options(num_cpus=0).remote()  # type: ignore[attr-defined]
    try:
        return asyncio.run(_told(actor))
    finally:
        ray.kill(actor)


async def _told(actor: Any) -> list[Measurement]:
    await _spent(actor, WARM)
    found = []
    for _ in range(ROUNDS):
        seconds = (await _spent(actor, BURST) - await _spent(actor, 0)) / (BURST * BURSTS)
        found.append(Measurement(op="message", quantities={"calls": 1.0}, seconds=max(seconds, 1e-6), source="sweep"))
    return found


async def _spent(actor: Any, number: int) -> float:
    """Seconds on cores of both processes while BURSTS pauses pass, before each of which there are so many calls."""
    before = await value(actor.spent_s.remote()) + time.process_time()
    for _ in range(BURSTS):
        for _ in range(number):
            await value(actor.tell.remote(NUMBERS))
        await asyncio.sleep(PAUSE_S)
    return float(await value(actor.spent_s.remote()) + time.process_time() - before)
