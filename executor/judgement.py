"""The report on a reward model that a run has trained: it scores held-out pairs of every kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from executor.datasets import Dataset
from executor.experience import Samples
from lab.reward_report import FILE, report
from lab.rows import ATTRIBUTES
from lab.runs import write_atomically
from lab.scenario import Scenario

NUM_PAIRS = 600
"""of a task; of a file all that were held out"""
Scores = Callable[[Samples], Sequence[float]]
"""one number of each sample"""


def judged(pairs: Samples, scores: Sequence[float]) -> dict[str, Any]:
    """The report on scores [N] of pairs (chosen 2i, rejected 2i + 1), which know what they are about."""
    both = np.asarray(scores, dtype=np.float64).reshape(-1, 2)
    lengths = (np.asarray(pairs.lengths) - pairs.num_prompt_tokens).reshape(-1, 2)
    about = {name: pairs.columns[name][::2].tolist() for name in ATTRIBUTES if name in pairs.columns}
    return report(both[:, 0], both[:, 1], lengths, about)


def judge(scenario: Scenario, scores: Scores) -> dict[str, Any]:
    """The report on whatever gives scores, on the held-out pairs of a scenario."""
    pairs = Dataset(scenario).judged(NUM_PAIRS)
    return judged(pairs, scores(pairs))


async def write(scenario: Scenario, trainers: Sequence[Any], folder: Path, step: int) -> None:
    """Scores held-out pairs with the weights after `step` steps and writes the report into the run's folder.

    Every rank takes part in every pass: sharded weights are gathered together. Without a held-out pair nothing is
    written.
    """
    pairs = Dataset(scenario).judged(NUM_PAIRS)
    if not len(pairs):
        return
    calls = [rank.logprobs.remote(pairs) for rank in trainers]
    first, *_ = [await call for call in calls]
    data = {"data": scenario.data.task or scenario.data.sha256, "step": step, "digest": scenario.digest}
    found = judged(pairs, [float(score) for [score] in first])
    write_atomically(folder / FILE, json.dumps(data | found, indent=1, ensure_ascii=False).encode())
