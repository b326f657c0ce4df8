"""How samples come from the engines to the trainer, and what of them is judged before they leave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from lab.dataflow import Edge
from lab.errors import WrongValue
from lab.library import link
from lab.records import Record
from lab.units import Seconds

if TYPE_CHECKING:
    from lab.scenario import Scenario


class Prescreen(Record):
    """A small reward model beside the engines, which settles what is clear; the rest goes to the reward itself."""

    share: float = Field(gt=0, le=1, description="of the samples that it settles, drawn from the seed")
    per_sample: Seconds = Field(description="that it takes on an engine's machine for each sample")


class Experience(Record):
    """How samples are sent, and what of them."""

    transport: Literal["rpc", "shared_memory", "object_store", "rdma"] = Field(
        default="rpc",
        description="rpc: packed, sent and unpacked; object_store: copied into a store, fetched from machine to machine and "
        "read in place; rdma: sent as it lies; shared_memory: copied within one machine",
    )
    compression: Literal["none", "lz4", "zstd"] = "none"
    logprobs: Literal["none", "sampled", "top_k", "full"] = Field(
        default="sampled", description="of the engine, for each token: none, that of the token, the k largest, or all"
    )
    top_k: int | None = Field(default=None, ge=1, le=10**5, description="k, for `logprobs: top_k`")
    batch_samples: int | None = Field(
        default=None,
        ge=1,
        description="samples of one message, at most; with `prefetch` and a barrier a message waits until it has so many or no"
        " more come; null: all that wait when the connection is free",
    )
    prefetch: bool = Field(
        default=False, description="samples are sent as soon as they are generated, instead of all after the rollout"
    )
    prescreen: Prescreen | None = Field(default=None, description="null: every sample goes to the reward")

    @model_validator(mode="after")
    def _k_given(self) -> Experience:
        if (self.logprobs == "top_k") != (self.top_k is not None):
            problem = "it is needed with `logprobs: top_k`, and only there"
            raise WrongValue(path=("top_k",), problem=problem, remedy="give or remove it, or change logprobs")
        return self


def trainer_site(scenario: Scenario) -> str:
    """Where samples are sent to."""
    return scenario.hardware.site_of(scenario.team("actor", "train")[0].devices[0]).name


def scored_before(scenario: Scenario, stage: str) -> bool:
    """Whether a stage scores samples before they are sent: where its devices stand at another site than the trainer."""
    if scenario.experience is None or stage not in ("reward", "reference"):
        return False
    site = scenario.hardware.site_of
    if stage == "reward" and scenario.place.reward_head:
        stage = "reference"
    return any(site(worker.devices[0]).name != trainer_site(scenario) for worker in scenario.team(stage, "score"))


def source(scenario: Scenario, stage: str) -> str:
    """The stage that a scoring stage has its samples from."""
    sent = scenario.experience is not None and scenario.schedule.mode != "asynchronous"
    return "transfer" if sent and not scored_before(scenario, stage) else "rollout"


def edges(scenario: Scenario, stages: list[str], ahead: int) -> Iterator[Edge]:
    """Around the stage that sends samples; an engine hands its samples over before it is given new prompts or weights."""
    if "transfer" not in stages or scenario.experience is None:
        return
    prefetch = scenario.experience.prefetch
    yield Edge(source="rollout", target="transfer", unit="sample", capacity=1 + ahead, streams=prefetch)
    for stage in [stage for stage in ("reward", "reference") if stage in stages and scored_before(scenario, stage)]:
        yield Edge(source=stage, target="transfer", unit="sample", capacity=1 + ahead)
    yield Edge(source="transfer", target="advantage", unit="sample", capacity=1 + ahead)
    yield Edge(source="transfer", target="rollout", unit="order", lag=1)
    if ahead:
        yield Edge(source="transfer", target="weight_sync", unit="order", lag=-ahead)


def contradictions(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """What in a scenario contradicts how its samples are sent: key, problem and remedy."""
    said = scenario.experience
    if said is None:
        return
    if not scenario.algorithm.rolls_out:
        yield "experience", f"{scenario.algorithm.name} generates nothing that could be sent", "remove it"
        return
    away = [stage for stage in ("reward", "reference") if scored_before(scenario, stage)]
    if said.prefetch and away:
        problem = f"samples leave with their {away[0]}, which is computed at another site than the trainer's"
        yield "experience.prefetch", problem, f"set it to false, or place {away[0]}.score at the trainer's site"
    if said.prescreen is not None and scenario.place.reward_function:
        problem = "rewards come from no model that a small one could spare"
        yield "experience.prescreen", problem, "remove it, or set place.reward.score.kind to model"
    yield from _transport(scenario, said)


def _transport(scenario: Scenario, said: Experience) -> Iterator[tuple[str, str, str]]:
    hardware, key = scenario.hardware, "experience.transport"
    ends = [w.devices[0] for work in ("generate", "train") for w in scenario.team("actor", work)]
    machines = {hardware.machine_of(end) for end in ends}
    if said.transport == "shared_memory" and len(machines) > 1:
        problem = f"engines and trainer stand on {len(machines)} machines, which share no memory"
        yield key, problem, "set it to rpc, object_store or rdma"
    if said.transport == "rdma" and len(machines) > 1:
        sites = {hardware.site_of(end).name: hardware.site_of(end) for end in ends}
        if len(sites) > 1:
            yield key, f"it does not reach from site {min(sites)} to {max(sites)}", "set it to rpc or object_store"
        for name, site in sites.items():
            if link(site.fabric.link).transport != "rdma":
                yield key, f"{site.fabric.link} between the machines of site {name} has none", "set it to rpc"
