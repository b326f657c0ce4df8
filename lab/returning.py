"""Which samples of a step are back, and when enough are. Both worlds keep one of these for a rollout in which engines
depend on each other."""

from __future__ import annotations

import numpy as np

from lab.drawing import issued
from lab.policies.over_issue import EarlyStop, Returns, early_stop
from lab.scenario import Scenario


def joint(scenario: Scenario) -> bool:
    """Whether engines depend on each other within a step."""
    scaled = "actor.generate" in scenario.scaling
    return scenario.rollout.stealing or scenario.rollout.over_issue > 0 or scaled


class Returning:
    """The prompts of one step and how many of their samples are still out. Samples are told by their place in the step:
    prompt × tried + sample."""

    def __init__(self, scenario: Scenario) -> None:
        self._tried, self.needed = scenario.num_tried, scenario.workload.prompts_per_step
        self._left = np.full(issued(scenario), self._tried)
        self._finished = list[int]()

    @property
    def over_issued(self) -> bool:
        """Whether more prompts are out than are needed."""
        return len(self._left) > self.needed

    @property
    def enough(self) -> bool:
        """Whether as many prompts are whole as are needed."""
        return len(self._finished) >= self.needed

    def back(self, place: int) -> list[int]:
        """A sample is back. The places of the samples that can be used from now on: where more prompts are out than are
        needed those of its prompt once that is whole, else its own."""
        prompt = place // self._tried
        self._left[prompt] -= 1
        whole = not self._left[prompt]
        if whole:
            self._finished.append(prompt)
        if not self.over_issued:
            return [place]
        return self.places([prompt]) if whole else []

    def stop(self) -> EarlyStop:
        """What the rule says of the prompts that are back, and of those that are not."""
        everything = tuple(range(len(self._left)))
        return early_stop(Returns(num_needed=self.needed, issued=everything, finished=tuple(self._finished)))

    def places(self, prompts: list[int] | tuple[int, ...]) -> list[int]:
        """Of all samples of these prompts."""
        return [prompt * self._tried + sample for prompt in prompts for sample in range(self._tried)]
