"""Plays a scenario in virtual time: one process per node of the dataflow, each waiting for what it requires.

The loop is the executor's: await the requirements, run the stage, publish. Only the stage itself differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import numpy as np

from lab.dealing import Share
from lab.errors import InputError
from lab.library import device as library_device
from lab.placement import Worker
from lab.scenario import Scenario
from lab.timeline import Header, Timeline, header_of
from lab.wiring import build
from profiles.cost import CostModel
from profiles.memory import crowded, peaks, roomier
from profiles.profile import Profile
from simulator import scoring, update
from simulator.blocks import Ints
from simulator.engine import TooSmall
from simulator.ledger import BUFFERED, TRAINED
from simulator.lockstep import start_engine
from simulator.rollout import Piece, samples
from simulator.world import Lane, Process, World


def simulate(scenario: Scenario, profiles: Mapping[str, Profile]) -> Timeline:
    """The predicted timeline of a scenario; `profiles` by device kind.

    Deterministic: equal arguments give equal timelines. Raises InputError where a sequence cannot fit the KV cache.
    """
    begun = time.monotonic()
    costs = CostModel(scenario, profiles)
    world = World(scenario, build(scenario), costs)
    for stage in world.dataflow.nodes:
        world.env.process(_node(world, stage))
    try:
        world.env.run()
    except TooSmall as error:
        raise _too_small(scenario, str(error)) from None
    return Timeline.of(_header(world, time.monotonic() - begun), world.spans)


def _too_small(scenario: Scenario, problem: str) -> InputError:
    """The message for a KV cache that cannot hold a sequence, or for weights that leave no room for one."""
    for worker in scenario.team("actor", "generate"):
        if text := crowded(scenario, worker):
            return InputError(key="place.actor.generate", problem=text, remedy=roomier(scenario, worker))
    key = "rollout.kv_memory_fraction" if scenario.rollout.kv_bytes is None else "rollout.kv_bytes"
    return InputError(key=key, problem=problem, remedy="enlarge it, or shorten sequences")


def _node(world: World, stage: str) -> Process:
    for step in world.dataflow.steps(stage):
        for needed in world.dataflow.requirements(stage, step):
            yield world.finished(*needed)
        for needed in world.dataflow.streams(stage, step):
            yield world.started(*needed)
        world.started(stage, step).succeed()
        yield from _call(world, stage)
        yield world.env.all_of([world.env.process(part) for part in STAGES[stage](world, step)])
        for stream in world.streams(stage, step):
            stream.close()
        world.finished(stage, step).succeed()


def _call(world: World, stage: str) -> Process:
    """The driver's calls to the stage's workers, before and after their work; they go out together."""
    worker = world.scenario.workers[world.dataflow.nodes[stage].workers[0]]
    yield world.env.timeout(world.cost(worker, "dispatch", {"calls": 1.0, "bytes": 0.0}).seconds)


def _rollout(world: World, step: int) -> list[Process]:
    engines, shares = world.scenario.team("actor", "generate"), world.dealer.deal(step)
    everything = np.arange(world.scenario.workload.samples_per_step)
    numbers = world.ledger.issue(step, everything, world.dataflow.policy_version("rollout", step))
    world.ledger.batches[step] = numbers
    pairs = zip(engines, shares, strict=True)
    return [_generate(world, worker, step, share, numbers) for worker, share in pairs if share.prompts]


def _generate(world: World, worker: Worker, step: int, share: Share, numbers: Ints) -> Process:
    """One engine's part of a step; `numbers` are the ledger's, of all samples of the step."""
    scenario, requests = world.scenario, samples(world.scenario, step, share.prompts)
    mine = numbers.reshape(-1, scenario.workload.samples_per_prompt)[share.prompts].ravel()
    streams = world.streams("rollout", step)
    engine = start_engine(scenario, worker, world.costs.engine_table(worker), requests)
    engine.arrive(range(len(requests)))
    lane = Lane(world, "rollout", step, worker)
    counts = dict.fromkeys(("iterations", "preemptions", "recomputed_tokens", "cached_tokens"), 0)
    for piece in engine.pieces():
        yield from _piece(world, lane, piece)
        for stream in streams:
            stream.put(mine[list(piece.ended)].tolist())
        counts["iterations"] += piece.iterations
        counts["preemptions"] += piece.preempted
        counts["recomputed_tokens"] += piece.recomputed_tokens
        counts["cached_tokens"] += piece.cached_tokens
    world.ledger.generated(mine, requests.response)
    world.ledger.settle(mine, BUFFERED)
    given, made = int(requests.prompt.sum()), int(requests.response.sum())
    host = {"calls": 1.0, "samples": float(len(requests)), "tokens": float(made)}
    yield from world.spend(worker, "rollout_host", host)
    world.dealer.returned(np.repeat(share.prompts, scenario.workload.samples_per_prompt), requests.response)
    lane.end(
        tokens=given + made, samples=len(requests), prompt_tokens=given, response_tokens=made, **counts, **share.notes
    )  # fmt: skip


def _piece(world: World, lane: Lane, piece: Piece) -> Process:
    """The iterations of a piece; what comes beside them stretches it."""
    start, worker = world.now, lane.worker
    cost = world.costs.iterations(worker, piece.seconds, (piece.first, piece.last))
    yield from world.cores(worker).work(worker, "engine_step", cost.seconds)
    lane.record(
        piece.op, start, cost.extrapolated, tokens=piece.iterations * piece.tokens, iterations=piece.iterations,
        sequences=piece.sequences,
    )  # fmt: skip


def _lengths(world: World, step: int) -> list[int]:
    """Tokens of every sample of a step's batch, prompt and response."""
    return [int(n) for n in world.ledger.lengths(step)]


def _values(world: World, step: int) -> list[Process]:
    lengths = _lengths(world, step)
    return [scoring.value(world, step, lengths, rank) for rank in range(len(world.scenario.team("critic", "train")))]


def _update_actor(world: World, step: int) -> list[Process]:
    lengths = _lengths(world, step)
    world.ledger.settle(world.ledger.batches[step], TRAINED)
    return update.update(world, "actor", step, lengths)


STAGES: dict[str, Callable[[World, int], list[Process]]] = {
    "rollout": _rollout,
    "reward": lambda world, step: [scoring.score(world, "reward", step, _lengths(world, step))],
    "reference": lambda world, step: [scoring.score(world, "reference", step, _lengths(world, step))],
    "value": _values,
    "advantage": lambda world, step: [update.advantage(world, step, _lengths(world, step))],
    "update_critic": lambda world, step: update.update(world, "critic", step, _lengths(world, step)),
    "update_actor": _update_actor,
    "weight_sync": lambda world, step: [update.weight_sync(world, step)],
    "checkpoint": update.checkpoint,
}
"""by stage: the processes, one per worker, that play it in one step"""


def _header(world: World, wall_s: float) -> Header:
    scenario = world.scenario
    return msgspec.structs.replace(
        header_of(scenario, "simulated"), profiles=world.costs.header_profiles(), memory=peaks(scenario),
        samples=world.ledger.counts(), wasted_tokens=world.ledger.wasted_tokens(),
        price_per_hour=_price(scenario), software=_software(), wall_s=wall_s,
    )  # fmt: skip


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
