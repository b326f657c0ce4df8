"""Trained state to storage and back: writes that block or go on beside the next steps, and what is kept of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.model import DTYPE_BYTES
from lab.placement import Worker
from lab.policies import retention
from lab.scenario import Scenario
from profiles.memory import ADAM_STATE_BYTES
from simulator.network import Flow, Flows
from simulator.transfers import networked, written
from simulator.world import Lane, Process, World

SCORES = 7
"""what the draws of checkpoints' scores are told apart by from all other draws"""


@dataclass(eq=False)
class Saved:
    """One checkpoint."""

    step: int
    parts: int
    """ranks whose write is not complete"""
    score: float
    progress_s: float
    """useful seconds of the run behind it"""
    bytes: float = 0.0

    @property
    def complete(self) -> bool:
        return self.parts == 0


class Store:
    """The checkpoints in storage, as retention leaves them."""

    def __init__(self, scenario: Scenario) -> None:
        self._rule, self._seed = scenario.checkpoint.keep, scenario.seed
        self._saved: dict[int, Saved] = {}
        self.written_bytes = 0.0
        self.peak_bytes = 0.0

    def begin(self, step: int, parts: int, progress_s: float) -> None:
        """A checkpoint that so many ranks write; its state is that of now."""
        if step not in self._saved:
            score = float(np.random.default_rng((self._seed, SCORES, step)).normal())
            self._saved[step] = Saved(step=step, parts=parts, score=score, progress_s=progress_s)

    def passed(self, step: int, progress_s: float) -> None:
        """A rank goes on with its work: what comes is behind the checkpoint."""
        self._saved[step].progress_s = progress_s

    def write(self, step: int, size: float) -> None:
        """A rank has written its part; the last one completes the checkpoint, and what is not kept goes."""
        saved = self._saved[step]
        saved.parts -= 1
        saved.bytes += size
        self.written_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        if saved.complete and self._rule is not None:
            self._prune()

    @property
    def bytes(self) -> float:
        """What lies in storage now."""
        return sum(saved.bytes for saved in self._saved.values())

    def last(self) -> Saved | None:
        """The newest complete one."""
        complete = [saved for saved in self._saved.values() if saved.complete]
        return max(complete, key=lambda saved: saved.step, default=None)

    def discard(self, step: int) -> None:
        """Those of this step and later ones belong to a past that did not happen; incomplete ones stay so for ever."""
        self._saved = {number: saved for number, saved in self._saved.items() if number < step and saved.complete}

    def summary(self) -> dict[str, Any]:
        """For the header: bytes, and the steps whose checkpoints are there at the end."""
        steps = sorted(saved.step for saved in self._saved.values() if saved.complete)
        return {
            "written_bytes": self.written_bytes, "peak_bytes": self.peak_bytes, "bytes": self.bytes, "steps": steps
        }  # fmt: skip

    def _prune(self) -> None:
        rule = self._rule
        assert rule is not None, "without a rule nothing goes"
        kept = retention.kept(
            retention.Retention(
                latest=rule.latest, best=rule.best, milestone_every=rule.milestone_every, recovery=rule.recovery
            ),
            [
                retention.Checkpoint(step=one.step, score=one.score, complete=one.complete)
                for one in self._saved.values()
            ],
        )
        for step in kept.delete:
            del self._saved[step]


def checkpoint(world: World, step: int) -> list[Process]:
    """One process for each trainer rank that writes."""
    teams = trained(world.scenario)
    world.store.begin(step, sum(map(len, teams)), world.progress())
    save = _write if world.scenario.checkpoint.blocking else _copy
    return [save(world, worker, len(team), step) for team in teams for worker in team]


def trained(scenario: Scenario) -> list[tuple[Worker, ...]]:
    """The teams whose state a checkpoint holds."""
    return [scenario.team(role, "train") for role in scenario.algorithm.trains]


def _write(world: World, worker: Worker, ranks: int, step: int) -> Process:
    """The rank stands still until its part is written."""
    lane, size = Lane(world, "checkpoint", step, worker), state_bytes(world, worker) / ranks
    quantities = {"calls": 1.0, "bytes": size}
    if networked(world, worker, "checkpoint"):
        start, flows = world.now, written(world, worker, size)
        extrapolated = world.cost(worker, "checkpoint", quantities).extrapolated
        yield from world.network.send_all(flows)
        lane.record("write", start, extrapolated, bytes=size, flows=len(flows))
    else:
        yield from lane.op("write", "checkpoint", quantities, bytes=size)
    world.store.passed(step, world.progress())
    world.store.write(step, size)
    lane.end()


def _copy(world: World, worker: Worker, ranks: int, step: int) -> Process:
    """The rank copies its part to the host's memory, once the part before has left it, and goes on."""
    lane, size, start = Lane(world, "checkpoint", step, worker), state_bytes(world, worker) / ranks, world.now
    before = world.writes.get(worker.name)
    if before is not None and before.is_alive:
        yield before
        lane.record("write_wait", start, extrapolated=False)
    yield from lane.op("snapshot", "host_copy", {"calls": 1.0, "bytes": size}, bytes=size)
    lane.end()
    world.store.passed(step, world.progress())
    world.writes[worker.name] = world.env.process(_write_beside(world, lane, size))


def _write_beside(world: World, lane: Lane, size: float) -> Process:
    """From the host's memory to storage while the worker does something else."""
    start, worker = world.now, lane.worker
    cost = world.cost(worker, "checkpoint", {"calls": 1.0, "bytes": size})
    if networked(world, worker, "checkpoint"):
        topology, part = world.network.topology, size / len(worker.devices)
        machines = [topology.machine(device).name for device in worker.devices]
        yield from world.network.send_all(Flows.of(Flow(path=topology.to_storage(at), bytes=part) for at in machines))
    else:
        yield world.env.timeout(cost.seconds)
    lane.beside("write", start, cost.extrapolated, bytes=size)
    world.store.write(lane.step, size)


def state_bytes(world: World, worker: Worker) -> float:
    """Trained weights in their dtype and Adam's states: two moments, and an fp32 copy where weights are narrower."""
    scenario = world.scenario
    dtype = scenario.model(worker.role).dtype
    states = ADAM_STATE_BYTES - (4.0 if dtype == "float32" else 0.0)
    return scenario.trainable_parameters(worker.role) * (DTYPE_BYTES[dtype] + states)
