"""The parts of a sweep: which workers are started, and which units are measured with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import ray

from executor.measure import collectives, iterations, launching, messages, optables, training, turning
from executor.measure.devices import states
from executor.measure.grids import FITTED, MINIBATCH
from executor.measure.journal import Found, Journal
from executor.measure.plan import scenario
from executor.measure.sweep import Sweep
from executor.neighbour import Neighbour
from executor.workers import HOST, Workers, free_port
from lab.measurement import Measurement

Progress = Callable[[str, int], None]
Take = Callable[[str], Found]

SIZE_REPEATS = 3
COLLECTIVE_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Part:
    """Units that are measured with the same workers; these start only where a unit is missing."""

    name: str
    units: tuple[str, ...]
    start: Callable[[], AbstractContextManager[Take]]


def run(parts: list[Part], journal: Journal, progress: Progress) -> None:
    """Takes every unit that the journal does not have, in order."""
    for part in parts:
        left = [unit for unit in part.units if unit not in journal.units]
        if not left:
            continue
        progress(f"starting workers ({part.name})", len(journal.units))
        with part.start() as take:
            for unit in left:
                progress(unit, len(journal.units))
                journal.add(take(unit))
    progress("measured", len(journal.units))


def planned(arch: str, quick: bool) -> list[Part]:
    """One architecture in three rounds and two ranks where quick; else two architectures and ZeRO stages as well."""
    alone, other = _fewest_cores(), next(name for name in ("tiny-llama", "small-llama") if name != arch)
    ranks = [] if alone else [_ranks(arch, other)]
    if quick:
        return [_rounds(arch, other, 3, alone), *ranks, _launches(arch, alone)]
    stages = [_zero(arch, (1, 2)), _zero(arch, (3, 0))]
    rounds = [_rounds(arch, other, 5, alone), _rounds(other, arch, 2, alone)]
    return [*rounds, *stages, *ranks, _launches(arch, alone)]


def _fewest_cores() -> bool:
    """Whether there is no second core: nothing can be measured beside a neighbour then."""
    return len(scenario("tiny-llama").hardware.select("local")) == 1


def _rounds(arch: str, other: str, rounds: int, alone: bool) -> Part:
    """Rounds alone and beside a busy core take turns, so that a slow minute of the machine does not fall on one."""
    units: list[str] = []
    for number in range(1, rounds + 1):
        units.append(f"{arch}: round {number}, alone")
        if not alone and number < rounds:
            units.append(f"{arch}: round {number}, beside a busy core")
    units += [f"{arch}: adapters"] + ([] if alone else [f"{arch}: two threads"])
    units += [f"{arch}: collectives", f"{arch}: profiled passes", f"{arch}: other sizes, engine starts"]

    @contextmanager
    def start() -> Iterator[Take]:
        with _sweep(arch) as sweep, Neighbour(arch) as neighbour:
            sweep.warm_up()
            yield lambda unit: _round(sweep, neighbour, other, unit)

    return Part(name=arch, units=tuple(units), start=start)


def _round(sweep: Sweep, neighbour: Neighbour, other: str, unit: str) -> Found:
    found, sweep.neighbours = Found(unit=unit), 0
    if unit.endswith("beside a busy core"):
        neighbour.work()
        found.points = sweep.round(neighbours=1)
        neighbour.rest()
    elif unit.endswith("alone"):
        found.points = sweep.round(neighbours=0)
    elif unit.endswith("adapters"):
        found.points = sweep.adapted()
    elif unit.endswith("two threads"):
        found.points = sweep.threaded(2)
    elif unit.endswith("collectives"):
        found.points = [*_collectives(sweep), *_messages(sweep, neighbour)]
    elif unit.endswith("profiled passes"):
        found.operators = _profiled(sweep)
    else:
        found.points, found.notes = _sizes(sweep, other)
    found.states = states()
    return found


@contextmanager
def _sweep(arch: str, **settings: Any) -> Iterator[Sweep]:
    with ExitStack() as stack:
        workers = stack.enter_context(Workers(scenario(arch, **settings)))
        workers.start()
        sweep = Sweep(workers, arch)
        sweep.setup()
        yield sweep


def _collectives(sweep: Sweep) -> list[Measurement]:
    """Between the two trainers' processes, each on a core of its own where there are two."""
    pair, port = (sweep.actor, sweep.critic), free_port()
    joined = [worker.__ray_call__.remote(collectives.join, HOST, port, rank, 2) for rank, worker in enumerate(pair)]
    ray.get(joined)
    found = []
    for size in FITTED.bytes * COLLECTIVE_ROUNDS:
        first, _ = ray.get([worker.__ray_call__.remote(collectives.timings, size) for worker in pair])
        quantities = {"calls": 1.0, "bytes": float(size), "ranks": 2.0}
        found += [
            Measurement(op=op, quantities=quantities, seconds=value, source="sweep")
            for op, values in first.items()
            for value in values
        ]
    return found


def _messages(sweep: Sweep, neighbour: Neighbour) -> list[Measurement]:
    """Alone and, where there is a second core, beside a busy one."""
    found = sweep._tagged(messages.messages())
    if not _fewest_cores():
        neighbour.work()
        sweep.neighbours = 1
        found += sweep._tagged(messages.messages())
        neighbour.rest()
    return found


def _profiled(sweep: Sweep) -> list[dict[str, Any]]:
    samples = ray.put(sweep.samples(MINIBATCH, 64))
    return [
        *sweep.in_process(sweep.engine, optables.engine),
        *sweep.in_process(sweep.reference, optables.scoring, samples),
        *sweep.in_process(sweep.actor, optables.training, samples, step=False),
    ]


def _sizes(sweep: Sweep, other: str) -> tuple[list[Measurement], list[str]]:
    """Optimizer steps and checkpoints of another architecture, and workers of both that end and start anew."""
    batch, _ = sweep.batch((MINIBATCH, 12, 12))
    info = sweep.in_process(sweep.critic, training.at_size, batch, other, SIZE_REPEATS)
    spans = [span for span in info["spans"] if span.op == "optimizer"]
    found = sweep._of([{"spans": spans}]) + sweep._tagged(info["checkpoints"])
    for worker in (sweep.engine, sweep.actor, sweep.reference):
        for arch in (other, sweep.arch):
            found += sweep._of([{"spans": sweep.in_process(worker, turning.turn_about, arch, step=False)}])
    slept, notes = sweep.in_process(sweep.engine, iterations.sleep, step=False)
    return [msgspec.structs.replace(point, model="") for point in found] + slept, notes


def _zero(arch: str, stages: tuple[int, int]) -> Part:
    units = tuple(f"{arch}: ZeRO {stages[0]} and {stages[1]}, round {number}" for number in (1, 2, 3))

    @contextmanager
    def start() -> Iterator[Take]:
        with Workers(scenario(arch, zero_stages=stages)) as workers:
            workers.start()
            sweep = Sweep(workers, arch)
            ray.get([trainer.ready.remote() for trainer in (sweep.actor, sweep.critic)])
            sweep.train((MINIBATCH, 160, 160))
            yield lambda unit: Found(unit=unit, points=sweep.trained(), states=states())

    return Part(name=f"{arch}, ZeRO {stages[0]} and {stages[1]}", units=units, start=start)


def _ranks(arch: str, other: str) -> Part:
    """What a second rank adds to training, for two sizes of the gradients."""
    units = tuple(f"{name}: two ranks" for name in (arch, other))

    @contextmanager
    def start() -> Iterator[Take]:
        with Workers(scenario(arch, ranks=2)) as workers:
            workers.start()
            sweep = Sweep(workers, arch)
            ray.get([rank.ready.remote() for rank in sweep.ranks])
            yield lambda unit: Found(unit=unit, points=_joint(sweep, unit.split(":")[0]), states=states())

    return Part(name=f"{arch}, two ranks", units=units, start=start)


def _joint(sweep: Sweep, asked: str) -> list[Measurement]:
    """Of another architecture only what says how its size changes what ranks do together."""
    if asked == sweep.arch:
        return sweep.joint(asked, FITTED.joint)
    found = sweep.joint(asked, FITTED.joint[-1:])
    return [msgspec.structs.replace(point, model="") for point in found if point.op in ("grad_sync", "optimizer")]


def _launches(arch: str, alone: bool) -> Part:
    """Fresh processes, one after the other. They come last: what they read from the disk is in memory by then, as where a
    run starts a process anew."""
    units = [f"{arch}: launches"] + ([] if alone else [f"{arch}: launches beside a busy core"])

    @contextmanager
    def start() -> Iterator[Take]:
        with Workers(scenario(arch)) as workers, Neighbour(arch) as neighbour:
            workers.start()
            sweep = Sweep(workers, arch)

            def take(unit: str) -> Found:
                busy = unit != units[0]
                sweep.neighbours = int(busy)
                if busy:
                    neighbour.work()
                found = Found(unit=unit, points=sweep._tagged(launching.launches(workers)), states=states())
                neighbour.rest()
                return found

            yield take

    return Part(name=f"{arch}, launches", units=tuple(units), start=start)
