"""From the engines to the buffer, without a barrier: every sample is sent and scored, or scored and sent."""

from __future__ import annotations

from collections.abc import Callable

from lab.experience import scored_before
from lab.placement import Worker
from simulator.experience import Lines
from simulator.judges import Judges
from simulator.world import World


class Handing:
    """Where reward or reference stand at another site than the trainer, samples leave with their scores."""

    def __init__(self, world: World, done: Callable[[int], object]) -> None:
        """`done` is told every sample that is at the trainer, with its scores where they are waited for one by one."""
        self._world, self._done = world, done
        self._scores_first = any(scored_before(world.scenario, stage) for stage in ("reward", "reference"))
        self._judges = Judges(world, self._judged)
        self._lines = Lines(world, self._arrived)
        self._direct = world.scenario.experience is None and self._judges.none

    def submit(self, worker: Worker, sample: int) -> None:
        """A sample has all its tokens."""
        if self._direct:
            self._done(sample)
            return
        if self._world.scenario.experience is None:
            self._judges.submit([sample])
            return
        self._world.ledger.came_from([sample], worker.name)
        if self._scores_first:
            self._judges.submit([sample])
        else:
            self._lines.put(worker, [sample])

    def hand_on(self, step: int) -> None:
        """The batch of a step is made: what is scored from now on is for the next one."""
        self._judges.hand_on(step)

    def _judged(self, sample: int) -> None:
        if self._scores_first:
            self._lines.put(self._world.scenario.workers[self._world.ledger.engine_of(sample)], [sample])
        else:
            self._done(sample)

    def _arrived(self, samples: list[int]) -> None:
        if self._scores_first:
            for sample in samples:
                self._done(sample)
        else:
            self._judges.submit(samples)
