"""The rollout of a step by engines that help each other: they take over what waits elsewhere, and stop together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from lab.dealing import Share
from lab.drawing import issued
from lab.fates import ABORTED, BUFFERED, DROPPED, INDEX, PROMPT, RESPONSE
from lab.placement import Worker
from lab.policies.over_issue import EarlyStop
from lab.policies.stealing import Queues, Room, Steal, settled, startable, steals
from lab.returning import Returning, joint
from lab.scenario import Scenario
from simulator.blocks import Ints
from simulator.fleet import EngineRun
from simulator.rollout import Piece
from simulator.world import Lane, Process, World

__all__ = ["Joint", "Seat", "joint"]


@dataclass(eq=False)
class Seat:
    """An engine in the rollout of a step."""

    run: EngineRun
    lane: Lane
    share: Share
    done: simpy.Event
    """nothing is in it, and nothing comes any more"""
    ended: list[int] = field(default_factory=list)
    """samples that it has given all their tokens"""
    coming: int = 0
    """samples on their way to it"""
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        return not self.run.num_open and not self.coming


class Joint:
    """One step's rollout. Engines that are absent take no part."""

    def __init__(self, world: World, step: int, absent: frozenset[int] = frozenset()) -> None:
        self._world, self._step, self._scenario = world, step, world.scenario
        self._tried, self._returning = world.scenario.num_tried, Returning(world.scenario)
        self.numbers = self._issue()
        self._stopped = False
        self._stealing = world.scenario.rollout.stealing or "actor.generate" in world.scenario.scaling
        self._streams = world.streams("rollout", step)
        engines, shares = world.scenario.team("actor", "generate"), world.dealer.deal(step, absent)
        self.seats = [
            self._seat(worker, share)
            for place, (worker, share) in enumerate(zip(engines, shares, strict=True))
            if place not in absent and (share.prompts or self._stealing)
        ]
        self._mean = _mean_blocks(world.scenario)
        self.over = world.env.event()
        """the step has what it needs"""
        self.reopened = list[simpy.Process]()
        """engines that were given samples after they had ended"""

    def processes(self) -> list[Process]:
        """What the engines do, each until the step needs it no more."""
        for seat in self.seats:
            seat.run.submit(self._of(seat.share.prompts))
        return [self._work(seat) for seat in self.seats]

    def seat_of(self, name: str) -> Seat | None:
        """Where an engine works now; None where it is through."""
        return next((seat for seat in self.seats if seat.run.worker.name == name and not seat.done.triggered), None)

    def give_up(self, seat: Seat) -> None:
        """An engine failed: it is through, and nobody steals in this step any more."""
        seat.done.succeed()
        self._stealing = False
        for other in self.seats:
            self._close(other)

    def active(self) -> list[Seat]:
        """The engines that are not through."""
        return [seat for seat in self.seats if not seat.done.triggered]

    def join(self, worker: Worker) -> None:
        """An engine is there that was not at the start; it takes what waits elsewhere."""
        if self._stealing and self.seat_of(worker.name) is None:
            self._open(worker, [])

    def retire(self, seat: Seat) -> None:
        """An engine that has nothing is not needed any more in this step."""
        seat.done.succeed()

    def note(self, name: str, record: dict[str, Any]) -> None:
        """The first engine that is not through notes a decision on its span."""
        for seat in self.active()[:1]:
            seat.notes.setdefault(name, []).append(record)

    def issue_again(self, samples: Sequence[int]) -> Ints:
        """Others are issued in the place of these; returns their numbers."""
        index = self._world.ledger.column(INDEX)[list(samples)]
        again = self._world.ledger.issue(self._step, index, self._world.dataflow.policy_version("rollout", self._step))
        self.numbers.reshape(-1)[index] = again
        return again

    def give(self, name: str, samples: Sequence[int]) -> None:
        """An engine gets more samples, whether it is through or not."""
        seat = self.seat_of(name)
        if seat is None:
            prompts = sorted({int(self._world.ledger.column(INDEX)[sample]) // self._tried for sample in samples})
            seat = self._open(self._scenario.workers[name], prompts)
        seat.run.submit(samples)

    def _open(self, worker: Worker, prompts: list[int]) -> Seat:
        """An engine takes part from now on, perhaps again."""
        if any(other.run.worker.name == worker.name for other in self.seats):
            self._world.redone[f"rollout/{self._step}/{worker.name}"] += 1
        notes = {"dispatch": self._scenario.rollout.dispatch, "prompts": prompts, "speed": worker.speed}
        seat = self._seat(worker, Share(prompts=prompts, notes=notes))
        self.seats.append(seat)
        self.reopened.append(self._world.env.process(self._work(seat)))
        return seat

    def _issue(self) -> Ints:
        """The step's samples as ledger numbers; (prompts, samples)."""
        version = self._world.dataflow.policy_version("rollout", self._step)
        everything = np.arange(issued(self._scenario) * self._tried)
        return self._world.ledger.issue(self._step, everything, version).reshape(-1, self._tried)

    def _of(self, prompts: Sequence[int]) -> Ints:
        return np.asarray(self.numbers[list(prompts)].ravel())

    def _seat(self, worker: Worker, share: Share) -> Seat:
        lane = Lane(self._world, "rollout", self._step, worker)
        run = EngineRun(
            self._world, worker, lambda sample: self._ended(seat, sample),
            lambda piece, start: _record(lane, piece, start), lambda: self._dry(seat),
        )  # fmt: skip
        seat = Seat(run=run, lane=lane, share=share, done=self._world.env.event())
        if self._world.lossy:
            self._world.stoppable.append(run)
        return seat

    def _work(self, seat: Seat) -> Process:
        """An engine's part, from its first sample to the moment when the step needs it no more."""
        yield seat.done
        yield from seat.run.pause()
        world, mine = self._world, np.array(seat.ended, dtype=np.int64)
        prompt, response, index = (world.ledger.column(column)[mine] for column in (PROMPT, RESPONSE, INDEX))
        given, made = int(prompt.sum()), int(response.sum())
        host = {"calls": 1.0, "samples": float(len(mine)), "tokens": float(made)}
        yield from world.spend(seat.run.worker, "rollout_host", host)
        world.dealer.returned(index // self._tried, response)
        counts = seat.run.counts
        seat.lane.end(
            tokens=given + made, samples=len(mine), prompt_tokens=given, response_tokens=made,
            iterations=counts.iterations, preemptions=counts.preemptions, recomputed_tokens=counts.recomputed_tokens,
            cached_tokens=counts.cached_tokens, **seat.share.notes, **seat.notes,
        )  # fmt: skip

    def _ended(self, seat: Seat, sample: int) -> None:
        """A sample is back; the step may have enough."""
        seat.ended.append(sample)
        ledger = self._world.ledger
        ledger.generated([sample], ledger.column(RESPONSE)[[sample]])
        ledger.settle([sample], BUFFERED)
        ledger.came_from([sample], seat.run.worker.name)
        if usable := self._returning.back(int(ledger.column(INDEX)[sample])):
            self._hand_on(self.numbers.reshape(-1)[usable].tolist())
        if self._returning.enough and not self._stopped:
            self._stop()
        self._close(seat)

    def _hand_on(self, samples: list[int]) -> None:
        for stream in self._streams:
            stream.put(samples)

    def _stop(self) -> None:
        """Enough prompts are whole: the rest is aborted, and what came of it is dropped."""
        said = self._returning.stop()
        self._stopped, self._stealing, ledger = True, False, self._world.ledger
        self.over.succeed()
        ledger.batches[self._step] = self._of(sorted(said.keep))
        rest = self._of([*said.surplus, *said.abort])
        back = np.array([sample for seat in self.seats for sample in seat.ended], dtype=np.int64)
        ledger.settle(np.intersect1d(rest, back), DROPPED)
        self._abort(np.setdiff1d(rest, back), said)

    def _abort(self, samples: Ints, said: EarlyStop) -> None:
        self._world.ledger.settle(samples, ABORTED)
        for seat in self.seats:
            running = [(sample, made) for sample, _, made in seat.run.running()]
            if running:
                self._world.ledger.generated(*zip(*running, strict=True))
            if seat.run.num_open:
                seat.notes |= {"aborted": seat.run.num_open, "kept_prompts": len(said.keep)}
            seat.run.abort(samples)
            if not seat.done.triggered:
                seat.done.succeed()

    def _close(self, seat: Seat) -> None:
        """An engine that has nothing, and that nothing comes to, is done."""
        if seat.idle and not self._stealing and not seat.done.triggered:
            seat.done.succeed()

    def _dry(self, seat: Seat) -> None:
        """An engine could start more than waits in it."""
        if not self._stealing:
            return
        seats = self.active()
        queues = self._queues(seats)
        for move in steals(queues):
            self._move(move, seats[move.thief], seats[move.victim], int(queues.queued[move.victim]))
        if settled(queues):
            self._stealing = False
            for other in self.seats:
                self._close(other)

    def _queues(self, seats: Sequence[Seat]) -> Queues:
        """What waits where, and what could start there at once."""
        runs = [seat.run for seat in seats]
        return Queues(
            queued=np.array([seat.run.num_queued + seat.coming for seat in seats], dtype=np.int64),
            free_slots=np.array([self._startable(run) for run in runs], dtype=np.int64),
            speed=np.array([run.worker.speed for run in runs]),
        )

    def _startable(self, run: EngineRun) -> int:
        return startable(
            Room(
                num_running=run.num_running, num_queued=run.num_queued, free_slots=run.free_slots,
                free_blocks=run.free_blocks, mean_blocks=self._mean,
            )
        )  # fmt: skip

    def _move(self, move: Steal, thief: Seat, victim: Seat, queued: int) -> None:
        """Samples go from one queue to another; that costs a call."""
        taken = victim.run.withdraw(move.num)
        if not taken:
            return
        thief.coming += len(taken)
        theft = {"from": victim.run.worker.name, "samples": len(taken), "queued": queued, "at_s": self._world.now}
        thief.notes.setdefault("steals", []).append(theft)
        self._world.env.process(self._carry(thief, taken))

    def _carry(self, thief: Seat, samples: list[int]) -> Process:
        world = self._world
        yield world.env.timeout(world.cost(thief.run.worker, "dispatch", {"calls": 1.0, "bytes": 0.0}).seconds)
        thief.coming -= len(samples)
        if not self._stopped:
            thief.run.submit(samples)


def _record(lane: Lane, piece: Piece, start: float) -> None:
    """An engine's iterations as a span."""
    table = lane.world.costs.engine_table(lane.worker)
    lane.record(
        piece.op, start, not (table.covers(piece.first) and table.covers(piece.last)),
        tokens=piece.iterations * piece.tokens, iterations=piece.iterations, sequences=piece.sequences,
    )  # fmt: skip


def _mean_blocks(scenario: Scenario) -> float:
    """KV blocks that a sample holds in the end, on average."""
    workload = scenario.workload
    return (workload.prompt_tokens.mean + workload.response_tokens.mean) / scenario.rollout.block_tokens
