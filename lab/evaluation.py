"""Periodic evaluation: what is generated, or read, to see how good the model is; and the stage that does it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lab.dataflow import Edge, Node
from lab.records import Record
from lab.workload import Lengths, uniform

if TYPE_CHECKING:
    from lab.scenario import Scenario


class Evaluate(Record):
    """Evaluation after every so many steps, on the same prompts each time; what trains or rolls out next waits for it.

    Where the algorithm rolls out, the engines answer the prompts with the new weights, which takes their time; judging
    the answers is not counted. Elsewhere the trainers read as many held-out samples in forward passes.
    """

    every_steps: int | None = Field(default=None, ge=1, description="null: never")
    prompts: int = Field(default=256, ge=1, le=10**6, description="prompts, or held-out ones; a set of their own")
    samples_per_prompt: int = Field(default=1, ge=1, le=10**4, description="answers to each prompt; 1 where greedy")
    response_tokens: Lengths | None = Field(
        default=None, description="of an answer, for example of greedy ones; null: as the workload's, before `sampling`"
    )

    @property
    def num_samples(self) -> int:
        return self.prompts * self.samples_per_prompt


def lengths(scenario: Scenario, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of each prompt, shape [prompts], and of each answer, [prompts, samples_per_prompt], after a step.

    The prompts are the same after every step.
    """
    wanted, workload, seed = scenario.evaluate, scenario.workload, scenario.seed
    prompts, samples = np.arange(wanted.prompts), np.arange(wanted.samples_per_prompt)[None, :]
    known = workload.prompt_tokens.draw(uniform(seed, 11, 0, prompts, 0), uniform(seed, 12, 0, prompts, 0))
    drawn = wanted.response_tokens or workload.response_tokens
    answers = drawn.draw(
        uniform(seed, 13, step, prompts[:, None], samples), uniform(seed, 14, step, prompts[:, None], samples)
    )
    return known, answers


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
    if not algorithm.rolls_out and wanted.samples_per_prompt % algorithm.together:
        yield "evaluate.samples_per_prompt", f"{algorithm.name} reads pairs", f"set it to {algorithm.together}"
