"""Signs of life of a run's workers: each sends a datagram every so often, the driver counts the time since the last one.

A process that was killed sends none, and neither does one that hangs: nobody has to tell the two apart. The thread that
sends shares the interpreter with the worker's own work, which lets it through at least every few milliseconds; only C
code that holds the interpreter does not, as imports do, so a worker is watched once it is ready.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

BEATS = 8
"""in the time after which a silent worker is taken for lost"""
LEAST_S, MOST_S = 0.02, 1.0
"""between two beats"""
_LARGEST = 512


class Pulse:
    """The driver's end. It stands at an address of this machine until it is closed."""

    def __init__(self, host: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind((host, 0))
        self.address: tuple[str, int] = self._socket.getsockname()
        self._heard: dict[str, float] = {}
        self._pids: dict[str, int] = {}

    def watch(self, name: str, pid: int) -> None:
        """From now on this process is that worker; what others send in its name does not count."""
        self._pids[name], self._heard[name] = pid, time.monotonic()

    def forget(self, name: str) -> None:
        """A worker is not watched any more."""
        self._pids.pop(name, None)
        self._heard.pop(name, None)

    def silent(self) -> dict[str, float]:
        """Seconds since each worker that is watched was heard; of workers that this process has not listened to for a
        while, what they have sent meanwhile counts as heard now."""
        now = time.monotonic()
        while True:
            try:
                name, pid = json.loads(self._socket.recv(_LARGEST))
            except (BlockingIOError, InterruptedError):
                break
            except ValueError:  # somebody else's
                continue
            if self._pids.get(name) == pid:
                self._heard[name] = now
        return {name: now - heard for name, heard in self._heard.items()}

    def pid(self, name: str) -> int | None:
        """Of the process of a worker that is watched."""
        return self._pids.get(name)

    def close(self) -> None:
        self._socket.close()


async def heard(pulse: Pulse, every_s: float, is_missing: Callable[[], bool]) -> None:
    """Ends when everybody who is watched has just been heard, and nobody is missing who has to be noticed first.

    What was sent while this process was busy counts as heard once it is read, also from whom is dead by then: after a look
    that comes late, signs of life have to be heard anew.
    """
    looked = since = time.monotonic()
    while True:
        await asyncio.sleep(every_s)
        now, silent = time.monotonic(), pulse.silent()
        since, looked = (now if now - looked > 2 * every_s else since), now
        if now - since >= 5 * every_s and max(silent.values(), default=0.0) <= 2 * every_s and not is_missing():
            return


def beat(_: Any, address: tuple[str, int], name: str, every_s: float) -> int:
    """Runs in a worker's process: from now on it sends; returns its pid."""
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    message = json.dumps([name, os.getpid()]).encode()

    def send() -> None:
        while True:
            try:
                sender.sendto(message, address)
            except OSError:  # the driver is gone, and this process soon will be
                return
            time.sleep(every_s)

    threading.Thread(target=send, name="heartbeat", daemon=True).start()
    return os.getpid()


def pid_of(_: Any) -> int:
    """Runs in a worker's process."""
    return os.getpid()


async def pid(actor: Any) -> int:
    """Of the process of an actor, once it has nothing else to do."""
    found: int = await actor.__ray_call__.remote(pid_of)
    return found


def every(timeout_s: float) -> float:
    """Seconds between two beats where a worker counts as lost after `timeout_s` without one."""
    return min(max(timeout_s / BEATS, LEAST_S), MOST_S)
