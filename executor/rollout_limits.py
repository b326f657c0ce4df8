"""What the executor cannot honour of how engines help each other, of their number, and of the way of samples."""

from __future__ import annotations

from collections.abc import Iterator

from executor.outgoing import LINES
from executor.publishing import fetches
from lab.returning import joint
from lab.scenario import Scenario

Refusal = tuple[str, str, str]
SIMULATE = "remove it, or simulate the scenario"
_TAKES_ENGINES = ("worker_lost", "preempted", "node_lost")


def limits(scenario: Scenario) -> Iterator[Refusal]:
    """Key, problem and remedy."""
    if scenario.experience is not None:
        yield from _experience(scenario)
    if joint(scenario):
        yield from _joint(scenario)
    yield from _scaling(scenario)


def _experience(scenario: Scenario) -> Iterator[Refusal]:
    said = scenario.experience
    assert said is not None, "asked before"
    if said.transport not in LINES:
        yield "experience.transport", f"nothing here sends by {said.transport}", f"use one of {', '.join(LINES)}"
    if said.logprobs != "sampled":
        problem = f"training reads the log-prob of the token that was drawn, not {said.logprobs}"
        yield "experience.logprobs", problem, "set it to sampled, or simulate the scenario"
    if said.prescreen is not None:
        yield "experience.prescreen", "no small model that could settle samples is executed", SIMULATE
    if scenario.schedule.mode != "asynchronous" and any(fault.kind in _TAKES_ENGINES for fault in scenario.faults):
        yield (
            "experience",
            "what an engine has not sent yet when it is lost is not made again",
            "remove it, or those faults",
        )
    if any(worker.pool in _sliced(scenario) for worker in scenario.team("actor", "generate")):
        yield "experience", "engines that take turns keep no samples until others have theirs", SIMULATE


def _joint(scenario: Scenario) -> Iterator[Refusal]:
    names = [key for key in ("over_issue", "stealing") if getattr(scenario.rollout, key)]
    key = f"rollout.{names[0]}" if names else "scaling.actor.generate"
    if scenario.sampling.beams > 1:
        yield (
            key,
            "the beams of a prompt belong together, and are on one engine to the end",
            "remove it, or set beams to 1",
        )
    if scenario.rollout.over_issue and scenario.sampling.mixture:
        problem = "which temperature a sample has depends on its place among those that are kept"
        yield "rollout.over_issue", problem, "remove it, or sampling.mixture"
    if any(fault.kind in _TAKES_ENGINES for fault in scenario.faults):
        yield (
            key,
            "what a lost engine had is not dealt anew while engines help each other",
            "remove it, or those faults",
        )


def _scaling(scenario: Scenario) -> Iterator[Refusal]:
    for work in scenario.scaling:
        if scenario.schedule.mode == "asynchronous":
            yield f"scaling.{work}", "workers without a barrier are not started and stopped in a real run", SIMULATE
        elif work != "actor.generate":
            continue
        elif scenario.experience is not None:
            yield f"scaling.{work}", "an engine that is stopped would take samples along that are not sent", SIMULATE
        elif fetches(scenario) or scenario.model("actor").lora is not None:
            yield f"scaling.{work}", "an engine that starts takes whole weights that are pushed", SIMULATE


def _sliced(scenario: Scenario) -> set[str]:
    return {pool for pool, sharing in scenario.sharing.items() if sharing.how == "time_sliced"}
