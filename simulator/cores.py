"""Cores that several jobs share."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import simpy

from lab.placement import Worker
from profiles.cost import CostModel

Process = Generator[simpy.Event, Any, Any]
_DONE = 1e-12
HOST_CORES = 1 << 20
"""cores of a machine with GPUs, which the library does not count: enough for everybody"""


@dataclass(eq=False)
class _Job:
    """Work under way on a machine's cores."""

    remaining_s: float
    """alone on the machine"""
    threads: int
    worker: Worker
    op: str
    done: simpy.Event


class Cores:
    """Processor sharing of one machine's cores, or of one GPU.

    n active threads on c cores run at c/n of their speed where n > c, and each job is slowed down by the other busy
    cores as its op's profile says. Work is re-timed whenever a job starts or ends.
    """

    def __init__(
        self, env: simpy.Environment, num_cores: int, costs: CostModel, speed: Mapping[str, float] | None = None
    ) -> None:
        """`speed`: by worker, the share of its speed that a straggler keeps; read whenever work is re-timed."""
        self._env, self._num_cores, self._costs = env, num_cores, costs
        self._speed: Mapping[str, float] = {} if speed is None else speed
        self._jobs: list[_Job] = []
        self._rates: list[float] = []
        self._since = 0.0
        self._turn = 0

    def work(self, worker: Worker, op: str, seconds: float, threads: int | None = None) -> Process:
        """Does `seconds` of work, alone measured; ends when it is done. A process that is interrupted leaves the cores.

        `threads`: its own; else as many as the worker claims."""
        if seconds <= 0:
            return
        job = self._begin(worker, op, seconds, threads)
        try:
            yield job.done
        except simpy.Interrupt:
            self._leave(job)
            raise

    def attempt(self, worker: Worker, op: str, seconds: float) -> Process:
        """The same for a process that may be interrupted; returns the seconds of work that are left then, else 0."""
        job = self._begin(worker, op, seconds)
        try:
            yield job.done
        except simpy.Interrupt:
            self._leave(job)
            return max(job.remaining_s, 0.0)
        return 0.0

    def _begin(self, worker: Worker, op: str, seconds: float, threads: int | None = None) -> _Job:
        threads = self._costs.threads(worker) if threads is None else threads
        job = _Job(remaining_s=seconds, threads=threads, worker=worker, op=op, done=self._env.event())
        self._advance()
        self._jobs.append(job)
        self._retime()
        return job

    def _leave(self, job: _Job) -> None:
        self._advance()
        if job in self._jobs:  # else it is done, and whoever waits for it has not heard of it yet
            self._jobs.remove(job)
            self._retime()

    def speeds_changed(self) -> None:
        """Work under way goes on at another speed."""
        self._advance()
        self._retime()

    def _advance(self) -> None:
        """Books what every job has done since the last change."""
        elapsed, self._since = self._env.now - self._since, self._env.now
        for job, rate in zip(self._jobs, self._rates, strict=True):
            job.remaining_s -= elapsed * rate

    def _retime(self) -> None:
        threads = sum(job.threads for job in self._jobs)
        share = min(1.0, self._num_cores / threads) if threads else 1.0
        self._rates = [
            share / self._slowdown(job, threads) * self._speed.get(job.worker.name, 1.0) for job in self._jobs
        ]
        self._turn += 1
        if self._jobs:
            wait = min(max(job.remaining_s, 0.0) / rate for job, rate in zip(self._jobs, self._rates, strict=True))
            self._env.process(self._wake(wait, self._turn))

    def _slowdown(self, job: _Job, threads: int) -> float:
        busy = min(threads, self._num_cores) - min(job.threads, self._num_cores)
        return self._costs.slowdown(job.worker, job.op, busy)

    def _wake(self, wait: float, turn: int) -> Process:
        yield self._env.timeout(wait)
        if turn != self._turn:
            return
        self._advance()
        slack = _DONE + 1e-9 * wait + math.ulp(self._env.now)  # late in a run the clock itself is coarser than _DONE
        ended = [job for job in self._jobs if job.remaining_s <= slack]
        self._jobs = [job for job in self._jobs if job not in ended]
        self._retime()
        for job in ended:
            job.done.succeed()
