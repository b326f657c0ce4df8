"""The prompts of a scenario as token ids: a built-in task's, or those of a file. No heavy import."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from executor.tasks import TASKS
from lab.data import Data, read_rows, tokenizer_folder
from lab.evaluation import lengths
from lab.rows import Row
from lab.scenario import Scenario
from lab.workload import order

HELD_OUT = 1 << 40
"""the step at which a task's held-out prompts and samples are drawn: above that of every run"""


class Prompts:
    """Prompts by step and place in it, the same ones in every process."""

    def __init__(self, scenario: Scenario) -> None:
        """Raises InputError where the scenario's file is missing, or is not the one it was read with."""
        self.scenario = scenario
        self._task = TASKS[scenario.data.task] if scenario.data.task is not None else None
        self._rows = filed(scenario) if self._task is None else ([], [])

    def at(self, step: int, prompts: Iterable[int]) -> list[list[int]]:
        """Token ids of these prompts of a step, by their index in it."""
        scenario, chosen = self.scenario, list(prompts)
        if not chosen:
            return []
        seed, workload, number = scenario.seed, scenario.workload, max(chosen) + 1
        if self._task is None:
            kept, _ = self._rows
            rows = order(seed, step, workload.prompts_per_step, len(kept), number)
            return [kept[rows[prompt]].prompt for prompt in chosen]
        known = workload.prompt_lengths(seed, step, number)
        return [self._task.prompt(seed, step, prompt, int(known[prompt])) for prompt in chosen]

    def held_out(self) -> list[list[int]]:
        """The `evaluate.prompts` prompts that every evaluation asks and no step trains on; of a file at most those that
        its held-out share has."""
        scenario, number = self.scenario, self.scenario.evaluate.prompts
        if self._task is None:
            return [row.prompt for row in self._rows[1][:number]]
        known, _ = lengths(scenario, 0)
        return [self._task.prompt(scenario.seed, HELD_OUT, i, int(known[i])) for i in range(number)]


def filed(scenario: Scenario) -> tuple[list[Row], list[Row]]:
    """The rows of the scenario's file to train on, and those that are held out.

    Raises InputError as `lab.data.read_rows`.
    """
    return _filed(scenario.data, tokenizer_folder(scenario), scenario.seed)


@lru_cache(maxsize=2)
def _filed(data: Data, folder: str | None, seed: int) -> tuple[list[Row], list[Row]]:
    return read_rows(data, folder).split(data.held_out_share, seed)
