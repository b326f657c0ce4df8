"""How new weights reach the engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from lab.errors import WrongValue
from lab.intervals import length
from lab.records import Record
from lab.units import Seconds

if TYPE_CHECKING:
    from lab.scenario import Scenario
    from lab.timeline import Span


class WeightSync(Record):
    """How weights reach the engines: who acts, over what, how much, and what becomes of what runs meanwhile."""

    trigger: Literal["push", "pull", "event"] = Field(
        default="push",
        description="push: the trainer sends to all engines at once, which are held until all have the weights; pull: "
        "each engine looks for new weights every so often; event: it is told of them and fetches them by itself",
    )
    every: Seconds | None = Field(default=None, gt=0, description="between two looks of an engine that pulls")
    transport: Literal["nccl", "object_store", "store"] = Field(
        default="nccl",
        description="nccl: from device to device (on cores by gloo, or plain TCP where engines may be lost), or, where "
        "engines fetch, out of the memory of the trainer's host; object_store: out of that memory through Ray, once to "
        "each machine; store: through the storage of the trainer's site",
    )
    topology: Literal["chain", "tree", "flat"] | None = Field(
        default=None,
        description="chain: in pieces from device to device; tree: whoever has them sends to one more, and engines that "
        "fetch do so from the nearest that has them; flat: all comes from the trainer, or from the store; null: chain "
        "for a push, else tree",
    )
    payload: Literal["full", "delta", "int8"] = Field(
        default="full",
        description="full: all that is trained, adapters alone where there are some; delta: parameters that changed, "
        "and which they are; int8: in eight bits with a scale for each block",
    )
    delta_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="of the parameters, those that a step changes, for `payload: delta`; a real run sends all that "
        "changed, and says what share that was",
    )
    in_flight: Literal["drain", "interrupt", "mix"] = Field(
        default="drain",
        description="samples that run when an engine takes new weights. drain: they end first; interrupt: they are thrown "
        "away and issued again; mix: they go on under the new weights",
    )
    kv: Literal["recompute", "keep"] = Field(
        default="recompute", description="keys and values of samples that go on: computed anew, or kept as they are"
    )
    barrier_timeout: Seconds | None = Field(
        default=None,
        gt=0,
        description="engines that have not taken the weights so long after their publication are named, give up, and get "
        "no prompts in the next step; null: they are waited for",
    )

    @property
    def route(self) -> Literal["chain", "tree", "flat"]:
        """The topology, chosen where nothing is said."""
        return self.topology or ("chain" if self.trigger == "push" else "tree")

    @model_validator(mode="after")
    def _whole(self) -> WeightSync:
        for key, needed, when in (
            ("every", self.trigger == "pull", "`trigger: pull`"),
            ("delta_share", self.payload == "delta", "`payload: delta`"),
        ):
            if needed and getattr(self, key) is None:
                raise WrongValue(path=(key,), problem=f"{when} needs it", remedy=f"give `{key}`")
            if not needed and getattr(self, key) is not None:
                raise WrongValue(path=(key,), problem=f"it has a meaning only with {when}", remedy="remove it")
        return self

    @model_validator(mode="after")
    def _fitting(self) -> WeightSync:
        push = self.trigger == "push"
        if push and self.transport != "nccl":
            problem = "who reads from a store fetches by itself, and nothing is pushed"
            raise WrongValue(path=("transport",), problem=problem, remedy="set `trigger: event`, or remove it")
        if self.transport == "object_store" and self.topology is not None:
            problem = "who gets an object from whom is Ray's choice"
            raise WrongValue(path=("topology",), problem=problem, remedy="remove it")
        if not push and self.topology == "chain":
            problem = "a chain goes through all engines at once, and these fetch one by one"
            raise WrongValue(path=("topology",), problem=problem, remedy="set it to tree or flat")
        if push and self.barrier_timeout is not None:
            problem = "a push reaches all engines together, so that none can be late"
            raise WrongValue(path=("barrier_timeout",), problem=problem, remedy="set `trigger: event`, or remove it")
        if self.kv == "keep" and self.in_flight != "mix":
            problem = f"with `in_flight: {self.in_flight}` no sample goes on under new weights"
            raise WrongValue(path=("kv",), problem=problem, remedy="set `in_flight: mix`, or remove it")
        return self


def too_rare(scenario: Scenario, run_s: float) -> tuple[str, str, str] | None:
    """Key, problem and remedy where engines pull, and a run of so many seconds was over before all had looked once."""
    rule = scenario.weight_sync
    if rule.every is None or rule.every <= run_s or not scenario.algorithm.rolls_out:
        return None
    problem = f"engines look for weights every {rule.every:g} s, and the run ends at {run_s:.4g} s"
    return "weight_sync.every", problem, "set it lower, or make more steps"


def idles(scenario: Scenario, spans: Iterable[Span]) -> tuple[str, str, str] | None:
    """The same where everybody waits for engines to look: all the work of the run takes less time than one interval."""
    every = scenario.weight_sync.every
    work_s = length((span.start_s, span.end_s) for span in spans if not span.op)
    if every is None or every <= work_s or not scenario.algorithm.rolls_out:
        return None
    problem = f"engines look for weights every {every:g} s, and somebody works in {work_s:.4g} s of the run only"
    return "weight_sync.every", problem, "set it lower: most of the run waits for them to look"


def contradictions(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """What in a scenario contradicts its weight sync: key, problem and remedy."""
    rule, continuous = scenario.weight_sync, scenario.schedule.mode == "asynchronous"
    for key in ("in_flight", "kv"):
        if not continuous and getattr(rule, key) != WeightSync.model_fields[key].default:
            problem = "no sample runs when weights arrive, except with `schedule: {mode: asynchronous}`"
            yield f"weight_sync.{key}", problem, "remove it, or set the mode"
    if continuous and rule.barrier_timeout is not None:
        problem = "engines of an asynchronous schedule do not wait for each other"
        yield "weight_sync.barrier_timeout", problem, "remove it"
    if scenario.algorithm.rolls_out:
        yield from _payload(scenario)
        yield from _store(scenario)


def _payload(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    key, model = "weight_sync.payload", scenario.model("actor")
    if scenario.weight_sync.payload != "delta":
        return
    if model.lora is not None:
        yield key, "adapters are sent whole, and are little", "remove it"
    for worker in scenario.team("actor", "generate"):
        if worker.dtype != model.dtype:
            problem = f"changes of {model.dtype} weights cannot be added to those of {worker.dtype} ({worker.name})"
            yield key, problem, "set it to full or int8, or give the engine the model's dtype"


def _store(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """Files in a machine are read by no other machine."""
    if scenario.weight_sync.transport != "store":
        return
    hardware, trainers = scenario.hardware, scenario.team("actor", "train")
    site = hardware.site_of(trainers[0].devices[0])
    machines = {hardware.machine_of(device) for worker in trainers for device in worker.devices}
    away = [w for w in scenario.team("actor", "generate") if {*map(hardware.machine_of, w.devices)} - machines]
    if site.storage.in_machine and (away or len(machines) > 1):
        problem = f"the storage of site {site.name} lies in each machine, and the weights are needed in others"
        yield "weight_sync.transport", problem, "set it to nccl, or the storage's tier to a shared one"
