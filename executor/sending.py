"""How an engine's samples leave its process: a thread that packs them, and a line to whoever takes them in.

A message takes what waits, up to `experience.batch_samples`. Messages go one after the other, and the next one is packed
while one is under way. Runs in the engine's process; nothing here is heavy.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from executor.experience import Samples, joined
from executor.packing import Message, pack
from lab.experience import Experience

SHARED = Path("/dev/shm")
"""memory that the processes of a machine share, as files"""
FRAME = struct.Struct("<cqQ")
"""of a connection: kind (d data, f the path of a file with them), step, bytes that follow"""
DONE = b"+"
"""what the other side says once a message is unpacked"""


class Line(Protocol):
    """A connection to who takes samples in."""

    def send(self, step: int, message: Message) -> None:
        """Hands a message over; it may still be under way when this returns."""
        ...

    def settle(self) -> None:
        """Waits until everything sent has been unpacked. Raises what went wrong."""
        ...

    def close(self) -> None: ...


class Stream:
    """`rpc`: bytes over TCP, each message acknowledged once it is unpacked."""

    kind = b"d"

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open = 0

    def send(self, step: int, message: Message) -> None:
        self._hand_over(step, message.data)

    def settle(self) -> None:
        while self._open:
            answer = self._socket.recv(self._open)
            if not answer or set(answer) != set(DONE):
                raise ConnectionError("who takes the samples in has broken the connection off")
            self._open -= len(answer)

    def close(self) -> None:
        self._socket.close()

    def _hand_over(self, step: int, payload: bytes) -> None:
        self._socket.sendall(FRAME.pack(self.kind, step, len(payload)))
        self._socket.sendall(payload)
        self._open += 1


class SharedMemory(Stream):
    """`shared_memory`: bytes in a file in memory, whose name goes over the connection; who reads it deletes it."""

    kind = b"f"

    def __init__(self, host: str, port: int, mark: str) -> None:
        """`mark`: how the names of this run's files begin."""
        super().__init__(host, port)
        self._mark = mark

    def send(self, step: int, message: Message) -> None:
        path = SHARED / f"{self._mark}-{os.getpid()}-{uuid.uuid4().hex}"
        path.write_bytes(message.data)
        self._hand_over(step, str(path).encode())


class ObjectStore:
    """`object_store`: bytes put into Ray's store, from which the other side reads them in place."""

    def __init__(self, inbox: Any) -> None:
        self._inbox = inbox
        self._open: list[Any] = []

    def send(self, step: int, message: Message) -> None:
        import ray

        data = ray.put(np.frombuffer(message.data, dtype=np.uint8))
        self._open.append(self._inbox.take.remote(step, data))

    def settle(self) -> None:
        import ray

        open_now, self._open = self._open, []
        ray.get(open_now)

    def close(self) -> None:
        self._open = []


def sweep(mark: str) -> None:
    """Deletes what killed processes of a run have left in shared memory."""
    for path in SHARED.glob(f"{mark}-*"):
        with contextlib.suppress(OSError):
            path.unlink()


@dataclass(kw_only=True)
class Sent:
    """What has gone over a line."""

    bytes: int = 0
    raw_bytes: int = 0
    messages: int = 0
    samples: int = 0


class Sender:
    """One engine's connection for one step: samples are put in, packed and sent; `finish` waits for all of them."""

    def __init__(self, step: int, said: Experience, line: Line, *, whole: bool = False) -> None:
        """`whole`: no message leaves with fewer samples than it may take before `finish`."""
        self._step, self._said, self._line = step, said, line
        self._least = said.batch_samples or 1 if whole else 1
        self._changed = threading.Condition()
        self._waiting: list[Samples] = []
        self._closed = False
        self._error: BaseException | None = None
        self.sent = Sent()
        self._packed: queue.Queue[Message | None] = queue.Queue(1)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._packing, self._sending)]
        for thread in self._threads:
            thread.start()

    def put(self, samples: Samples) -> None:
        """These are to be sent."""
        with self._changed:
            self._waiting += [samples.take([row]) for row in range(len(samples))]
            self._changed.notify_all()

    def finish(self) -> Sent:
        """No more come: what waits is sent. Ends when all has been unpacked; raises what went wrong."""
        with self._changed:
            self._closed, self._least = True, 1
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        self._line.settle()
        return self.sent

    def _packing(self) -> None:
        with self._failing(self._give_up):
            while (mine := self._next()) is not None:
                self._packed.put(pack(joined(mine), self._said))
        self._packed.put(None)

    def _sending(self) -> None:
        while (message := self._packed.get()) is not None:
            with self._failing(lambda: None):
                if self._error is None:
                    self._line.send(self._step, message)
                    self.sent.bytes += len(message.data)
                    self.sent.raw_bytes += message.raw_bytes
                    self.sent.messages += 1
                    self.sent.samples += message.num_samples

    def _next(self) -> list[Samples] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._waiting) >= self._least)
            if not self._waiting:
                return None
            number = self._said.batch_samples or len(self._waiting)
            mine, self._waiting = self._waiting[:number], self._waiting[number:]
            return mine

    @contextlib.contextmanager
    def _failing(self, then: Callable[[], object]) -> Any:
        """What goes wrong in a thread is told by `finish`."""
        try:
            yield
        except BaseException as error:
            self._error = self._error or error
            then()

    def _give_up(self) -> None:
        with self._changed:
            self._waiting = []
