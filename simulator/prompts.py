"""What is issued next where there is no barrier: the workload's prompts in order, and before them what goes out again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from lab.scenario import Scenario
from simulator.blocks import Ints
from simulator.collecting import Group


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """Samples of one prompt that are issued together."""

    step: int
    """of the workload"""
    number: int
    """of the prompt in it"""
    indices: Ints
    """of the samples in it"""
    group: Group | None = None
    """whose members they replace"""


class Prompts:
    """The n-th prompt ever issued is prompt n % prompts_per_step of step n // prompts_per_step.

    What was trained before is left out: batches take samples as they come back, so it may have gaps.
    """

    def __init__(self, scenario: Scenario, trained: Ints) -> None:
        """`trained` is (2, samples), the steps and indices of those that were trained before."""
        self._per_step, self._samples = scenario.workload.prompts_per_step, scenario.workload.samples_per_prompt
        self._next = 0
        self._trained: dict[int, list[int]] = {}
        for step, index in trained.T.tolist():
            self._trained.setdefault(step * self._per_step + index // self._samples, []).append(index)
        self._again, self._replacing = deque[Prompt](), deque[Prompt]()

    def again(self, rows: Ints, group: Group | None) -> None:
        """Samples go out once more; `rows` is (2, samples), their steps and their indices."""
        ordered = rows[:, np.lexsort(rows[::-1])]
        numbers = ordered[1] // self._samples
        cuts = np.flatnonzero((np.diff(ordered[0]) != 0) | (np.diff(numbers) != 0)) + 1
        for part in np.split(np.arange(ordered.shape[1]), cuts):
            prompt = Prompt(
                step=int(ordered[0, part[0]]), number=int(numbers[part[0]]), indices=ordered[1, part], group=group
            )  # fmt: skip
            (self._again if group is None else self._replacing).append(prompt)

    def replacing(self, most: int, version: int) -> list[Prompt]:
        """At most so many of those that take the place of others, for which room is kept; the rest of a group that is
        waited for no longer is left out. No group gets members of an older version than its own."""
        found, later = list[Prompt](), list[Prompt]()
        while self._replacing and len(found) < most:
            prompt = self._replacing.popleft()
            if prompt.group is not None and prompt.group.missing:
                (found if prompt.group.version <= version else later).append(prompt)
        self._replacing.extendleft(reversed(later))
        return found

    def take(self, most: int) -> list[Prompt]:
        """At most so many others."""
        found = list[Prompt]()
        while len(found) < most:
            found.append(self._again.popleft() if self._again else self._fresh())
        return found

    def _fresh(self) -> Prompt:
        while True:
            step, number = divmod(self._next, self._per_step)
            gone = self._trained.pop(self._next, [])
            self._next += 1
            if len(gone) < self._samples:
                first = number * self._samples
                left = np.setdiff1d(np.arange(first, first + self._samples), gone)
                return Prompt(step=step, number=number, indices=left)
