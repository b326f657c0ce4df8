"""Evaluation for real: engines answer a fixed set of prompts, or trainers read a fixed set of samples, and both are scored.

Rows go to `evaluations.jsonl` in the run's folder, the first one for the start (step -1); a resumed run goes on from
them. Plain numpy: the functions here run in the driver.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from executor.calls import values
from executor.datasets import Dataset
from executor.experience import Samples, merge
from executor.inference import Request
from executor.prompts import Prompts
from lab.evaluation import Estimate, lengths, mean_reward, shares, version_of, win_rate
from lab.scenario import Scenario
from lab.workload import uniform

if TYPE_CHECKING:
    from executor.rollout import RolloutWorker
    from executor.trainer import Trainer

FILE = "evaluations.jsonl"
START = -1
"""the step of what is known before the first one"""
_ANSWERS = 60
"""stream of the seeds of answers"""

Row = dict[str, Any]


def prompt_set(scenario: Scenario) -> list[list[int]]:
    """Token ids of the prompts that every evaluation of this scenario asks; no step trains on them."""
    return Prompts(scenario).held_out()


def answer_seeds(scenario: Scenario, prompts: Sequence[int]) -> NDArray[np.int64]:
    """Of the answers to these prompts, [prompts, answers]: the same after every step, so that weights alone differ."""
    rows = np.asarray(prompts, dtype=np.int64)[:, None]
    answers = np.arange(scenario.evaluate.samples_per_prompt)[None, :]
    return np.asarray(uniform(scenario.seed, _ANSWERS, 0, rows, answers) * 2**31, dtype=np.int64)


class Evaluations:
    """The rows of a run, in its folder."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.file = scenario, folder / FILE
        self.rows: dict[int, Row] = {}
        if self.file.is_file():
            *whole, cut = self.file.read_text().split("\n")
            if cut:  # killed while it wrote
                self.file.write_text("".join(f"{line}\n" for line in whole))
            self.rows = {row["step"]: row for row in map(json.loads, whole)}

    @property
    def begun(self) -> bool:
        """Whether the row of the start is there."""
        return START in self.rows

    def add(self, row: Row) -> None:
        """Keeps a row; what is evaluated again after a crash takes the place of what was there."""
        self.rows[row["step"]] = row
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def answered(self, step: int, samples: Samples, rewards: NDArray[np.float64]) -> Row:
        """The row of answers, in the order of prompts: mean reward, and win rate against the start."""
        table = np.asarray(rewards, dtype=np.float64).reshape(-1, self.scenario.evaluate.samples_per_prompt)
        row: Row = {
            "step": step, "prompt_set": version_of(prompt_set(self.scenario)), "prompts": table.shape[0],
            "answers": int(table.size), "temperature": self.scenario.evaluate.drawn_at,
            **_named("reward", mean_reward(table)),
        }  # fmt: skip
        if self.begun:
            row |= _named("win_rate", win_rate(table, np.asarray(self.rows[START]["rewards"])))
        responses = np.asarray(samples.lengths) - samples.num_prompt_tokens
        row |= {"response_tokens": float(responses.mean()), "rewards": table.tolist()}
        self.add(row)
        return row

    def read(self, step: int, samples: Samples, found: dict[str, float]) -> Row:
        """The row of held-out samples that trainers have read: numbers by name."""
        version = version_of([tokens.tolist() for tokens in samples.tokens])
        row: Row = {"step": step, "prompt_set": version, "samples": len(samples), **found}
        self.add(row)
        return row


def learned(row: Row) -> dict[str, float]:
    """What of a row goes into the learning rows of the run: numbers, `evaluation_` before their names."""
    left_out = ("step", "prompts", "answers", "samples", "temperature")
    return {
        f"evaluation_{name}": value
        for name, value in row.items()
        if isinstance(value, float | int) and name not in left_out
    }


def _named(name: str, found: Estimate) -> Row:
    return {name: found.mean, f"{name}_error": found.error}


def held_out(scenario: Scenario) -> Samples:
    """The samples that trainers read in every evaluation of an algorithm that rolls nothing out."""
    return Dataset(scenario).held_out(scenario.evaluate.num_samples)


class Evaluation:
    """Runs the evaluations of a run on its workers."""

    def __init__(
        self, scenario: Scenario, folder: Path, engines: list[Any], ranks: list[Any], scorers: dict[str, list[Any]]
    ) -> None:
        """`ranks` of the first model that is trained; scorers by role."""
        self.scenario, self.rows = scenario, Evaluations(scenario, folder)
        self._engines, self._ranks, self._scorers = engines, ranks, scorers
        self._reference: list[NDArray[np.float32]] = []

    async def begin(self) -> None:
        """What the models can do before the first step; nothing where a resumed run knows it already."""
        scenario = self.scenario
        if scenario.evaluate.every_steps is None:
            return
        if not scenario.algorithm.rolls_out and scenario.algorithm.needs_reference:
            [columns] = await values([self._scorers["reference"][0].judged.remote(held_out(scenario))])
            self._reference = columns["reference_logprobs"]
        if not self.rows.begun:
            await self.run(START, 0)

    async def run(self, step: int, version: int, absent: frozenset[int] = frozenset()) -> list[dict[str, Any]]:
        """One evaluation, without engines that are `absent`, by index; its infos, the numbers with the first."""
        self._absent = absent
        infos = await (self._answered if self.scenario.algorithm.rolls_out else self._read)(step, version)
        infos[0]["learning"] = learned(self.rows.rows[step])
        return infos

    async def _answered(self, step: int, version: int) -> list[dict[str, Any]]:
        number = len(prompt_set(self.scenario))  # of a file, as many as it has
        dealt = [
            [prompt for prompt in share if prompt < number]
            for share in shares(self.scenario, max(step, 0), self._absent)
        ]
        pairs = zip(self._engines, dealt, strict=True)
        found = await values(
            [engine.__ray_call__.remote(answers, step, version, prompts) for engine, prompts in pairs if prompts]
        )
        samples = merge([part for part, _ in found])
        [columns] = await values([self._scorers["reward"][0].judged.remote(samples)])
        self.rows.answered(step, samples, columns["rewards"])
        return [info for _, info in found]

    async def _read(self, step: int, version: int) -> list[dict[str, Any]]:
        samples = held_out(self.scenario)
        found = await values([rank.__ray_call__.remote(read, step, samples) for rank in self._ranks])
        outputs = {i: output for part, _ in found for i, output in part.items()}
        rows = [outputs[i] for i in range(len(samples))]
        self.rows.read(step, samples, judged(self.scenario, samples, rows, self._reference))
        return [info for _, info in found]


def answers(worker: RolloutWorker, step: int, version: int, prompts: Sequence[int]) -> tuple[Samples, dict[str, Any]]:
    """An engine's answers to these prompts of the set, with the lengths that an evaluation after this step draws."""
    if worker.policy_version != version:
        raise RuntimeError(f"{worker.worker.name} has policy version {worker.policy_version}, not {version}")
    scenario, asked = worker.scenario, prompt_set(worker.scenario)
    _, num_tokens = lengths(scenario, max(step, 0))
    seeds, stops = answer_seeds(scenario, prompts), scenario.workload.end == "eos"
    longest = (scenario.evaluate.response_tokens or scenario.workload.response_tokens).max
    requests = [
        Request(
            prompt_index=prompt, sample=answer, prompt=asked[prompt], seed=int(seeds[row, answer]),
            num_tokens=longest if stops else int(num_tokens[prompt, answer]),
            temperature=scenario.evaluate.drawn_at, stop=worker._stop if stops else (),
        )
        for row, prompt in enumerate(prompts)
        for answer in range(num_tokens.shape[1])
    ]  # fmt: skip
    with worker.recorder.stage("evaluate", step, version) as notes:
        samples = worker._run(step, requests, notes, searches=False)
    worker.forget()  # a resumed run does not answer again, and has to roll out what it would have
    return samples, {"spans": worker.recorder.take()}


def read(worker: Trainer, step: int, samples: Samples) -> tuple[dict[int, tuple[float, int]], dict[str, Any]]:
    """What a rank's network says of its share: of each sample the log-prob of its response and the tokens of that, or
    the one number of a reward model (and 1)."""
    with worker.recorder.stage("evaluate", step, step + 1) as notes:
        found = worker.learner.read(samples, range(len(samples)), deals=True)
        tokens = sum(samples.lengths[i] for i in found)
        quantities = {"calls": 1.0, "samples": float(len(found)), "tokens": float(tokens)}
        notes |= {"samples": len(found), "tokens": tokens, "quantities": quantities}
    sums = {i: (float(np.sum(values, dtype=np.float64)), len(values)) for i, values in found.items()}
    return sums, {"spans": worker.recorder.take()}


def judged(
    scenario: Scenario,
    samples: Samples,
    outputs: Sequence[tuple[float, int]],
    reference: Sequence[NDArray[np.float32]],
) -> dict[str, float]:
    """Numbers that say how well a model does on held-out samples, by name.

    `outputs` as `read` gives them; `reference` log-probs of each response token, where the algorithm has a reference.
    loss: mean negative log-prob of a token (sft), or of the right order of a pair; accuracy: share of pairs, or of
    labelled samples, on the right side; margin: mean difference of chosen and rejected (or desired and undesired).
    """
    said = np.asarray([total for total, _ in outputs], dtype=np.float64)
    if reference:
        base = np.asarray([np.sum(row, dtype=np.float64) for row in reference])
        said = getattr(scenario.algorithm, "beta", 1.0) * (said - base)
    if scenario.algorithm.name == "sft":
        return {"loss": float(-said.sum() / sum(number for _, number in outputs))}
    if scenario.algorithm.together == 2:
        return _pairwise(said[0::2] - said[1::2])
    desired = np.asarray(samples.columns["labels"]) == 1
    right = (np.sign(np.where(desired, said, -said)) + 1) / 2
    margin = float(said[desired].mean() - said[~desired].mean()) if 0 < desired.sum() < len(desired) else 0.0
    return {"margin": margin, "accuracy": float(right.mean())}


def _pairwise(margins: NDArray[np.float64]) -> dict[str, float]:
    accuracy = Estimate.over((np.sign(margins) + 1) / 2)
    found = {
        "loss": float(np.logaddexp(0.0, -margins).mean()),
        "margin": float(margins.mean()),
        "accuracy": accuracy.mean,
    }
    return found | ({} if accuracy.error is None else {"accuracy_error": accuracy.error})
