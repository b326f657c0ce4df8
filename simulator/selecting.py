"""Which of several answers is kept: the best of N, or the best beams."""

from __future__ import annotations

import numpy as np

from lab.drawing import tried
from lab.fates import DROPPED, INDEX, STEP
from lab.policies.sampling import best_of
from lab.workload import uniform
from simulator.blocks import Ints
from simulator.world import World

REWARDS = 21
"""the stream of random numbers that stand for the rewards of answers: which one is best does not depend on its length"""


def select(world: World, stage: str, step: int) -> None:
    """After a stage has ended: the batch keeps what is trained on, the rest is dropped.

    Beams are chosen by the engines at the end of the rollout, the best of N answers once the rewards are known.
    """
    sampling, ledger = world.scenario.sampling, world.ledger
    if stage == "rollout" and sampling.beams > 1:
        groups = _groups(world, step, tried(world.scenario))
        kept = groups[:, : world.scenario.workload.samples_per_prompt].ravel()
    elif stage == "reward" and sampling.best_of > 1:
        groups = _groups(world, step, sampling.best_of)
        kept = groups[np.arange(len(groups)), best_of(_rewards(world, groups))]
    else:
        return
    ledger.settle(np.setdiff1d(groups, kept), DROPPED)
    ledger.batches[step] = kept


def _groups(world: World, step: int, size: int) -> Ints:
    """(groups, size) samples of the batch that compete with each other."""
    batch, ledger = world.ledger.batches[step], world.ledger
    order = np.lexsort((ledger.column(INDEX)[batch], ledger.column(STEP)[batch]))
    return np.asarray(batch[order].reshape(-1, size))


def _rewards(world: World, samples: Ints) -> np.ndarray:
    """A draw for each sample, from what it is a sample of."""
    steps, indices = world.ledger.column(STEP)[samples], world.ledger.column(INDEX)[samples]
    return uniform(world.scenario.seed, REWARDS, steps, indices, 0)
