"""A step's samples on an engine: kept in its process until they are sent to the trainer's machine, or sent as they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from executor.experience import Samples, joined
from executor.sending import Line, ObjectStore, Sender, SharedMemory, Stream
from lab.experience import Experience

if TYPE_CHECKING:
    from executor.rollout import RolloutWorker

Info = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where samples are sent."""

    inbox: Any
    """the actor that takes them in"""
    host: str
    port: int
    mark: str
    """how this run's files in shared memory are named"""


LINES: dict[str, Callable[[Address], Line]] = {
    "rpc": lambda to: Stream(to.host, to.port),
    "shared_memory": lambda to: SharedMemory(to.host, to.port, to.mark),
    "object_store": lambda to: ObjectStore(to.inbox),
}
"""by `experience.transport`; what is missing here is refused by name"""


class Outgoing:
    """What an engine has made and not handed over yet."""

    def __init__(self, said: Experience, to: Address, num_tried: int) -> None:
        """`num_tried`: samples of a prompt."""
        self.said, self._num_tried = said, num_tried
        self._line = LINES[said.transport](to)
        self._made: dict[int, Samples] = {}
        self._senders: dict[int, Sender] = {}

    def begin(self, step: int) -> None:
        """The engine starts on a step; with `prefetch` its samples are sent as they end."""
        if self.said.prefetch:
            self._senders[step] = Sender(step, self.said, self._line, whole=True)

    def streams(self, step: int) -> bool:
        """Whether samples of a step are sent as they end."""
        return step in self._senders

    def ended(self, step: int, samples: Samples) -> None:
        """These have all their tokens."""
        if step in self._senders:
            self._senders[step].put(samples)

    def made(self, step: int, samples: Samples) -> None:
        """All that the engine has for a step."""
        before = self._made.get(step)
        self._made[step] = samples if before is None else joined([before, samples])

    def send(self, worker: RolloutWorker, step: int, kept: Sequence[int] | None) -> Info:
        """Sends what is left of a step's samples, and waits until all of them can be used where they are sent to.

        `kept`: places in the step of those that are wanted; None: all.
        """
        samples = self._made.pop(step) if kept is None else wanted(self._made.pop(step), kept, self._num_tried)
        sender = self._senders.pop(step, None)
        with worker.recorder.stage("transfer", step, samples.policy_version) as notes:
            with worker.recorder.op("send") as op:
                if sender is None:
                    sender = Sender(step, self.said, self._line)
                    sender.put(samples)
                sent = sender.finish()
                op |= {"bytes": float(sent.bytes), "raw_bytes": float(sent.raw_bytes), "messages": sent.messages}
                op |= {"quantities": _quantities(sent.bytes, sent.raw_bytes, sent.messages)}
            notes |= {"samples": len(samples), "ratio": sent.bytes / max(sent.raw_bytes, 1)}
        return {"spans": worker.recorder.take()}


def _quantities(sent: int, raw: int, messages: int) -> dict[str, float]:
    return {"calls": float(messages), "bytes": float(sent), "raw_bytes": float(raw)}


def connect(worker: RolloutWorker, said: Experience, to: Address) -> None:
    """An engine's process is told where its samples go."""
    worker.outgoing = Outgoing(said, to, worker.scenario.num_tried)


def send(worker: RolloutWorker, step: int, kept: Sequence[int] | None = None) -> Info:
    """The stage `transfer` on one engine."""
    assert worker.outgoing is not None, "connected before"
    return worker.outgoing.send(worker, step, kept)


def wanted(samples: Samples, places: Sequence[int], num_tried: int) -> Samples:
    """Those of the samples that stand at these places of their step."""
    mine = np.isin(samples.prompts * num_tried + samples.indices, np.asarray(places))
    return samples if mine.all() else samples.take(np.flatnonzero(mine))
