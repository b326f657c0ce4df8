"""What is saved, what fails, and what happens then."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lab.errors import WrongValue
from lab.records import Record
from lab.units import Seconds

Kind = Literal[
    "worker_lost", "trainer_lost", "node_lost", "scorer_lost", "buffer_lost", "straggler", "link_degraded", "preempted"
]
Recovery = Literal["reassign", "restart", "redundant", "restart_from_checkpoint"]

RECOVERIES: dict[str, tuple[Recovery, ...]] = {
    "worker_lost": ("reassign", "restart", "redundant"),
    "trainer_lost": ("restart_from_checkpoint",),
    "node_lost": ("reassign", "restart"),
    "scorer_lost": ("restart",),
    "buffer_lost": ("restart",),
    "preempted": ("reassign", "restart"),
    "straggler": (),
    "link_degraded": (),
}
"""by kind of fault: the ways back, the default first; none where it passes by itself. What a trainer rank takes with it
is always restarted from a checkpoint"""


class Keep(Record):
    """Which checkpoints stay in storage; the others are deleted once a newer one is complete."""

    latest: int = Field(
        default=1, ge=0, description="so many of the last ones", json_schema_extra={"effect": "storage"}
    )
    best: int = Field(
        default=0,
        ge=0,
        description="so many with the highest score; a simulation draws the scores from the seed",
        json_schema_extra={"effect": "storage"},
    )
    milestone_every: int | None = Field(
        default=None,
        ge=1,
        description="those after every so many steps: a multiple of `every_steps`",
        json_schema_extra={"effect": "storage"},
    )
    recovery: bool = Field(
        default=True,
        description="the last one from which training can go on exactly",
        json_schema_extra={"effect": "storage"},
    )


class Checkpoint(Record):
    """Writes of all trained state to storage."""

    every_steps: int | None = Field(default=None, ge=1, description="null: never")
    blocking: bool = Field(
        default=True,
        description="true: trainers wait until it is written; false: they copy their state to the host's memory, and it"
        " is written from there beside the following steps, one checkpoint at a time",
    )
    keep: Keep | None = Field(default=None, description="null: all stay")


class Fault(Record):
    """Something that fails, once or again and again."""

    kind: Kind
    at: Seconds | None = Field(default=None, description="when, counted from the start of the run")
    mtbf: Seconds | None = Field(
        default=None,
        gt=0,
        description="mean time between failures of each target, drawn from the seed (a Poisson process); not with `at`",
    )
    target: str | None = Field(
        default=None,
        description="a worker (`actor.generate[0]`), a machine (`train/0`) or links (`port train/0`, `spine a`, `wan a>b`,"
        " `storage a`); null with `mtbf`: every one there is",
    )
    recovery: Recovery | None = Field(
        default=None,
        description="reassign: other engines take over its samples; restart: they wait for it; redundant: `spare` takes"
        " its place; restart_from_checkpoint: the whole run goes back. null: the first that the kind knows",
    )
    spare: str | None = Field(default=None, description="the engine that stands idle until it replaces the target")
    duration: Seconds | None = Field(
        default=None, description="of a straggler, a degraded link or a preemption; null: to the end"
    )
    factor: float = Field(
        default=0.5, ge=0, lt=1, description="share of its speed or bandwidth that a straggler or degraded link keeps"
    )
    notice: Seconds = Field(
        default=0.0, description="between a preemption's notice and its start: a last checkpoint is written if it fits"
    )
    detect: Seconds = Field(
        default=30.0,
        description="until a loss is noticed; Ray declares a node dead after about 5 missed health checks, 30 s. In a real"
        " run a worker is lost once its heartbeat has been missing for so long, whether it was killed or hangs",
    )
    start: Seconds | None = Field(
        default=None,
        description="from there until a replacement runs, reading its state left out; null: what the profile says of a"
        " fresh process, 60 s where it says nothing. A real one takes what it takes",
    )

    @property
    def way_back(self) -> Recovery | None:
        """The recovery that is taken."""
        known = RECOVERIES[self.kind]
        return self.recovery or (known[0] if known else None)

    @model_validator(mode="after")
    def _sound(self) -> Fault:
        if (self.at is None) == (self.mtbf is None):
            raise WrongValue(
                path=("at",), problem="exactly one of `at` and `mtbf` is needed", remedy="write `at: 120 s`"
            )
        if self.recovery is not None and self.recovery not in RECOVERIES[self.kind]:
            fits = " or ".join(RECOVERIES[self.kind])
            remedy = f"use {fits}" if fits else "remove it"
            raise WrongValue(path=("recovery",), problem=f"not a way back from {self.kind}", remedy=remedy)
        if (self.spare is None) == (self.recovery == "redundant"):
            problem, remedy = "goes with `recovery: redundant`, and only with it", "name an idle engine, or remove it"
            raise WrongValue(path=("spare",), problem=problem, remedy=remedy)
        if self.spare is not None and self.target is None:
            problem, remedy = "a spare replaces one engine", "name that engine"
            raise WrongValue(path=("target",), problem=problem, remedy=remedy)
        if self.target is None and self.mtbf is None and self.kind != "buffer_lost":
            problem, remedy = f"{self.kind} at a time needs a target", "name a worker, machine or link"
            raise WrongValue(path=("target",), problem=problem, remedy=remedy)
        if self.kind == "straggler" and self.factor == 0:
            remedy = "use a factor above 0, or worker_lost"
            raise WrongValue(path=("factor",), problem="a straggler still works", remedy=remedy)
        return self
