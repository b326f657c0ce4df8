"""What may overlap, how old samples may be, and where they wait for the trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lab.algorithm import LEARNING
from lab.policies.buffer import Limits
from lab.policies.staleness import Staleness as Rule
from lab.records import Record


class Staleness(Record):
    """How old the samples may be that an asynchronous trainer takes."""

    unit: Literal["versions", "steps", "batches", "extra_samples"] = Field(
        default="versions",
        description="of the bound; steps: as versions, one is published a step; batches: of trigger_samples; "
        "extra_samples: share of a step's samples that may be issued beyond those of the next version",
    )
    bound: float = Field(
        default=1.0, ge=0, description="largest lag; 0: only samples of the current version are trained"
    )
    at_bound: Literal["block", "drop", "down_weight", "interrupt"] = Field(
        default="block",
        description="block: engines and trainer wait; drop: too old samples are thrown away; interrupt: so are they, and "
        "running ones that will be too old are stopped; down_weight: they are trained, and count less",
    )
    weight: Literal["halving", "reciprocal"] = Field(
        default="halving", description="of samples beyond the bound, for down_weight", json_schema_extra=LEARNING
    )


class Schedule(Record):
    """What may overlap. one_step_off: rollout of step k+1 runs beside training of step k, one version behind."""

    mode: Literal["synchronous", "one_step_off", "asynchronous"] = Field(
        default="synchronous", description="asynchronous: engines generate without a barrier, the trainer takes batches"
    )
    scoring: Literal["batch", "sample"] = Field(
        default="batch",
        description="reward, reference, value and old log-probabilities: batch: once all samples of a step are generated; "
        "sample: each as soon as it is, beside the rollout (on trainers where a rank can make a pass alone: no ZeRO 3, no "
        "pipeline, no time slices)",
    )
    trigger_samples: int | None = Field(
        default=None,
        ge=1,
        description="samples of a batch, for asynchronous; a step's batches are trained one by one, and the last of them "
        "publishes a version; null: one batch with all samples of a step",
    )
    staleness: Staleness = Field(default=Staleness(), description="for asynchronous")


class Buffer(Record):
    """Where samples wait for an asynchronous trainer. Room is kept from issue to the end of the update."""

    capacity_samples: int | None = Field(
        default=None,
        ge=1,
        description="waiting, under way and in training; null: 2 × (bound + 1) × the samples of a step or, where the bound "
        "counts batches, of a batch",
    )
    high_watermark: float = Field(
        default=0.9, gt=0, le=1, description="share of the capacity where it starts to push back"
    )
    low_watermark: float = Field(default=0.5, ge=0, lt=1, description="share of the capacity where it stops to")
    at_high: Literal["pause", "throttle"] = Field(
        default="pause",
        description="pause: nothing is issued; throttle: the fewer are under way, the less room is left",
    )


def batch_samples(schedule: Schedule, samples_per_step: int) -> int:
    """Samples of one batch."""
    return schedule.trigger_samples or samples_per_step


def num_batches(schedule: Schedule, samples_per_step: int) -> int:
    """Batches of one step: one, but where an asynchronous trainer takes smaller ones."""
    return samples_per_step // batch_samples(schedule, samples_per_step)


def staleness(schedule: Schedule, samples_per_step: int) -> Rule:
    """The rule about age that a schedule states, its bound in batches.

    With n batches a version, a batch k has the lag ⌊k/n⌋ − w in versions and k − n·w in batches, so a bound b in versions
    is one of n·(b + 1) − 1 in batches.
    """
    said, number = schedule.staleness, batch_samples(schedule, samples_per_step)
    every = num_batches(schedule, samples_per_step)
    bound = said.bound if said.unit == "batches" else every * (said.bound + 1) - 1
    return Rule(
        bound=bound, at_bound=said.at_bound, unit="extra_samples" if said.unit == "extra_samples" else "batches",
        samples_per_unit=number, units_per_version=every, weight=said.weight,
    )  # fmt: skip


def limits(schedule: Schedule, buffer: Buffer, samples_per_step: int) -> Limits:
    """The buffer's limits, its capacity filled in."""
    number = batch_samples(schedule, samples_per_step)
    reach = 2 * (staleness(schedule, samples_per_step).bound + 1) * number
    return Limits(
        capacity_samples=buffer.capacity_samples or max(int(reach), number), high_watermark=buffer.high_watermark,
        low_watermark=buffer.low_watermark, at_high=buffer.at_high, trigger_samples=number,
    )  # fmt: skip
