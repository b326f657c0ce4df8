"""Engines that fail in the middle of a step's rollout: who generates their samples again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby

import numpy as np

from lab.fates import INDEX, LOST
from lab.faults import Fault
from lab.policies.dispatch import Engines
from simulator.blocks import Ints
from simulator.joint import Joint
from simulator.world import Process, World


class Losses:
    """Watches over the engines of one step. What has all its tokens is with the driver and not lost."""

    def __init__(self, world: World, joint: Joint, step: int) -> None:
        self._world, self._joint, self._step = world, joint, step
        for worker in world.scenario.team("actor", "generate"):
            world.on_loss[worker.name] = partial(self._lost, worker.name)

    def guard(self) -> Process:
        """Ends when the step has all its samples and engines that were asked again are through."""
        yield self._joint.over
        yield self._world.env.all_of(self._joint.reopened)

    def _lost(self, name: str, fault: Fault) -> None:
        seat, ledger = self._joint.seat_of(name), self._world.ledger
        if seat is None:
            return
        made = {sample: tokens for sample, _, tokens in seat.run.running()}
        lost = sorted(seat.run.lose())
        seat.notes["lost_samples"] = len(lost)
        ledger.generated(lost, [made.get(sample, 0) for sample in lost])
        ledger.settle(lost, LOST)
        self._world.struck["lost_tokens"] += sum(made.values())
        self._joint.give_up(seat)
        if lost:
            self._world.env.process(self._recover(name, fault, self._joint.issue_again(lost)))

    def _recover(self, name: str, fault: Fault, samples: Ints) -> Process:
        """Someone else generates them, or the same engine once it works again."""
        world = self._world
        if fault.way_back == "restart":
            yield from world.until_up(name)
        elif fault.kind != "preempted":
            yield world.env.timeout(fault.detect)
        while not (takers := self._takers(name, fault)):
            yield world.next_up()
        if not self._joint.over.triggered:
            self._deal(samples, takers)

    def _takers(self, name: str, fault: Fault) -> list[str]:
        """Engines that can take samples over: the one that came back, the spare, or all that work."""
        working = self._world.working()
        if fault.way_back == "restart":
            return [name] if name in working else []
        return [fault.spare] if fault.spare in working else working

    def _deal(self, samples: Ints, takers: Sequence[str]) -> None:
        """By the rule of dispatch, all samples of a prompt together."""
        tried, index = self._world.scenario.num_tried, self._world.ledger.column(INDEX)
        prompts = [
            (prompt, list(found)) for prompt, found in groupby(samples.tolist(), lambda n: int(index[n]) // tried)
        ]
        seats = [self._joint.seat_of(name) for name in takers]
        waiting = np.array([seat.run.num_queued if seat else 0 for seat in seats])
        engines = Engines(
            speed=np.array([self._world.scenario.workers[name].speed for name in takers]), queued=waiting,
            given=np.array([len(seat.share.prompts) if seat else 0 for seat in seats]),
            running=np.array([seat.run.num_running if seat else 0 for seat in seats]),
            free_kv_tokens=np.array([seat.run.free_blocks if seat else 1e9 for seat in seats]) * 1.0,
        )  # fmt: skip
        dealt = self._world.dealer.choose([(self._step, prompt) for prompt, _ in prompts], engines)
        for name, share in zip(takers, dealt, strict=True):
            if share:
                self._joint.give(name, [sample for place in share for sample in prompts[place][1]])
