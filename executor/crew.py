"""Scorers that are started and stopped with the depth of their queue, by the rule that a simulation asks too.

The first scorer of a role leads: all samples wait in its queue, and it hands batches to the others that are up. Those that
are down hold their devices: a process without a model stands in their place. Its counterpart is `simulator.elastic.serve`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray

from executor.experience import Samples
from executor.rewards import Columns
from executor.services import ELSEWHERE, Score, added
from lab.policies.scaling import Depth, Target, target
from lab.scaling import Scale
from lab.timeline import Span

if TYPE_CHECKING:
    from executor.scoring import Scorer

LEADER = 0


class Crew:
    """The scorers of one role, by number; 0 is the one whose process this is. Any thread may call."""

    def __init__(self, scale: Scale, others: Sequence[Any], own_start_s: float) -> None:
        """`others`: the actors of the rest, in order. `own_start_s`: how long this one took to start."""
        self._scale, self._others = scale, others
        self._rule = scale.rule(1 + len(others), own_start_s if scale.start is None else scale.start)
        self._changed = threading.Condition()
        self._up = list(range(scale.min))
        self._starting, self._busy, self._parted = set[int](), set[int](), set[int]()
        self._step, self._version = 0, 0
        self._num_scored, self._num_looks_busy, self._changed_s = 0, 0, -math.inf
        self._spans: list[Span] = []
        self.decisions: list[dict[str, Any]] = []
        self.error: BaseException | None = None

    @property
    def look_s(self) -> float:
        """Between two looks at the queue."""
        return self._scale.look

    @property
    def num_servers(self) -> int:
        """Scorers that are up."""
        return len(self._up)

    @property
    def most(self) -> int:
        """Scorers that may ever be up."""
        return self._rule.num_max

    def open(self, step: int, policy_version: int) -> None:
        """From now on batches of this step are scored."""
        self._step, self._version, self.decisions = step, policy_version, []

    def score(self, samples: Samples, notes: dict[str, Any], here: Score) -> Columns:
        """The columns of a batch, by a scorer that is up and free: `here`, or by another, who counts it himself."""
        with self._changed:
            self._changed.wait_for(lambda: any(number not in self._busy for number in self._up))
            server = next(number for number in self._up if number not in self._busy)
            self._busy.add(server)
        try:
            if server == LEADER:
                columns = here(samples, notes)
            else:
                self._parted.add(server)
                call = self._others[server - 1].__ray_call__
                columns = ray.get(call.remote(part, self._step, self._version, samples))
                notes[ELSEWHERE] = True
        finally:
            self._rests(server)
        self._num_scored += len(samples)
        return columns

    def _rests(self, server: int) -> None:
        with self._changed:
            self._busy.discard(server)
            leaves = server not in self._up
            self._changed.notify_all()
        if leaves:
            self._others[server - 1].release.remote()

    def look(self, num_queued: int, num_running: int, at_s: float) -> Target:
        """Looks at the queue: scorers start, or the last ones stop."""
        with self._changed:
            self._num_looks_busy += len(self._busy)
            busy_s = self._num_looks_busy * self.look_s
            depth = Depth(
                num_queued=num_queued, num_running=num_running, rate=self._num_scored / busy_s if busy_s else 0.0,
                num_ready=len(self._up), num_starting=len(self._starting), since_change_s=at_s - self._changed_s,
            )  # fmt: skip
            said = target(self._rule, depth)
            if said.change:
                self._changed_s = at_s
                self.decisions.append(_record(at_s, depth, said))
            for number in self._down()[: max(said.change, 0)]:
                self._starting.add(number)
                threading.Thread(target=self._start, args=(number,), daemon=True).start()
            gone = self._up[said.num_workers :] if said.change < 0 else []
            self._up = self._up[: len(self._up) - len(gone)]
            idle = [number for number in gone if number not in self._busy]
        for number in idle:
            self._others[number - 1].release.remote()
        return said

    def _down(self) -> list[int]:
        every = range(1 + len(self._others))
        return [number for number in every if number not in self._up and number not in self._starting]

    def _start(self, number: int) -> None:
        try:
            spans = ray.get(self._others[number - 1].__ray_call__.remote(start, self._step))
        except BaseException as error:  # told when the step is collected
            self.error = error
            return
        with self._changed:
            self._starting.discard(number)
            self._up = sorted({*self._up, number})
            self._spans += spans
            self._changed.notify_all()

    def close(self) -> list[Span]:
        """The step is over: what the others report. Raises what went wrong with one that started."""
        if self.error is not None:
            raise self.error
        parted, self._parted = sorted(self._parted), set()
        ended = ray.get([self._others[number - 1].__ray_call__.remote(over) for number in parted])
        spans, self._spans = self._spans, []
        return spans + [span for part_ in ended for span in part_]


def part(worker: Scorer, step: int, policy_version: int, samples: Samples) -> Columns:
    """Runs in another scorer's process: one batch of a step, which begins for it with the first."""
    if worker.part is None:
        stage = worker.recorder.stage(worker.worker.role, step, policy_version)
        worker.part = stage, stage.__enter__()
    notes: dict[str, Any] = {}
    columns = worker._score(samples, notes)
    _, total = worker.part
    total |= added(total, notes | {"batches": 1})
    return columns


def over(worker: Scorer) -> list[Span]:
    """Runs in another scorer's process: its part of a step ends."""
    if worker.part is not None:
        stage, _ = worker.part
        worker.part = None
        stage.__exit__(None, None, None)
    return worker.recorder.take()


def start(worker: Scorer, step: int) -> list[Span]:
    """Runs in the process of a scorer that starts while a run goes on."""
    with worker.recorder.stage("setup", step):
        worker.load()
    return worker.recorder.take()


def _record(at_s: float, depth: Depth, said: Target) -> dict[str, Any]:
    """The decision as a span notes it."""
    return {
        "at_s": at_s, "queued": depth.num_queued, "running": depth.num_running, "rate": depth.rate,
        "ready": depth.num_ready, "starting": depth.num_starting, "target": said.num_workers, "why": said.why,
    }  # fmt: skip


def lead(worker: Scorer, others: Sequence[Any]) -> None:
    """Runs in the first scorer's process: it learns who the others are."""
    [scale] = [scale for work, scale in worker.scenario.scaling.items() if work == f"{worker.worker.role}.score"]
    worker.desk.led_by(Crew(scale, others, worker.started_s))
