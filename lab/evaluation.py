"""Periodic evaluation: what is generated, or read, to see how good the model is; and the stage that does it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lab.algorithm import LEARNING
from lab.dataflow import Edge, Node
from lab.policies.dispatch import DISPATCH, Engines, Prompts
from lab.records import Record
from lab.workload import Lengths, Listed, uniform

if TYPE_CHECKING:
    from lab.scenario import Scenario


class Evaluate(Record):
    """Evaluation after every so many steps, on the same prompts each time; what trains or rolls out next waits for it.

    Where the algorithm rolls out, the engines answer the prompts with the new weights, which takes their time; judging
    the answers is not counted. Their rewards are compared with those of the answers before the first step. Elsewhere the
    trainers read as many held-out samples in forward passes, each time the same ones.
    """

    every_steps: int | None = Field(default=None, ge=1, description="null: never")
    prompts: int = Field(default=256, ge=1, le=10**6, description="prompts, or held-out ones; a set of their own")
    samples_per_prompt: int = Field(default=1, ge=1, le=10**4, description="answers to each prompt; 1 where greedy")
    response_tokens: Lengths | None = Field(
        default=None, description="of an answer, for example of greedy ones; null: as the workload's, before `sampling`"
    )
    temperature: float | None = Field(
        default=None, ge=0, le=10, json_schema_extra=LEARNING,
        description="at which answers are drawn, 0: greedy; null: greedy where each prompt has one answer, else 1",
    )  # fmt: skip

    @property
    def drawn_at(self) -> float:
        """The temperature of answers; 0 is greedy."""
        return self.temperature if self.temperature is not None else float(self.samples_per_prompt > 1)

    @property
    def num_samples(self) -> int:
        return self.prompts * self.samples_per_prompt


def lengths(scenario: Scenario, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of each prompt, shape [prompts], and of each answer, [prompts, samples_per_prompt], after a step.

    The prompts are the same after every step; where nothing is generated, so are the answers, which are then given.
    """
    step = step if scenario.algorithm.rolls_out else 0
    wanted, workload, seed = scenario.evaluate, scenario.workload, scenario.seed
    prompts, samples = np.arange(wanted.prompts), np.arange(wanted.samples_per_prompt)[None, :]
    listed = workload.prompt_tokens
    if isinstance(listed, Listed) and listed.held_out:
        known = listed.unseen(wanted.prompts)[:, 0]
    else:
        known = listed.draw(uniform(seed, 11, 0, prompts, 0), uniform(seed, 12, 0, prompts, 0))
    drawn = wanted.response_tokens or workload.response_tokens
    if isinstance(drawn, Listed) and drawn.held_out:
        return known, drawn.unseen(wanted.prompts, wanted.samples_per_prompt)
    answers = drawn.draw(
        uniform(seed, 13, step, prompts[:, None], samples), uniform(seed, 14, step, prompts[:, None], samples)
    )
    return known, answers


def shares(scenario: Scenario, step: int, absent: Collection[int] = ()) -> list[list[int]]:
    """The prompts of an evaluation that each engine answers, by `rollout.dispatch`, which knows their mean length; those
    that are absent, by index, answer none."""
    prompt, answers = lengths(scenario, step)
    team = scenario.team("actor", "generate")
    present = [index for index in range(len(team)) if index not in absent]
    speeds = [team[index].speed for index in present]
    known = Prompts(
        predicted_tokens=prompt + answers.mean(), samples_per_prompt=answers.shape[1], num_buckets=len(set(speeds))
    )
    found: list[list[int]] = [[] for _ in team]
    for index, share in zip(present, DISPATCH[scenario.rollout.dispatch](known, Engines.idle(speeds)), strict=True):
        found[index] = share
    return found


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over prompts."""

    mean: float
    error: float | None
    """standard error over prompts, sd / sqrt(n); answers to one prompt are not independent. None for one prompt"""
    number: int
    """of prompts"""

    @classmethod
    def over(cls, values: NDArray[np.float64]) -> Estimate:
        """Of one value for each prompt, shape [prompts]."""
        number = len(values)
        error = float(np.std(values, ddof=1)) / math.sqrt(number) if number > 1 else None
        return cls(mean=float(np.mean(values)), error=error, number=number)


def mean_reward(rewards: NDArray[np.float64]) -> Estimate:
    """Of rewards [prompts, answers]."""
    return Estimate.over(rewards.mean(axis=1))


def win_rate(rewards: NDArray[np.float64], before: NDArray[np.float64]) -> Estimate:
    """Chance that an answer is judged better than one to the same prompt before; a tie counts a half.

    Both [prompts, answers]. Every answer meets every one to its prompt (the statistic of Mann and Whitney), so 1/2 says
    that nothing has changed.
    """
    differences = rewards[:, :, None] - before[:, None, :]
    return Estimate.over(((np.sign(differences) + 1) / 2).mean(axis=(1, 2)))


def version_of(prompts: Sequence[Sequence[int]]) -> str:
    """The version of a prompt set: SHA-256 of its token ids, 16 hex digits; another token or order is another set."""
    rows = [",".join(str(int(token)) for token in prompt) for prompt in prompts]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]


def nodes(scenario: Scenario) -> Iterator[Node]:
    """The stage, on the engines, or on the ranks of the first model that is trained."""
    every, algorithm = scenario.evaluate.every_steps, scenario.algorithm
    if every is None:
        return
    role, work = ("actor", "generate") if algorithm.rolls_out else (algorithm.trains[0], "train")
    workers = tuple(worker.name for worker in scenario.team(role, work))
    yield Node(stage="evaluate", role=role, workers=workers, output="sample", every=every)


def edges(stages: list[str], ahead: int) -> Iterator[Edge]:
    """After the weights are there, before the workers take up the next step; a checkpoint of the step follows it."""
    if "evaluate" not in stages:
        return
    after = next(stage for stage in ("weight_sync", "update_actor", "update_critic") if stage in stages)
    before, lag = ("rollout", 1 + ahead) if "rollout" in stages else (after, 1)
    yield Edge(source=after, target="evaluate", unit="weights")
    yield Edge(source="evaluate", target=before, unit="order", lag=lag)
    if "weight_sync" in stages:
        yield Edge(source="evaluate", target="weight_sync", unit="order", lag=1)
    if before == after and "checkpoint" in stages:
        yield Edge(source="evaluate", target="checkpoint", unit="order")


def contradictions(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """What keeps a scenario from being evaluated: key, problem and remedy."""
    wanted, algorithm = scenario.evaluate, scenario.algorithm
    if wanted.every_steps is None:
        return
    if scenario.schedule.mode == "asynchronous":
        problem = "an asynchronous rollout does not pause for it"
        yield "evaluate.every_steps", problem, "remove it, or set another schedule.mode"
    if wanted.samples_per_prompt > 1 and wanted.temperature == 0 and algorithm.rolls_out:
        problem = "greedy answers to one prompt are all the same"
        yield "evaluate.temperature", problem, "set samples_per_prompt to 1, or a temperature above 0"
    if not algorithm.rolls_out and wanted.samples_per_prompt % algorithm.together:
        yield "evaluate.samples_per_prompt", f"{algorithm.name} reads pairs", f"set it to {algorithm.together}"
