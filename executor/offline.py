"""What algorithms without a rollout do in the driver: it reads the samples of a step from the data set, ahead of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from executor.algorithms.advantages import joined
from executor.datasets import Dataset
from executor.experience import Samples
from lab.scenario import Scenario


class Reading:
    """The samples of steps that are under way or about to be: here, and as references for the workers."""

    def __init__(self, scenario: Scenario) -> None:
        self._dataset, self._num_steps = Dataset(scenario), scenario.num_steps
        self._samples: dict[int, Samples] = {}
        self._references: dict[int, Any] = {}

    def reference(self, step: int) -> Any:
        """To the samples of a step, in Ray's object store."""
        if step not in self._references:
            self._samples[step] = self._dataset.batch(step)
            self._references[step] = ray.put(self._samples[step])
        return self._references[step]

    def ahead(self, step: int) -> None:
        """Reads the next step, which costs nobody time while workers are busy with this one."""
        if step + 1 < self._num_steps:
            self.reference(step + 1)

    def trained(self, step: int) -> Samples:
        """Lets go of a step's samples."""
        del self._references[step]
        return self._samples.pop(step)


async def scored(samples: Samples, columns: Sequence[Any]) -> Samples:
    """Samples with the columns that scorers hold, given as references."""
    parts = [await part for part in columns]
    return samples.with_columns(**joined(parts, len(samples)))
