"""Every sample of a simulation from its issue to its fate, in columns."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lab.scenario import Scenario
from simulator.blocks import Ints

FATES = ("in_flight", "buffered", "trained", "dropped", "aborted", "lost")
IN_FLIGHT, BUFFERED, TRAINED, DROPPED, ABORTED, LOST = range(6)
"""fates: being generated or scored, waiting for the trainer, trained on, too old or surplus, stopped, gone in a fault"""
WASTED = (DROPPED, ABORTED, LOST)
STEP, INDEX, PROMPT, RESPONSE, VERSION, FATE, MADE = range(7)
"""columns: step and place in it that the sample was drawn for (prompt × samples_per_prompt + sample), tokens of prompt
and response, policy version that began it, fate, tokens that were generated for it"""


class Ledger:
    """Samples in order of issue; a sample's number is its row."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._rows = np.zeros((0, 7), np.int64)
        self._size = 0
        self.batches: dict[int, Ints] = {}
        """by step: the samples that it trains, in the order in which they are packed"""
        self._drawn = lru_cache(maxsize=4)(self._draw)

    def __len__(self) -> int:
        return self._size

    def column(self, column: int) -> Ints:
        """(samples,) a view on one column."""
        return self._rows[: self._size, column]

    def issue(self, step: int, indices: npt.ArrayLike, version: int) -> Ints:
        """Samples of a step's workload go out under a policy version; returns their numbers."""
        chosen = np.asarray(indices, np.int64)
        prompt, response = self._drawn(step)
        numbers = np.arange(self._size, self._size + len(chosen))
        self._reserve(len(chosen))
        rows = self._rows[numbers]
        rows[:, STEP], rows[:, INDEX], rows[:, VERSION] = step, chosen, version
        rows[:, PROMPT], rows[:, RESPONSE], rows[:, FATE] = prompt[chosen], response[chosen], IN_FLIGHT
        self._rows[numbers] = rows
        return numbers

    def lengths(self, step: int) -> Ints:
        """Tokens of every sample of a step's batch, prompt and response."""
        batch = self._rows[self.batches[step]]
        return np.asarray(batch[:, PROMPT] + batch[:, RESPONSE])

    def settle(self, numbers: npt.ArrayLike, fate: int) -> None:
        """These samples met their fate."""
        self._rows[np.asarray(numbers, np.int64), FATE] = fate

    def generated(self, numbers: npt.ArrayLike, tokens: npt.ArrayLike) -> None:
        """So many response tokens were generated for these samples, in all."""
        self._rows[np.asarray(numbers, np.int64), MADE] = tokens

    def counts(self) -> dict[str, int]:
        """How many were issued, and how many met each fate."""
        found = np.bincount(self.column(FATE), minlength=len(FATES)).tolist()
        return {"issued": len(self)} | dict(zip(FATES, found, strict=True))

    def wasted_tokens(self) -> int:
        """Response tokens generated for samples that are never trained on."""
        return int(self.column(MADE)[np.isin(self.column(FATE), WASTED)].sum())

    def _draw(self, step: int) -> tuple[Ints, Ints]:
        workload, seed = self._scenario.workload, self._scenario.seed
        prompt = np.repeat(workload.prompt_lengths(seed, step), workload.samples_per_prompt)
        return prompt, workload.response_lengths(seed, step).ravel()

    def _reserve(self, number: int) -> None:
        self._size += number
        if self._size > len(self._rows):
            more = np.zeros((max(self._size, 2 * len(self._rows)) - len(self._rows), self._rows.shape[1]), np.int64)
            self._rows = np.concatenate([self._rows, more])
