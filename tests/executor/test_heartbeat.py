"""Signs of life: who sends is heard, who is killed or stopped is missed, and nobody else counts."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import heartbeat
from executor.heartbeat import BEATS, Pulse, beat, every, heard

EVERY_S = 0.02
PROGRAM = (
    "import sys, time; from executor.heartbeat import beat;"
    "beat(None, ('127.0.0.1', int(sys.argv[1])), 'w', {}); time.sleep(60)"
)


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    found = Pulse("127.0.0.1")
    yield found
    found.close()


@contextmanager
def sender(pulse: Pulse) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM.format(EVERY_S), str(pulse.address[1])])
    pulse.watch("w", process.pid)
    try:
        wait(lambda: pulse.silent()["w"] == 0.0)
        yield process
    finally:
        process.kill()
        process.wait()


def wait(holds, seconds: float = 20.0) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(EVERY_S / 4)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_who_is_killed_or_hangs_is_missed(pulse: Pulse, number: int) -> None:
    with sender(pulse) as process:
        os.kill(process.pid, number)
        wait(lambda: pulse.silent()["w"] > 10 * EVERY_S)
        if number == signal.SIGSTOP:
            os.kill(process.pid, signal.SIGCONT)
            wait(lambda: pulse.silent()["w"] == 0.0)


def test_only_the_process_that_is_watched_counts(pulse: Pulse) -> None:
    pulse.watch("w", os.getpid() + 1)
    beat(None, pulse.address, "w", 1.0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        for message in (b"{", json.dumps(["x", 1]).encode(), json.dumps(["w", 2]).encode()):
            other.sendto(message, pulse.address)
    assert pulse.silent()["w"] > 0.0
    pulse.watch("w", os.getpid())
    beat(None, pulse.address, "w", 1.0)
    wait(lambda: pulse.silent()["w"] == 0.0)
    pulse.forget("w")
    assert pulse.silent() == {}


def test_several_beats_fit_into_the_time_that_is_waited() -> None:
    for timeout in (0.5, 1.0, 5.0, 8.0):
        assert every(timeout) * 8 == pytest.approx(timeout)
    assert every(60.0) == 1.0


class Late:
    """A pulse of somebody who dies at 0, and what it sent before is read when the driver looks; in a time of its own."""

    def __init__(self, pauses: list[float]) -> None:
        self.now, self.pauses, self.heard_at, self.is_noticed = 0.0, pauses, -EVERY_S, False

    async def sleep(self, seconds: float) -> None:
        self.now += seconds + (self.pauses.pop(0) if self.pauses else 0.0)

    def silent(self) -> dict[str, float]:
        if self.heard_at < 0:
            self.heard_at = self.now
        self.is_noticed = self.is_noticed or self.now - self.heard_at > BEATS * EVERY_S
        return {} if self.is_noticed else {"w": self.now - self.heard_at}


@given(pauses=st.lists(st.sampled_from([0.0, EVERY_S, 4 * EVERY_S, 100 * EVERY_S]), max_size=12))
def test_who_is_dead_is_noticed_however_busy_the_driver_is(pauses: list[float]) -> None:
    late = Late(pauses)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeat.time, "monotonic", lambda: late.now)
        patch.setattr(heartbeat.asyncio, "sleep", late.sleep)
        work = heard(late, EVERY_S, lambda: False)  # type: ignore[arg-type]
        with pytest.raises(StopIteration):
            work.send(None)
    assert late.is_noticed


def test_who_is_dead_by_an_error_is_waited_for() -> None:
    looks: list[int] = []

    def is_missing() -> bool:
        looks.append(len(looks))
        return len(looks) < 9

    pulse = Pulse("127.0.0.1")
    asyncio.run(heard(pulse, 0.0, is_missing))
    pulse.close()
    assert len(looks) == 9
