"""The lengths of all that a scenario generates: those of the workload, as sampling changes number and length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lab.policies import sampling as policy
from lab.policies.over_issue import num_to_issue

if TYPE_CHECKING:
    from lab.scenario import Scenario


def tried(scenario: Scenario) -> int:
    """Responses that are generated to one prompt, of which samples_per_prompt are trained on."""
    sampling, wanted = scenario.sampling, scenario.workload.samples_per_prompt
    return sampling.beams if sampling.beams > 1 else wanted * sampling.best_of


def issued(scenario: Scenario) -> int:
    """Prompts that a step sends out: with over_issue more than the prompts_per_step that are kept."""
    return num_to_issue(scenario.workload.prompts_per_step, scenario.rollout.over_issue)


def response_lengths(scenario: Scenario, step: int, num_prompts: int | None = None) -> NDArray[np.int64]:
    """Tokens of each generated response of a step, shape [num_prompts, tried]; prompts_per_step where None.

    A length model stretches what the workload draws, up to the workload's longest. The beams of a prompt all run to
    the longest of them.
    """
    lengths = scenario.workload.response_lengths(scenario.seed, step, num_prompts, tried(scenario))
    if scenario.sampling.lengths.changes:
        lengths = _stretched(scenario, step, lengths)
    if scenario.sampling.beams > 1:
        lengths = np.broadcast_to(lengths.max(axis=1, keepdims=True), lengths.shape).copy()
    return lengths


def _stretched(scenario: Scenario, step: int, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    sampling, longest = scenario.sampling, scenario.workload.response_tokens.max
    heats = temperatures(scenario, step, lengths.shape)
    factor = policy.length_factor(sampling.lengths.slopes, heats, sampling.top_p, sampling.repetition_penalty)
    return np.clip(np.rint(lengths * factor), 1, longest).astype(np.int64)


def temperatures(scenario: Scenario, step: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """The temperature of each response: that of the step, or those of the mixture in turn."""
    sampling = scenario.sampling
    if not sampling.mixture:
        return np.full(shape, policy.temperature(sampling.rule, step, scenario.num_steps))
    number = scenario.workload.prompts_per_step * tried(scenario)
    arms = policy.mixture([arm.share for arm in sampling.mixture], number)
    heats = np.array([arm.temperature for arm in sampling.mixture])[arms]
    return np.resize(heats, shape)


def assumed(scenario: Scenario) -> Iterator[str]:
    """What a simulation takes for granted about generation, and an execution does not: a sentence each."""
    if scenario.workload.end == "eos":
        yield "workload.end: eos: responses are taken to be as long as workload.response_tokens draws them"
    others = sorted({part.backend for part in scenario.place.actor_generate} - {"vllm"})
    for backend in others if scenario.algorithm.rolls_out else ():
        yield f"backend: {backend}: its passes are taken to cost as much as those of the engine that was measured"


def contradictions(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """Where several answers are tried, somebody must be able to choose among them: key, problem and remedy."""
    sampling, wanted, mode = scenario.sampling, scenario.workload.samples_per_prompt, scenario.schedule.mode
    several = [key for key in ("best_of", "beams") if getattr(sampling, key) > 1]
    for key in several:
        if not scenario.algorithm.rolls_out:
            yield f"sampling.{key}", f"{scenario.algorithm.name} generates nothing", "remove it"
        if mode == "asynchronous":
            problem = "an asynchronous rollout hands on every answer by itself"
            yield f"sampling.{key}", problem, "set it to 1, or another schedule.mode"
    if 1 < sampling.beams < wanted:
        problem = f"{sampling.beams} beams hold no {wanted} answers"
        yield "sampling.beams", problem, f"set it to workload.samples_per_prompt ({wanted}) or more"
    if sampling.beams > 1 and scenario.schedule.scoring == "sample":
        yield "schedule.scoring", "beams are chosen when all of them have ended", "set it to batch"
