"""What devices and processes do: the processes that a run names, while they live; cores, GPUs where there are any."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from executor import processes
from executor.devices_watch import Cores, Devices, Gpus, Network, Processes
from lab.devices import Reading

BUSY = "while True: pass"
LARGE = "import sys; kept = bytearray(b'x') * (200 << 20); print(1, flush=True); sys.stdin.read()"


def spawn(code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def by_name(found: Processes) -> dict[str, Reading]:
    return {reading.name: reading for reading in found.read()}


def test_processes_are_those_that_the_run_names_while_they_live(tmp_path: Path) -> None:
    found = Processes(tmp_path)
    assert by_name(found).keys() == {"driver"}
    with spawn(LARGE) as large, spawn(BUSY) as busy:
        try:
            assert large.stdout is not None
            large.stdout.readline()
            processes.write(tmp_path, {"actor.train[0]": large.pid, "actor.generate[0]": busy.pid})
            seen = by_name(found)
            assert seen.keys() == {"driver", "actor.train[0]", "actor.generate[0]"}
            assert seen["actor.train[0]"].memory_bytes > 200e6 > seen["actor.generate[0]"].memory_bytes > 1e6
            first_seen = {name: reading.use for name, reading in seen.items() if name != "driver"}
            assert set(first_seen.values()) == {0.0}, "nothing to compare with yet"
        finally:
            busy.kill(), large.kill()
    assert by_name(found).keys() == {"driver"}
    processes.write(tmp_path, {"actor.train[0]": os.getpid()})
    assert by_name(found).keys() == {"driver", "actor.train[0]"}


def test_use_is_the_time_on_cores_between_two_readings(tmp_path: Path) -> None:
    """By a clock that stands where it is put: what this process has spent is that many cores of the time between."""
    now = [100.0]
    found = Processes(tmp_path, lambda: now[0])
    assert by_name(found)["driver"].use == 0.0
    spent = sum(os.times()[:2])
    while sum(os.times()[:2]) - spent < 0.3:
        sum(range(10_000))
    now[0] += 0.5
    assert 0.5 < by_name(found)["driver"].use < 1.2  # the clock of processes ticks a hundred times a second


def test_cores_are_those_that_may_be_used() -> None:
    found = list(Cores().read())
    assert [reading.name for reading in found] == [f"core{core}" for core in sorted(os.sched_getaffinity(0))]
    assert all(0 <= reading.use <= 1 and reading.memory_bytes > 1e6 for reading in found)


def test_a_machine_without_a_driver_has_no_gpus() -> None:
    gpus = Gpus()
    if len(gpus):
        pytest.skip("this machine has GPUs")
    assert list(gpus.read()) == []
    gpus.close()


def test_with_gpus_these_are_the_devices() -> None:
    gpus = Gpus()
    if not len(gpus):
        pytest.skip("no GPU")
    found = list(gpus.read())
    assert [reading.name for reading in found] == [f"gpu{i}" for i in range(len(gpus))]
    assert all(0 <= reading.use <= 1 and reading.memory_bytes > 0 for reading in found)


def test_bytes_through_an_interface_only_grow() -> None:
    network = Network()
    first = {reading.name: reading for reading in network.read()}
    second = {reading.name: reading for reading in network.read()}
    assert all(second[name].received_bytes >= one.received_bytes >= 0 for name, one in first.items())


def test_all_of_it(tmp_path: Path) -> None:
    found = Devices.of(tmp_path)
    assert {"device", "worker"} <= {reading.kind for reading in found.read()}
    found.close()
