"""Scores that are kept: what a version of the reward has scored once is not scored again."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from executor.experience import Samples
from executor.rewards import Columns
from executor.services import Score, whole
from lab.services import ScoreCache

CAPACITY = 1_000_000
"""scores; beyond it the oldest are forgotten"""

Key = tuple[int, bytes]
"""tokens of the prompt, and ids of prompt and response"""


class Kept:
    """Rewards by (version of the reward, prompt, response), around something that scores.

    A version lasts `version_steps` steps; with a new one everything is forgotten. A hit gives the reward that was
    computed, to the bit, so a run with a cache learns what it would without. Several threads may ask at once.
    """

    def __init__(self, score: Score, cache: ScoreCache, capacity: int = CAPACITY) -> None:
        self._score, self._every, self._capacity = score, cache.version_steps, capacity
        self._version, self._lock = 0, threading.Lock()
        self._rows: dict[Key, dict[str, float]] = {}

    def score(self, samples: Samples, notes: dict[str, Any]) -> Columns:
        """Columns of numbers, [N] each; notes hits, among which are samples that equal an earlier one of the same call."""
        wanted = [_key(samples, i) for i in range(len(samples))]
        with self._lock:
            self._renew(samples.step)
            found = {key: self._rows[key] for key in wanted if key in self._rows}
        missing = sorted({key: i for i, key in reversed(list(enumerate(wanted))) if key not in found}.values())
        if missing:
            columns = self._score(samples.take(missing), notes)
            rows = {wanted[i]: {name: float(column[row]) for name, column in columns.items()}
                    for row, i in enumerate(missing)}  # fmt: skip
            found |= rows
            with self._lock:
                self._keep(rows)
        tokens = sum(samples.lengths)
        notes |= {"hits": len(samples) - len(missing), "samples": len(samples), "tokens": tokens}
        return whole([({name: np.asarray([number]) for name, number in found[key].items()}, 0) for key in wanted])

    def _renew(self, step: int) -> None:
        version = step // self._every if self._every else 0
        if version != self._version:
            self._version, self._rows = version, {}

    def _keep(self, rows: dict[Key, dict[str, float]]) -> None:
        self._rows |= rows
        for key in list(self._rows)[: max(len(self._rows) - self._capacity, 0)]:
            del self._rows[key]


def _key(samples: Samples, i: int) -> Key:
    return int(samples.num_prompt_tokens[i]), samples.tokens[i].astype(np.int64).tobytes()
