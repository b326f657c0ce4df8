"""Faults in virtual time: when they strike, and what they do to the run."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lab.errors import InputError
from lab.faults import Fault
from lab.goodput import system_mtbf
from lab.scenario import Scenario
from lab.strikes import Strike, times
from lab.targets import hit, rolls_back, taken
from simulator import recovery
from simulator.world import Process, World

MOST_IN_A_STEP = 2000
"""faults without an update between them, after which a run is given up"""
HOPELESS = 300
"""returns to the same checkpoint in a row after which a run is given up: of a stretch as long as three times the mean
time between faults one attempt in twenty comes through"""


@dataclass(frozen=True, kw_only=True)
class Halt:
    """The run stops as it is."""

    strike: Strike
    record: dict[str, Any]
    """what the header says of it"""
    from_notice: bool = False
    """whether a last checkpoint may still be written"""
    deadline: float = 0.0
    """until when"""


class Faults:
    """The faults of a run; they outlast the attempts in which it is played."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: list[tuple[float, int, Strike]] = []
        self._later: dict[tuple[int, str], Iterator[float]] = {}
        self._number = 0
        self.halted = world.env.event()
        for entry, fault in enumerate(world.scenario.faults):
            for place, target in enumerate(hit(world.scenario, fault)):
                self._later[entry, target] = times(world.scenario, entry, place, fault)
                self._next(entry, fault, target)

    def left(self) -> Strike | None:
        """The first that was stated for a time that the run did not reach."""
        stated = [
            strike for *_, strike in sorted(self._pending, key=lambda item: item[:2]) if strike.fault.at is not None
        ]
        return next((strike for strike in stated if not strike.ends), None)

    def strikes(self) -> Process:
        """Strikes from now on, in one environment."""
        world, trained, in_vain = self._world, -1, 0
        while self._pending:
            yield world.env.timeout(max(self._pending[0][0] - world.now, 0.0))
            if math.isinf(world.env.peek()) and not any(strike.ends for *_, strike in self._pending):
                return  # nothing moves any more, and no fault helps
            strike = heapq.heappop(self._pending)[-1]
            if not strike.ends:
                self._next(strike.entry, strike.fault, strike.target)
            in_vain = in_vain + 1 if world.updated() == trained else 0
            trained = world.updated()
            if in_vain > MOST_IN_A_STEP and strike.fault.mtbf is not None:
                if not self.halted.triggered:
                    self.halted.succeed(_endless(strike, trained + 1))
                return
            self._strike(strike)

    def _next(self, entry: int, fault: Fault, target: str) -> None:
        at = next(self._later[entry, target], None)
        if at is not None:
            self._push(Strike(at=at, entry=entry, fault=fault, target=target))

    def _push(self, strike: Strike) -> None:
        self._number += 1
        heapq.heappush(self._pending, (strike.at, self._number, strike))

    def _strike(self, strike: Strike) -> None:
        world, fault = self._world, strike.fault
        if not strike.ends:
            record = _record(world, strike)
            world.faults.append(record)
        if fault.kind in ("straggler", "link_degraded"):
            share = 1.0 if strike.ends else fault.factor
            slow = world.slow_down if fault.kind == "straggler" else world.degrade
            slow(strike.target, share)
            if not strike.ends and fault.duration is not None:
                self._push(
                    Strike(
                        at=world.now + fault.duration, entry=strike.entry, fault=fault, target=strike.target, ends=True
                    )
                )
        elif rolls_back(world.scenario, fault.kind, strike.target):
            world.env.process(self._roll_back(strike, record))
        elif fault.kind == "buffer_lost":
            world.env.process(self._empty(strike, record))
        else:
            world.env.process(self._take(strike, record))

    def _roll_back(self, strike: Strike, record: dict[str, Any]) -> Process:
        """At once; after a notice, when another update would not be complete and saved in time."""
        world, fault = self._world, strike.fault
        deadline = world.now + fault.notice
        if fault.notice:
            ready = world.env.process(recovery.last_update(world, deadline))
            yield world.env.any_of([ready, world.env.timeout(fault.notice)])
        if not self.halted.triggered:
            in_time = bool(fault.notice) and world.now < deadline
            self.halted.succeed(Halt(strike=strike, record=record, from_notice=in_time, deadline=deadline))

    def _take(self, strike: Strike, record: dict[str, Any]) -> Process:
        """Workers without trained state go, after a notice if there is one."""
        yield self._world.env.timeout(strike.fault.notice)
        self._world.struck = record
        for name in taken(self._world.scenario, strike.target):
            self._world.lose(name, strike.fault)

    def _empty(self, strike: Strike, record: dict[str, Any]) -> Process:
        """What waits for the trainer is gone; it is noticed when weights are complete and the next batch is asked for."""
        world = self._world
        world.struck = record
        if handler := world.on_loss.get(strike.target):
            handler(strike.fault)
        elif world.ledger.num_waiting():
            yield from recovery.settled(world)
            if not self.halted.triggered:
                self.halted.succeed(Halt(strike=strike, record=record))


def _record(world: World, strike: Strike) -> dict[str, Any]:
    """What the header says of a fault; its recovery adds to it."""
    return {
        "at_s": world.now, "kind": strike.fault.kind, "target": strike.target, "recovery": strike.fault.way_back,
        "lost_s": 0.0, "lost_tokens": 0,
    }  # fmt: skip


def mtbf(scenario: Scenario) -> float | None:
    """Mean seconds between faults that take the run back to a checkpoint, as drawn; None where none are drawn."""
    rates: dict[float, int] = {}
    for fault in scenario.faults:
        if fault.mtbf is not None:
            back = sum(rolls_back(scenario, fault.kind, target) for target in hit(scenario, fault))
            rates[fault.mtbf] = rates.get(fault.mtbf, 0) + back
    return system_mtbf(rates)


def play(world: World, start: Callable[[], None]) -> Faults:
    """Plays a run to its end, in as many attempts as its faults make of it. `start` starts the stages' processes."""
    faults = Faults(world)
    whole = world.env.process(_attempt(world, start))
    at, in_vain = -1, 0
    while True:
        faults.halted = world.env.event()
        world.env.process(faults.strikes())
        world.env.run(until=world.env.any_of([whole, faults.halted]))
        if not faults.halted.triggered:
            return faults
        halt = faults.halted.value
        if isinstance(halt, InputError):
            raise halt
        assert isinstance(halt, Halt), "nothing else halts a run"
        world.struck = halt.record
        back = _recover(world, faults, halt)
        at, in_vain = world.first_step, in_vain + 1 if world.first_step == at else 0
        if in_vain == HOPELESS:
            raise _hopeless(world, halt)
        whole = world.env.process(_again(world, start, back, halt.record))


def _hopeless(world: World, halt: Halt) -> InputError:
    problem = (
        f"{HOPELESS} times in a row a fault struck before the checkpoint after step {world.first_step} was complete"
    )
    return InputError(
        key=f"faults[{halt.strike.entry}].mtbf",
        problem=problem,
        remedy="make it longer, or checkpoint.every_steps smaller",
    )


def _endless(strike: Strike, step: int) -> InputError:
    problem = f"{MOST_IN_A_STEP} faults struck before step {step} was trained"
    return InputError(key=f"faults[{strike.entry}].mtbf", problem=problem, remedy="make it longer")


def _again(world: World, start: Callable[[], None], back: Process, record: dict[str, Any]) -> Process:
    """Another attempt, once the run has come back."""
    yield from back
    record["lost_s"] += world.go_on()
    record["until_s"] = world.now
    yield from _attempt(world, start)


def _attempt(world: World, start: Callable[[], None]) -> Process:
    start()
    yield world.env.all_of(world.last())
    yield world.env.all_of([write for write in world.writes.values() if write.is_alive])


def _recover(world: World, faults: Faults, halt: Halt) -> Process:
    """The run goes back; returns what it does before its stages run again."""
    if halt.strike.fault.kind == "buffer_lost":
        recovery.regenerate(world)
        return recovery.nothing(world)
    if halt.from_notice:
        recovery.keep_state(world)
        return _with_notice(world, faults, halt)
    recovery.from_checkpoint(world)
    fault = halt.strike.fault
    away = fault.detect if fault.kind != "preempted" else max(halt.deadline - world.now, 0.0) + (fault.duration or 0.0)
    return recovery.come_back(world, away, fault.start, world.now)


def _with_notice(world: World, faults: Faults, halt: Halt) -> Process:
    """Writes a last checkpoint; where the time does not suffice, the run goes back to an older one."""
    fault, begun = halt.strike.fault, world.now
    write = world.env.process(recovery.last_write(world))
    yield world.env.any_of([write, world.env.timeout(halt.deadline - begun)])
    if write.is_alive:
        faults.halted.succeed(Halt(strike=halt.strike, record=halt.record, deadline=halt.deadline))
        yield world.env.event()  # this attempt ends here
    away = halt.deadline - world.now + (fault.duration or 0.0)
    yield from recovery.come_back(world, away, fault.start, begun)
