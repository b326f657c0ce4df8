"""A scoring service in virtual time: samples wait in one queue and leave in batches for the server that is free longest.

It knows nothing of what a server does with a batch: `simulator/scorers.py` has those of the lab.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

import simpy

from lab.policies.scoring import Batching, leaving
from simulator.world import Process


class Server(Protocol):
    """Takes one batch at a time."""

    def score(self, samples: list[int], lengths: list[int]) -> Process:
        """Ends when the batch is scored; `lengths` are the samples' tokens."""
        ...


Scored = Callable[[list[int]], object]


class Service:
    """One queue before several servers; samples are numbers of the ledger.

    They leave in the order in which they came, whatever their lengths: a batch may hold more padding than one of a whole
    step, which is packed by length.

    `lengths` gives the tokens of samples, `known` those whose score needs no server (None: none); both in the order of
    the samples.
    """

    def __init__(
        self,
        env: simpy.Environment,
        servers: Sequence[Server],
        rule: Batching,
        lengths: Callable[[list[int]], list[int]],
        known: Callable[[list[int]], list[bool]] | None = None,
    ) -> None:
        self._env, self._servers, self._rule = env, servers, rule
        self._sizes, self._known = lengths, known
        self._samples: deque[int] = deque()
        self._lengths: deque[int] = deque()
        self._since: deque[float] = deque()
        self._free = deque(range(len(servers)))
        self._busy: set[int] = set()
        self._active, self._closed, self._inside = len(servers), False, 0
        self._alarm = self._rung = -1.0
        self._callbacks: list[Scored] = []
        self.num_hits = 0
        """samples so far whose score was known"""
        self.drained = env.event()
        """the service is closed, and everything that it was given is scored"""

    def submit(self, samples: Sequence[int]) -> None:
        """These wait from now on; scores that are known already are told at this same instant, but not within the call."""
        waiting = list(samples)
        self._inside += len(waiting)
        if self._known is not None and waiting:
            hits = self._known(waiting)
            self._tell_soon([sample for sample, hit in zip(waiting, hits, strict=True) if hit])
            waiting = [sample for sample, hit in zip(waiting, hits, strict=True) if not hit]
        self._samples.extend(waiting)
        self._lengths.extend(self._sizes(waiting))
        self._since.extend([float(self._env.now)] * len(waiting))
        self._serve()

    def on_scored(self, callback: Scored) -> None:
        """`callback` is told the samples of every batch when it is scored."""
        self._callbacks.append(callback)

    def close(self) -> None:
        """No more come: what waits leaves as soon as a server is free."""
        self._closed = True
        self._serve()
        self._settle()

    def scale(self, num_servers: int) -> None:
        """So many servers, the first ones, take batches from now on; the others end the one they have."""
        added = range(self._active, min(num_servers, len(self._servers)))
        self._active = min(num_servers, len(self._servers))
        self._free = deque(server for server in self._free if server < self._active)
        self._free.extend(server for server in added if server not in self._busy)
        self._serve()

    @property
    def num_queued(self) -> int:
        """Samples that no server has taken yet."""
        return len(self._samples)

    @property
    def num_busy(self) -> int:
        """Servers at work."""
        return len(self._busy)

    @property
    def num_inside(self) -> int:
        """Samples that wait or are being scored."""
        return self._inside

    def _serve(self) -> None:
        while self._free and self._samples:
            due, now = self._since[0] + self._rule.max_wait_s, float(self._env.now)
            waited = self._rule.max_wait_s if due <= max(now, self._rung) else now - self._since[0]
            first = list(islice(self._lengths, self._rule.max_samples + 1))
            number = leaving(self._rule, first, waited, more=not self._closed)
            if not number:
                self._wake_at(due)
                return
            for _ in range(number):
                self._since.popleft()
            samples, lengths = ([queue.popleft() for _ in range(number)] for queue in (self._samples, self._lengths))
            self._env.process(self._score(self._free.popleft(), samples, lengths))

    def _score(self, server: int, samples: list[int], lengths: list[int]) -> Process:
        self._busy.add(server)
        yield from self._servers[server].score(samples, lengths)
        self._busy.discard(server)
        if server < self._active:
            self._free.append(server)
        self._tell(samples)
        self._serve()

    def _tell(self, samples: list[int]) -> None:
        self._inside -= len(samples)
        for callback in self._callbacks:
            callback(samples)
        self._settle()

    def _tell_soon(self, samples: list[int]) -> None:
        if samples:
            self.num_hits += len(samples)
            self._env.timeout(0).callbacks.append(lambda _: self._tell(samples))

    def _settle(self) -> None:
        if self._closed and not self._inside and not self.drained.triggered:
            self.drained.succeed()

    def _wake_at(self, due: float) -> None:
        """Looks again when the oldest sample has waited long enough; the clock's rounding must not miss it."""
        if due != self._alarm:
            self._alarm = due
            self._env.timeout(due - float(self._env.now)).callbacks.append(lambda _: self._ring(due))

    def _ring(self, due: float) -> None:
        self._rung = max(self._rung, due)
        self._serve()
