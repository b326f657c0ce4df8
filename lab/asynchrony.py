"""What an asynchronous schedule needs to hold together: batches that divide, a buffer that holds one, a bound that is met."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lab.policies.buffer import too_small
from lab.policies.staleness import deadlock
from lab.schedule import Buffer, Schedule, limits, staleness

if TYPE_CHECKING:
    from lab.scenario import Scenario

Contradiction = tuple[str, str, str]
"""key, problem and remedy"""
SYNCHRONOUS = "it has a meaning only with `schedule: {mode: asynchronous}`"


def contradictions(scenario: Scenario) -> Iterator[Contradiction]:
    """What in a scenario contradicts its schedule, the first reason first."""
    if scenario.schedule.mode != "asynchronous":
        yield from _unused(scenario)
        return
    yield from _batches(scenario)
    yield from _bound(scenario)
    yield from _room(scenario)


def _unused(scenario: Scenario) -> Iterator[Contradiction]:
    """Keys of an asynchronous schedule in another one."""
    plain = Schedule()
    for key in ("trigger_samples", "staleness"):
        if getattr(scenario.schedule, key) != getattr(plain, key):
            yield f"schedule.{key}", SYNCHRONOUS, "remove it, or set the mode"
    if scenario.buffer != Buffer():
        yield "buffer", SYNCHRONOUS, "remove it, or set the mode"


def _batches(scenario: Scenario) -> Iterator[Contradiction]:
    """Whole batches make up a step, whole prompts and whole mini-batches a batch."""
    key, number = "schedule.trigger_samples", scenario.schedule.trigger_samples
    if not scenario.algorithm.rolls_out:
        yield "schedule.mode", f"{scenario.algorithm.name} generates nothing", "set it to synchronous"
    if number is None:
        return
    workload, step = scenario.workload, scenario.workload.samples_per_step
    if step % number:
        remedy = "use a divisor of prompts_per_step × samples_per_prompt"
        yield key, f"{number} samples do not divide the {step} samples of a step", remedy
    if number % workload.samples_per_prompt:
        problem = f"a batch of {number} samples would cut the {workload.samples_per_prompt} samples of a prompt apart"
        yield key, problem, "use a multiple of workload.samples_per_prompt"
    if number % scenario.update.minibatch_samples:
        problem = f"mini-batches of {scenario.update.minibatch_samples} samples do not divide a batch of {number}"
        yield key, problem, f"use a multiple of {scenario.update.minibatch_samples}, or change update.minibatch_samples"


def _bound(scenario: Scenario) -> Iterator[Contradiction]:
    said = scenario.schedule.staleness
    if said.unit != "extra_samples" and said.bound != int(said.bound):
        yield "schedule.staleness.bound", f"{said.bound:g} {said.unit} are no whole number", "use 0, 1, 2, …"
    rule = staleness(scenario.schedule, scenario.workload.samples_per_step)
    if problem := deadlock(rule):
        yield "schedule.staleness.bound", problem, f"set it to {rule.units_per_version - 1} or more"


def _room(scenario: Scenario) -> Iterator[Contradiction]:
    """A buffer that can never hold a batch waits for ever for the samples that it lets nobody make."""
    buffer, workload = scenario.buffer, scenario.workload
    found = limits(scenario.schedule, buffer, workload.samples_per_step)
    if problem := too_small(found):
        yield "buffer.capacity_samples", problem, f"set it to {found.trigger_samples} or more"
    if buffer.low_watermark >= buffer.high_watermark:
        problem = f"{buffer.low_watermark:g} is not below the high watermark of {buffer.high_watermark:g}"
        yield "buffer.low_watermark", problem, "set it lower"
