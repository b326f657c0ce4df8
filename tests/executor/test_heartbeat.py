"""Signs of life: who sends is heard, who is killed or stopped is missed, and nobody else counts."""

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

from executor.heartbeat import Pulse, beat, every

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
