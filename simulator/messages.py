"""What telling each other takes from the cores of a machine without GPUs: driver, buffer and engines share them with the work.

Without a barrier every prompt's samples are asked for, given out, sent and announced while engines and trainers compute.
Beside GPUs the host has cores enough, and all of it is free.
"""

from __future__ import annotations

from lab.policies.buffer import LINGER_S
from simulator.world import Process, World

GIVEN = 2
"""calls with which an engine asks for samples and gets them"""
DELIVERED = 2
"""calls when the samples of a prompt have ended: one takes them to the buffer, one tells the driver"""


class Messages:
    """Calls between the processes of a run, as work on the cores of the driver's machine."""

    def __init__(self, world: World) -> None:
        self._world, self._worker = world, world.scenario.team("actor", "train")[0]
        self._cost = world.on_cpu(self._worker) and world.costs.measured(self._worker, "message")
        self._announced_s = -LINGER_S

    def given(self) -> None:
        """An engine gets the samples of a step's prompts."""
        self._spend(GIVEN)

    def delivered(self, is_batch: bool) -> None:
        """All samples of a prompt have ended; `is_batch`: enough are in the buffer now."""
        announces = is_batch or self._world.now - self._announced_s >= LINGER_S
        if announces:
            self._announced_s = self._world.now
        self._spend(DELIVERED + announces)

    def _spend(self, num_calls: int) -> None:
        if self._cost:
            self._world.env.process(self._work(num_calls))

    def _work(self, num_calls: int) -> Process:
        seconds = num_calls * self._world.cost(self._worker, "message", {"calls": 1.0}).seconds
        yield from self._world.cores(self._worker).work(self._worker, "message", seconds, threads=1)
