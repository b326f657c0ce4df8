"""Plays a scenario in virtual time: one process per node of the dataflow, each waiting for what it requires.

The loop is the executor's: await the requirements, run the stage, publish. Only the stage itself differs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from lab.errors import InputError, RunStuck
from lab.fates import TRAINED
from lab.library import device as library_device
from lab.publication import too_rare
from lab.scenario import Scenario
from lab.timeline import Header, Timeline, header_of
from lab.wiring import build
from profiles.cost import CostModel
from profiles.memory import crowded, peaks, roomier
from profiles.profile import Profile
from simulator import (
    checkpoints,
    evaluating,
    experience,
    generating,
    publishing,
    reading,
    scoring,
    selecting,
    stuck,
    switching,
    update,
)
from simulator.engine import TooSmall
from simulator.faults import mtbf, play
from simulator.world import Process, World


def simulate(scenario: Scenario, profiles: Mapping[str, Profile]) -> Timeline:
    """The predicted timeline of a scenario; `profiles` by device kind.

    Deterministic: equal arguments give equal timelines. Raises InputError where a sequence cannot fit the KV cache, and for
    what is stated for a time after the end of the run.
    """
    begun = time.monotonic()
    costs = CostModel(scenario, profiles)
    world = World(scenario, build(scenario), costs)
    try:
        _play(world)
    except TooSmall as error:
        raise _too_small(scenario, str(error)) from None
    except RuntimeError:
        if math.isinf(world.env.peek()) and (told := stuck.waits(world)):  # nothing is left to happen
            raise RunStuck(told) from None
        raise
    if said := too_rare(scenario, world.now):
        key, problem, remedy = said
        raise InputError(key=key, problem=problem, remedy=remedy)
    for note in world.at_end.values():
        note()
    return Timeline.of(_header(world, time.monotonic() - begun), world.spans)


def _play(world: World) -> None:
    """To the end; faults may make several attempts of it."""
    if not world.scenario.faults:
        _start(world)
        world.env.run(until=world.env.all_of(world.last()))
        if not world.dataflow.continuous:
            world.env.run()  # what goes on beside the last stages
        world.env.run(until=world.env.all_of([write for write in world.writes.values() if write.is_alive]))
        return
    if strike := play(world, lambda: _start(world)).left():
        key, problem = f"faults[{strike.entry}].at", f"the run ends at {world.now:.4g} s, before {strike.at:.4g} s"
        raise InputError(key=key, problem=problem, remedy="choose an earlier time, or more steps")


def _start(world: World) -> None:
    for stage in world.dataflow.nodes:
        if not world.dataflow.nodes[stage].continuous:
            world.env.process(_node(world, stage))
    if world.dataflow.continuous:
        from simulator import asynchronous

        asynchronous.play(world)


def _too_small(scenario: Scenario, problem: str) -> InputError:
    """The message for a KV cache that cannot hold a sequence, or for weights that leave no room for one."""
    for worker in scenario.team("actor", "generate"):
        if text := crowded(scenario, worker):
            return InputError(key="place.actor.generate", problem=text, remedy=roomier(scenario, worker))
    key = "rollout.kv_memory_fraction" if scenario.rollout.kv_bytes is None else "rollout.kv_bytes"
    return InputError(key=key, problem=problem, remedy="enlarge it, or shorten sequences")


def _node(world: World, stage: str) -> Process:
    for step in world.dataflow.steps(stage):
        if world.finished(stage, step).triggered:
            continue  # before a fault that took the run back
        for needed in world.dataflow.requirements(stage, step):
            yield world.finished(*needed)
        for needed in world.dataflow.streams(stage, step):
            yield world.started(*needed)
        world.started(stage, step).succeed()
        yield from _call(world, stage)
        yield world.env.all_of([world.env.process(part) for part in _parts(world, stage, step)])
        selecting.select(world, stage, step)
        for stream in world.streams(stage, step):
            stream.close()
        world.finished(stage, step).succeed()


def _parts(world: World, node: str, step: int) -> list[Process]:
    """What a node's workers do in a step; of all stages, a switch alone has several nodes."""
    stage = world.dataflow.nodes[node].stage
    reading.read(world, step)
    return switching.switch(world, node, step) if stage == "switch" else STAGES[stage](world, step)


def _call(world: World, stage: str) -> Process:
    """The driver's calls to the stage's workers, before and after their work; they go out together."""
    worker = world.scenario.workers[world.dataflow.nodes[stage].workers[0]]
    yield world.env.timeout(world.cost(worker, "dispatch", {"calls": 1.0, "bytes": 0.0}).seconds)


def _update(world: World, stage: str, step: int) -> list[Process]:
    role, lengths = world.dataflow.nodes[stage].role, world.ledger.lengths(step)
    if role == world.scenario.algorithm.trains[0]:
        world.ledger.settle(world.ledger.batches[step], TRAINED)
    return update.update(world, role, step, lengths)


STAGES: dict[str, Callable[[World, int], list[Process]]] = {
    "rollout": generating.rollout,
    "transfer": experience.transfer,
    "reward": lambda world, step: scoring.score(world, "reward", step),
    "reference": lambda world, step: scoring.score(world, "reference", step),
    "value": lambda world, step: scoring.judge(world, "value", step),
    "old_logprob": lambda world, step: scoring.judge(world, "old_logprob", step),
    "advantage": lambda world, step: [update.advantage(world, step)],
    "update_critic": lambda world, step: _update(world, "update_critic", step),
    "update_actor": lambda world, step: _update(world, "update_actor", step),
    "evaluate": evaluating.evaluate,
    "weight_sync": publishing.weight_sync,
    "checkpoint": checkpoints.checkpoint,
}
"""by stage: the processes, one per worker, that play it in one step"""


def _header(world: World, wall_s: float) -> Header:
    scenario = world.scenario
    return msgspec.structs.replace(
        header_of(scenario, "simulated"), profiles=world.costs.header_profiles(), memory=peaks(scenario),
        samples=world.ledger.counts(), wasted_tokens=world.ledger.wasted_tokens(), **_failures(world),
        price_per_hour=_price(scenario), software=_software(), wall_s=wall_s,
    )  # fmt: skip


def _failures(world: World) -> dict[str, Any]:
    """What the header says of faults and checkpoints."""
    back = sum("step" in fault for fault in world.faults)
    drawn = mtbf(world.scenario) or (world.now / back if back else None)
    lost_s, storage = world.now - world.progress(), world.store.summary()
    lost = {"lost_s": max(lost_s, 0.0), "lost_tokens": world.ledger.lost_tokens()}
    return {"faults": world.faults, "mtbf_s": drawn, "storage": storage, **lost}


def _price(scenario: Scenario) -> float | None:
    """US dollars per hour of all devices in pools; None where one has no price."""
    devices = [device for devices in scenario.devices.values() for device in devices]
    prices = [library_device(scenario.hardware.node_of(device).device).price_per_hour for device in devices]
    return None if None in prices else float(sum(price or 0.0 for price in prices))


def _software() -> dict[str, Any]:
    found = {}
    for name in ("rlhf-lab", "simpy", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
