"""A worker gives way to others on its pool, or takes its turn: what happens in its own process.

Everything heavy is imported when a worker does it. Memory is given back to the system: what Python and the C library
would keep for later is of no use to the worker that comes next.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from executor import parcel
from executor.experience import Samples
from lab.scenario import Scenario
from lab.slices import slice_of

if TYPE_CHECKING:
    from torch import nn

    from executor.rollout import RolloutWorker
    from executor.trainer import Trainer

Info = dict[str, Any]


def limits(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """Turns that cannot be taken on this machine's cores: key, problem and remedy."""
    for pool, sharing in scenario.sharing.items():
        key = f"sharing.{pool}.switch"
        if sharing.switch in ("sleep", "offload"):
            problem = f"{sharing.switch} moves weights to the host's memory, and cores have no other"
            yield key, problem, "set it to reload, or simulate the scenario"
    for worker in scenario.workers.values():
        if slice_of(scenario, worker) and worker.parallelism.tensor > 1:
            problem = f"{worker.name} takes turns, which an engine of several processes does not"
            yield "place.actor.generate[0].tensor_parallel", problem, "set it to 1"
    ends = [*scenario.team("actor", "generate"), *scenario.team("actor", "train")]
    turning = {worker.name for worker in ends if slice_of(scenario, worker)}
    if 0 < len(turning) < len(ends) and scenario.team("actor", "generate") and scenario.model("actor").lora is not None:
        problem = f"adapters come to {', '.join(sorted(turning))} in turns, and to others at all times"
        yield "models.actor.lora", problem, "place all engines and the actor's training on pools with turns, or none"
    trained = {slice_of(scenario, worker) for role in scenario.trained for worker in scenario.team(role, "train")}
    if scenario.checkpoint.every_steps is not None and len(trained) > 1:
        problem = f"{' and '.join(scenario.trained)} are not loaded together, and a checkpoint has both"
        yield "checkpoint.every_steps", problem, "put their training into one slice, or remove it"
    yield from _judges(scenario)


def _judges(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """An evaluation is judged when it ends: who judges has to be loaded then."""
    role = "reward" if scenario.algorithm.rolls_out else "reference"
    judge, engines = scenario.team(role, "score")[:1], scenario.team("actor", "generate")[:1]
    turn = slice_of(scenario, judge[0]) if judge else ""
    if scenario.evaluate.every_steps is not None and turn and turn not in {slice_of(scenario, one) for one in engines}:
        problem = f"{judge[0].name}, which judges, is not loaded when an evaluation ends"
        yield "evaluate.every_steps", problem, "remove it, or place that worker on a pool without turns"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One switch, as its workers are told of it."""

    node: str
    step: int
    policy_version: int
    folder: Path
    """of what workers leave behind"""


def leave(worker: Any, turn: Turn, samples: Samples | None = None) -> Info:
    """A worker saves what it has changed, and gives its memory back; an engine first writes `samples` where given.

    The span says how much memory the process had and has, in bytes that lie in the machine's memory.
    """
    with worker.recorder.stage("switch", turn.step, turn.policy_version, node=turn.node) as notes:
        before = resident_bytes()
        if samples is not None:
            with worker.recorder.op("spill") as op:
                op |= _moved(_spill(samples, spilled(turn)))
        if worker.worker.work == "train":
            with worker.recorder.op("save") as op:
                op |= _moved(_save(worker, turn))
        ending, size = ENDS[worker.worker.work], loaded_bytes(worker)
        with worker.recorder.op(ending) as op:
            worker.release()
            give_back()
            op |= _moved(size)
        notes |= {"resident_before": before, "resident_after": resident_bytes()}
    return {"spans": worker.recorder.take()}


def come(worker: Any, turn: Turn, fetches: bool = False) -> tuple[Samples | None, Info]:
    """A worker is loaded as it was when it left, an engine with what was published meanwhile.

    Where it `fetches`, it first reads the step's samples, which all workers of its turn get from it.
    """
    samples: Samples | None = None
    with worker.recorder.stage("switch", turn.step, turn.policy_version, node=turn.node) as notes:
        before = resident_bytes()
        if fetches:
            with worker.recorder.op("fetch") as op:
                samples, size = _fetched(spilled(turn))
                op |= _moved(size)
        with worker.recorder.op(STARTS[worker.worker.work]) as op:
            COMES[worker.worker.work](worker, turn)
            op |= _moved(loaded_bytes(worker))
        notes |= {"resident_before": before, "resident_after": resident_bytes()}
    return samples, {"spans": worker.recorder.take()}


ENDS = {"generate": "stop", "train": "drop", "score": "drop"}
"""by work: the op in which a worker's memory is given back"""
STARTS = {"generate": "start", "train": "restore", "score": "load"}
"""by work: the op in which a worker is loaded"""


def _start(worker: RolloutWorker, turn: Turn) -> None:
    published: Mapping[str, Any] | None = getattr(worker, "published", None)
    worker.load(published)
    worker.policy_version = getattr(worker, "published_version", 0)


def _load(worker: Trainer, turn: Turn) -> None:
    """As the role was saved, or as it was built where it has not had a turn yet."""
    from executor.saving import restore

    worker.load()
    if (turn.folder / worker.saving.rank.name).is_dir():
        restore(worker.learner, turn.folder, worker.saving.rank)


COMES: dict[str, Callable[[Any, Turn], None]] = {
    "generate": _start,
    "train": _load,
    "score": lambda worker, turn: worker.load(),
}
"""by work: how a worker is loaded"""


def _save(worker: Trainer, turn: Turn) -> float:
    from executor.saving import shard_of
    from executor.shard import write

    about = {"step": turn.step, "digest": worker.scenario.digest}
    return write(turn.folder, worker.saving.rank, shard_of(worker.learner, worker.saving.rank), about)


def join(worker: RolloutWorker, host: str, port: int, world_size: int) -> None:
    """The process of an engine meets the trainer's sender: the engine itself comes and goes."""
    from executor.transfer import WeightGroup

    worker.weight_group = WeightGroup(host, port, 1 + worker.index, world_size)  # type: ignore[attr-defined]


def receive(worker: RolloutWorker, step: int, *_: Any) -> Info:
    """The process takes what is published, for the engine that starts in its next turn."""
    with worker.recorder.stage("weight_sync", step, step + 1), worker.recorder.op("transfer"):
        worker.published = dict(worker.weight_group.receive())  # type: ignore[attr-defined]
        worker.published_version = step + 1  # type: ignore[attr-defined]
    return {"spans": worker.recorder.take()}


def publish(network: nn.Module, published: Mapping[str, Any], scenario: Scenario) -> None:
    """Puts published weights into a network that was built as version 0: whole ones, or adapters that are merged."""
    import torch

    from executor.lora import merged, scale

    own, adapters = dict(network.named_parameters()), scenario.model("actor").lora
    changed = published.items() if adapters is None else merged(own, published, scale(adapters))
    with torch.no_grad():
        for name, tensor in changed:
            own[name].copy_(tensor)


def heavy(worker: Any) -> None:
    """Imports what a worker of this kind needs, which takes longest of all.

    What is imported stays: garbage is not looked for in it again, which is most of the time that a release takes.
    """
    import importlib

    from executor.inference import BACKENDS

    modules = {"train": "executor.learner", "score": "executor.network"}
    work = worker.worker.work
    importlib.import_module(BACKENDS[worker.worker.backend][0] if work == "generate" else modules[work])
    gc.collect()
    gc.freeze()


def let_go(worker: Any) -> None:
    """Releases a worker as it is; what it has changed is lost."""
    worker.release()
    give_back()


def come_in(worker: Any) -> None:
    """Loads a worker as it was built first."""
    worker.load()


def step_out(worker: Trainer, turn: Turn) -> None:
    """A trainer saves what it has, and is released; leaves no span."""
    _save(worker, turn)
    let_go(worker)


def take_up(worker: RolloutWorker, turn: Turn) -> None:
    """Starts an engine with what was published last; leaves no span."""
    _start(worker, turn)


def loaded_bytes(worker: Any) -> float:
    """Weights that a worker needs, and beside those of a trainer or an engine, which are float32, adapters and Adam's
    two states."""
    scenario, role = worker.scenario, worker.worker.role
    if worker.worker.work == "score":
        return float(scenario.spec(role).weight_bytes(worker.worker.dtype))
    whole, lora = scenario.spec(role).parameters, scenario.model(role).lora
    held = float(whole if lora is None else whole + lora.parameters(scenario.spec(role)))
    if worker.worker.work == "train":
        stage, ranks = scenario.train(role).zero_stage, len(scenario.team(role, "train"))
        held = held / (ranks if stage == 3 else 1) + 2 * scenario.trainable_parameters(role) / (ranks if stage else 1)
    return 4.0 * held


def give_back() -> None:
    """Objects that only refer to each other are freed, and free memory goes back to the system."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # not the GNU C library: its allocator decides by itself
        return


def resident_bytes() -> int:
    """Of this process in the machine's memory."""
    found: int = psutil.Process().memory_info().rss
    return found


def spilled(turn: Turn) -> Path:
    """The file of the step's samples between two turns."""
    return turn.folder / parcel.name(turn.step)


def _spill(samples: Samples, path: Path) -> float:
    """Bytes that were written; the file is complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    parcel.write(part, samples)
    part.replace(path)
    return float(path.stat().st_size)


def _fetched(path: Path) -> tuple[Samples, float]:
    """Samples and their bytes; the file has served."""
    size, samples = float(path.stat().st_size), parcel.read(path)
    path.unlink()
    return samples, size


def _moved(size: float) -> dict[str, Any]:
    return {"bytes": size, "quantities": {"calls": 1.0, "bytes": size}}
