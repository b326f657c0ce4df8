"""The samples of a run without a barrier, over all attempts at it: what a checkpoint holds of them, and what is left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lab.fates import INDEX, STEP, TRAINED, Fates, Ints
from lab.scenario import Scenario

Ranges = Sequence[Sequence[int]]
"""whole numbers from the first of each pair up to its second, which is left out; rising, and none touches another"""


class Past:
    """The samples of a run, and what is left of those of earlier attempts at it."""

    def __init__(
        self, scenario: Scenario, first_step: int = 0, state: dict[str, Any] | None = None, before: Past | None = None
    ) -> None:
        """`state` as `state` gave it to a checkpoint; samples that were under way then are lost, and go out again.
        `before`: the books of an attempt that went on after it, all of whose samples are known."""
        self.fates, self.first_step = Fates(scenario), first_step
        self._per_step = scenario.workload.samples_per_step
        self._places: Ranges = [] if state is None else state["trained"]
        """of what was trained in the workload as a whole: step × samples of a step + place in it"""
        self._trained_before = size(self._places)
        self._gone = dict.fromkeys(("dropped", "aborted", "lost"), 0) if state is None else dict(state["gone"])
        if before is not None:
            counts = before.counts()
            self._gone = {fate: counts[fate] for fate in self._gone}
            self._gone["lost"] += counts["issued"] - sum(self._gone.values()) - self._trained_before

    def train(self, batch: Ints) -> None:
        """The samples with these numbers have been trained on."""
        self.fates.settle(batch, TRAINED)
        steps, indices = (self.fates.column(column)[batch] for column in (STEP, INDEX))
        self._places = joined(self._places, (steps * self._per_step + indices).tolist())

    def trained(self) -> Ints:
        """(2, samples) steps and indices of all that was trained."""
        places = np.concatenate([np.zeros(0, np.int64), *(np.arange(*pair) for pair in self._places)])
        return np.array([places // self._per_step, places % self._per_step])

    def counts(self) -> dict[str, int]:
        """How many samples were issued in all attempts, and how many met each fate."""
        found = self.fates.counts()
        for fate, number in (self._gone | {"trained": self._trained_before}).items():
            found[fate] += number
            found["issued"] += number
        return found

    def state(self) -> dict[str, Any]:
        """For a checkpoint, fit for JSON: what was trained so far, and how many samples never come back."""
        counts = self.counts()
        gone = {fate: counts[fate] for fate in self._gone}
        under_way = counts["issued"] - counts["trained"] - sum(gone.values())
        return {"trained": self._places, "gone": gone | {"lost": gone["lost"] + under_way}}


def joined(ranges: Ranges, places: Iterable[int]) -> Ranges:
    """The ranges with these places, none of which is in them."""
    pairs = sorted([*([*pair] for pair in ranges), *([place, place + 1] for place in places)])
    found = list[list[int]]()
    for start, end in pairs:
        if found and found[-1][1] == start:
            found[-1][1] = end
        else:
            found.append([start, end])
    return found


def size(ranges: Ranges) -> int:
    """Numbers in them."""
    return sum(end - start for start, end in ranges)
