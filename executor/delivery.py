"""From an engine to the buffer, without a barrier: as values of a call, or packed into messages as the scenario says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from executor.experience import Samples
from executor.packing import Message
from executor.sending import Sender
from lab.experience import Experience

NUMBERS = "numbers"
"""the column in which a message says under which numbers its samples were issued"""


class Delivery:
    """An engine's way to the buffer, which may come to be another one."""

    def __init__(self, buffer: Any, said: Experience | None) -> None:
        """`buffer`: its actor."""
        self.buffer = buffer
        self._sender = None if said is None else Sender(0, said, self)
        self._told = (0, 0, 0)

    def put(self, numbers: Sequence[int], samples: Samples) -> None:
        """Samples that have ended, by their numbers."""
        if self._sender is None:
            self.buffer.put.remote(numbers, samples)
        else:
            self._sender.put(samples.with_columns(**{NUMBERS: np.asarray(numbers, dtype=np.int64)}))

    def notes(self) -> dict[str, Any]:
        """What went over the line since the last time: bytes before and after compression, and messages."""
        if self._sender is None:
            return {}
        now = (self._sender.sent.bytes, self._sender.sent.raw_bytes, self._sender.sent.messages)
        sent, raw, messages = (new - old for new, old in zip(now, self._told, strict=True))
        self._told = now
        return {"sent_bytes": sent, "raw_bytes": raw, "messages": messages, "compression": sent / raw if raw else 1.0}

    def send(self, step: int, message: Message) -> None:
        """A message into the object store, from which the buffer reads it in place."""
        import ray

        self.buffer.deliver.remote(ray.put(np.frombuffer(message.data, dtype=np.uint8)))

    def settle(self) -> None:
        """Nobody waits for what is under way: the buffer says what came."""

    def close(self) -> None:
        """There is no connection."""
