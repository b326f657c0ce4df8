"""Where samples arrive on the trainer's machine: they are unpacked as they come, and collected step by step.

An actor of its own, with one thread for each engine that sends. Nothing heavy is imported.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from executor.experience import Samples, joined
from executor.packing import unpack
from executor.sending import DONE, FRAME


class Inbox:
    """Takes in what engines send, and hands it on to whoever scores samples one by one."""

    def __init__(self, num_tried: int = 1) -> None:
        """`num_tried`: samples of a prompt, by which a sample's place in its step is told."""
        self._num_tried = num_tried
        self._changed = threading.Lock()
        self._parts: dict[int, list[Samples]] = {}
        self._sinks: Sequence[Any] = ()
        self._error = ""

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def listen(self, host: str) -> int:
        """Takes connections from now on; returns the port."""
        server = socket.create_server((host, 0))
        threading.Thread(target=self._serve, args=(server,), daemon=True).start()
        port: int = server.getsockname()[1]
        return port

    def hand_on(self, sinks: Sequence[Any]) -> None:
        """Actors that are told of every sample that has arrived: `submit(step, indices, samples)`."""
        self._sinks = sinks

    def take(self, step: int, data: Any) -> None:
        """A message has come: its bytes, or an array of them. Raises Damaged where it is none."""
        samples = unpack(memoryview(data))
        with self._changed:
            self._parts.setdefault(step, []).append(samples)
        indices = (samples.prompts * self._num_tried + samples.indices).tolist()
        for sink in self._sinks:
            sink.submit.remote(step, indices, samples)

    def collect(self, step: int, number: int) -> Samples:
        """All samples of a step in the order of prompts, those of a prompt in theirs; then they are forgotten here.

        Raises RuntimeError where not `number` of them have come.
        """
        with self._changed:
            parts = self._parts.pop(step, [])
        if (there := sum(map(len, parts))) != number:
            raise RuntimeError(f"{there} of {number} samples of step {step} arrived. {self._error}".strip())
        return in_order(joined(parts))

    def forget(self, step: int) -> None:
        """What has come of a step is dropped."""
        with self._changed:
            self._parts.pop(step, None)

    def _serve(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        """One engine's connection, to its end; one that sends what is no message is broken off."""
        try:
            while (head := _exactly(connection, FRAME.size)) is not None:
                kind, step, size = FRAME.unpack(head)
                payload = _exactly(connection, size)
                if payload is None:
                    return
                self.take(step, payload if kind == b"d" else _from_memory(Path(payload.decode())))
                connection.sendall(DONE)
        except (ValueError, OSError) as error:
            self._error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()


def in_order(samples: Samples) -> Samples:
    """By prompt, and the samples of a prompt by their index."""
    return samples.take(np.lexsort((samples.indices, samples.prompts)))


def _exactly(connection: socket.socket, size: int) -> bytearray | None:
    """So many bytes; None where the other side has ended before."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        number = connection.recv_into(view)
        if not number:
            return None
        view = view[number:]
    return data


def _from_memory(path: Path) -> bytes:
    """What a file in shared memory holds, which is deleted."""
    try:
        return path.read_bytes()
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
