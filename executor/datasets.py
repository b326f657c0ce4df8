"""What algorithms without a rollout learn from: the samples of a step, and samples that are never trained on.

Plain numpy: the driver makes the samples of a step and hands them to the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor.experience import Samples
from executor.preferences import DEMONSTRATIONS, LABELLED, PAIRS, Draws, Pair
from executor.prompts import HELD_OUT, filed
from lab.rows import ATTRIBUTES, KINDS, Kind, Row
from lab.scenario import Scenario
from lab.workload import order, uniform

UNKNOWN = "unknown"
"""an attribute that a line of a file does not state"""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The lengths that samples of a task are to have, and the kinds of pairs, in turn."""

    step: int
    num_prompt_tokens: NDArray[np.int64]
    """shape [prompts]"""
    num_tokens: NDArray[np.int64]
    """of the responses, shape [prompts, samples of each]"""
    kinds: tuple[Kind, ...] = ("natural",)


class Dataset:
    """Samples for the algorithm of the scenario, of its task or its file; the same ones in every process.

    Pairs (dpo, reward_model): chosen 2i, rejected 2i + 1. KTO: the column `labels`. SFT: demonstrations.
    """

    def __init__(self, scenario: Scenario) -> None:
        """Raises InputError where the scenario's file is missing, or is not the one it was read with."""
        self.scenario = scenario
        self._rows = filed(scenario) if scenario.data.source is not None else None

    def batch(self, step: int) -> Samples:
        """The `samples_per_step` samples of a step: of a file the next rows, of a task new ones."""
        seed, workload = self.scenario.seed, self.scenario.workload
        if self._rows is not None:
            chosen = order(seed, step, workload.prompts_per_step, len(self._rows[0]))
            return of_rows(step, [self._rows[0][row] for row in chosen])
        known, lengths = workload.prompt_lengths(seed, step), workload.response_lengths(seed, step)
        return self._made(step, Asked(step=step, num_prompt_tokens=known, num_tokens=lengths))

    def held_out(self, number: int) -> Samples:
        """`number` samples like those of training, never trained on, the same after every step.

        With pairs, `number` / 2 of them; of a file at most as many as were held out.
        """
        if self._rows is not None:
            return of_rows(0, self._rows[1][: number // self.scenario.algorithm.together])
        return self._made(0, self._unseen(number, ("natural",)))

    def judged(self, num_pairs: int) -> Samples:
        """Held-out pairs for a report on a reward model, with the columns language, topic, safety and kind.

        Of a task pairs of every kind in turn; of a file at most as many as were held out.
        """
        if self._rows is not None:
            return of_rows(0, self._rows[1][:num_pairs])
        return self._made(0, self._unseen(2 * num_pairs, KINDS))

    def _unseen(self, number: int, kinds: tuple[Kind, ...]) -> Asked:
        """Lengths as an evaluation draws them: `evaluate.samples_per_prompt` responses to each prompt."""
        together, wanted = self.scenario.algorithm.together, self.scenario.evaluate
        each = wanted.samples_per_prompt if wanted.samples_per_prompt % together == 0 else together
        known, answers = _held_out_lengths(self.scenario, -(-number // each), each)
        return Asked(step=HELD_OUT, num_prompt_tokens=known, num_tokens=answers, kinds=kinds)

    def _made(self, step: int, asked: Asked) -> Samples:
        return MADE[self.scenario.algorithm.name](self.scenario, step, asked)


def _held_out_lengths(scenario: Scenario, prompts: int, each: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """As `lab.evaluation.lengths`, of any number of prompts."""
    workload, seed = scenario.workload, scenario.seed
    places, samples = np.arange(prompts), np.arange(each)[None, :]
    known = workload.prompt_tokens.draw(uniform(seed, 11, 0, places, 0), uniform(seed, 12, 0, places, 0))
    drawn = scenario.evaluate.response_tokens or workload.response_tokens
    first, second = (uniform(seed, stream, 0, places[:, None], samples) for stream in (13, 14))
    return known, drawn.draw(first, second)


def of_rows(step: int, rows: Sequence[Row]) -> Samples:
    """The responses of rows of a file, with what their lines say."""
    flat = [(place, row.prompt, response) for place, row in enumerate(rows) for response in row.responses]
    columns: dict[str, Any] = {}
    if rows and rows[0].label is not None:
        columns["labels"] = np.asarray([row.label for row in rows], dtype=np.int64)
    if rows and len(rows[0].responses) == 2:
        said = {name: [row.about.get(name, UNKNOWN) for row in rows] for name in ATTRIBUTES}
        columns |= {name: np.repeat(values, 2) for name, values in said.items()}
    return samples_of(step, flat, columns=columns)


def _pairs(scenario: Scenario, step: int, asked: Asked) -> Samples:
    make = PAIRS[str(scenario.data.task)]
    found: list[tuple[int, Pair]] = []
    for prompt, lengths in enumerate(asked.num_tokens):
        for sample in range(0, len(lengths), 2):
            draws = Draws(seed=scenario.seed, step=asked.step, prompt=prompt, sample=sample)
            kind = asked.kinds[len(found) % len(asked.kinds)]
            two = (int(lengths[sample]), int(lengths[sample + 1]))
            found.append((prompt, make(draws, int(asked.num_prompt_tokens[prompt]), two, kind)))
    rows = [(prompt, pair.prompt, one) for prompt, pair in found for one in (pair.chosen, pair.rejected)]
    return samples_of(step, rows, columns=_about([pair for _, pair in found]))


def _about(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Attributes of pairs as columns, one entry for each of the two samples."""
    return {name: np.repeat([getattr(pair, name) for pair in pairs], 2) for name in ATTRIBUTES}


def _demonstrations(scenario: Scenario, step: int, asked: Asked) -> Samples:
    make = DEMONSTRATIONS[str(scenario.data.task)]
    rows = [(draws.prompt, *make(draws, known, length)) for draws, known, length in _each(scenario, asked)]
    return samples_of(step, rows)


def _labelled(scenario: Scenario, step: int, asked: Asked) -> Samples:
    make = LABELLED[str(scenario.data.task)]
    rows = [(draws.prompt, *make(draws, known, length)) for draws, known, length in _each(scenario, asked)]
    labels = np.asarray([label for *_, label in rows], dtype=np.int64)
    return samples_of(step, [row[:3] for row in rows], columns={"labels": labels})


def _each(scenario: Scenario, asked: Asked) -> list[tuple[Draws, int, int]]:
    """Place, prompt's and response's length of every sample; the draws of two samples do not meet."""
    return [
        (Draws(seed=scenario.seed, step=asked.step, prompt=prompt, sample=2 * sample), int(known), int(length))
        for prompt, known in enumerate(asked.num_prompt_tokens)
        for sample, length in enumerate(asked.num_tokens[prompt])
    ]


MADE: dict[str, Callable[[Scenario, int, Asked], Samples]] = {
    "sft": _demonstrations,
    "reward_model": _pairs,
    "dpo": _pairs,
    "kto": _labelled,
}


def samples_of(
    step: int, rows: Sequence[tuple[int, list[int], list[int]]], *, columns: dict[str, Any] | None = None
) -> Samples:
    """Samples of prompt's index, prompt and response each; no log-probs, as nobody drew them."""
    return Samples(
        step=step, policy_version=step, prompts=np.asarray([prompt for prompt, _, _ in rows], dtype=np.int64),
        num_prompt_tokens=np.asarray([len(known) for _, known, _ in rows], dtype=np.int64),
        tokens=[np.asarray([*known, *response], dtype=np.int64) for _, known, response in rows],
        logprobs=[np.empty(0, dtype=np.float32)] * len(rows), columns=columns or {},
    )  # fmt: skip
