"""Flows through the links of a cluster in virtual time: each gets its max–min fair share, re-timed as others come and go.

A flow first waits for its latency and then moves its bytes at the rate that `simulator.fairness` gives it. All that
starts or ends at one instant is re-timed once, after everything else that happens then.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import EventPriority

from simulator.fairness import Floats, Indices, fair_rates
from simulator.topology import Path, Topology
from simulator.world import Process

_DONE = 1e-12
_IN_TURN, _LAST = EventPriority(1), EventPriority(2)
"""priorities at one instant: as SimPy's own events, and after all of these"""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Bytes over a path."""

    path: Path
    bytes: float
    num_messages: float = 1.0
    """one after the other, each with the path's latency"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Flows:
    """Flows that start together, as columns."""

    paths: Indices
    """flows × hops; shorter rows end in -1"""
    bytes: Floats
    latency: Floats
    """seconds until the first byte"""

    @staticmethod
    def of(flows: Iterable[Flow]) -> Flows:
        """The columns of some flows."""
        chosen = list(flows)
        paths = np.full((len(chosen), max((len(flow.path.links) for flow in chosen), default=0)), -1, np.int32)
        for row, flow in zip(paths, chosen, strict=True):
            row[: len(flow.path.links)] = flow.path.links
        latency = np.array([flow.num_messages * flow.path.latency for flow in chosen], float)
        return Flows(paths=paths, bytes=np.array([flow.bytes for flow in chosen], float), latency=latency)

    def __len__(self) -> int:
        return len(self.bytes)


class _Instant(simpy.Event):
    """Calls a function after a delay, last of all at that instant or in the normal order."""

    def __init__(self, env: simpy.Environment, delay: float, priority: EventPriority, then: Callable[[], None]) -> None:
        super().__init__(env)
        self.callbacks.append(lambda _: then())
        self._ok, self._value = True, None
        env.schedule(self, priority=priority, delay=delay)


@dataclass(eq=False)
class _Batch:
    """Flows that one process waits for."""

    num_left: int
    done: simpy.Event


class Network:
    """The flows under way on a topology."""

    def __init__(self, env: simpy.Environment, topology: Topology) -> None:
        self.topology = topology
        self.env, self._capacity = env, topology.capacity.copy()
        self._paths: Indices = np.zeros((0, 0), np.int32)
        self._left, self._rates = np.zeros(0), np.zeros(0)
        self._batch: NDArray[np.int64] = np.zeros(0, np.int64)
        self._batches: dict[int, _Batch] = {}
        self._carried, self._load = np.zeros(len(topology.capacity)), np.zeros(len(topology.capacity))
        self._since, self._num_sent, self._stale = 0.0, 0, False
        self.num_retimings = 0

    def send(self, flow: Flow) -> Process:
        """Ends when the last byte has arrived."""
        yield from self.send_all(Flows.of([flow]))

    def send_all(self, flows: Flows) -> Process:
        """Starts flows together; ends with the last of them. A process that is interrupted takes its flows away."""
        if not len(flows):
            return
        self._num_sent += 1
        number, batch = self._num_sent, _Batch(len(flows), self.env.event())
        self._batches[number] = batch
        for latency in sorted(set(flows.latency.tolist())):
            chosen = flows.latency == latency
            _Instant(self.env, latency, _IN_TURN, lambda chosen=chosen: self._join(number, flows, chosen))  # type: ignore[misc]
        try:
            yield batch.done
        except simpy.Interrupt:
            self._drop(number)
            raise

    def play(self, rounds: Sequence[Flows]) -> Process:
        """Rounds of flows, each started when the one before has ended."""
        for flows in rounds:
            yield from self.send_all(flows)

    def degrade(self, links: Sequence[int], factor: float) -> None:
        """From now on these links have `factor` of their bandwidth: 0 cuts them, 1 repairs them."""
        if not 0 <= factor <= 1:
            raise ValueError(f"a link is degraded to {factor} of its bandwidth; give a factor from 0 to 1")
        self._advance()
        self._capacity[list(links)] = factor * self.topology.capacity[list(links)]
        self._retime_soon()

    @property
    def capacity(self) -> Floats:
        """Bytes per second by link as it is now."""
        return self._capacity.copy()

    @property
    def num_flows(self) -> int:
        """Flows that move bytes, or would if a link of theirs were not cut."""
        return len(self._left)

    def carried(self) -> Floats:
        """Bytes by link until now."""
        self._advance()
        return self._carried[:-1].copy()

    def load(self) -> Floats:
        """Bytes per second by link now, as of the last re-timing."""
        return self._load[:-1].copy()

    def _join(self, number: int, flows: Flows, chosen: NDArray[np.bool_]) -> None:
        if number not in self._batches:
            return
        self._advance()
        moving = chosen & (flows.bytes > 0) & (flows.paths >= 0).any(axis=1)
        self._widen(flows.paths.shape[1])
        paths = np.full((int(moving.sum()), self._paths.shape[1]), len(self.topology.capacity) - 1, np.int32)
        given = flows.paths[moving]
        paths[:, : given.shape[1]] = np.where(given < 0, len(self.topology.capacity) - 1, given)
        self._paths = np.concatenate([self._paths, paths])
        self._left = np.concatenate([self._left, flows.bytes[moving]])
        self._rates = np.concatenate([self._rates, np.zeros(len(paths))])
        self._batch = np.concatenate([self._batch, np.full(len(paths), number)])
        self._end(number, int(chosen.sum()) - len(paths))
        self._retime_soon()

    def _widen(self, hops: int) -> None:
        missing = hops - self._paths.shape[1]
        if missing > 0:
            padding = np.full((len(self._paths), missing), len(self.topology.capacity) - 1, np.int32)
            self._paths = np.concatenate([self._paths, padding], axis=1)

    def _end(self, number: int, num_flows: int) -> None:
        """Some flows of a batch have ended."""
        batch = self._batches[number]
        batch.num_left -= num_flows
        if not batch.num_left:
            del self._batches[number]
            batch.done.succeed()

    def _drop(self, number: int) -> None:
        self._advance()
        self._batches.pop(number, None)
        self._keep(self._batch != number)
        self._retime_soon()

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        self._paths, self._left = self._paths[kept], self._left[kept]
        self._rates, self._batch = self._rates[kept], self._batch[kept]

    def _advance(self) -> None:
        """Books what every flow has moved since the last change."""
        elapsed, self._since = self.env.now - self._since, self.env.now
        if elapsed > 0:
            self._left -= elapsed * self._rates
            self._carried += elapsed * self._load

    def _retime_soon(self) -> None:
        if not self._stale:
            self._stale = True
            _Instant(self.env, 0.0, _LAST, self._retime)

    def _retime(self) -> None:
        self._stale = False
        self.num_retimings += 1
        if not len(self._left):
            self._load[:] = 0
            return
        hops = self._paths.shape[1]
        self._rates = fair_rates(self._paths, self._capacity)
        self._load = np.bincount(self._paths.ravel(), np.repeat(self._rates, hops), len(self._load)).astype(float)
        with np.errstate(divide="ignore"):
            wait = float(np.min(np.maximum(self._left, 0.0) / self._rates, initial=math.inf))
        if wait < math.inf:
            turn = self.num_retimings
            _Instant(self.env, wait, _IN_TURN, lambda: self._arrive(wait, turn))

    def _arrive(self, wait: float, turn: int) -> None:
        """The first flows end, unless others came or went since they were timed."""
        if turn != self.num_retimings:
            return
        self._advance()
        slack = _DONE + 1e-9 * wait + math.ulp(self.env.now)  # late in a run the clock itself is coarser than _DONE
        ended = self._left <= self._rates * slack
        counts = Counter(self._batch[ended].tolist())
        self._keep(~ended)
        for number, count in counts.items():
            self._end(number, count)
        self._retime_soon()
