"""Samples that come from a data set instead of from engines."""

from __future__ import annotations

import numpy as np

from lab.fates import BUFFERED
from simulator.world import World


def read(world: World, step: int) -> None:
    """The batch of a step, where the algorithm has a data set and the step none yet; it was read ahead and costs no time."""
    ledger = world.ledger
    if step in ledger.batches or world.scenario.algorithm.rolls_out:
        return
    numbers = ledger.issue(step, np.arange(world.scenario.workload.samples_per_step), step)
    ledger.settle(numbers, BUFFERED)
    ledger.batches[step] = numbers
