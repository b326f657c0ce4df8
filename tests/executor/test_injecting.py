"""Faults from outside: the right process is struck at the right time, once, and only as long as the driver lives."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from executor import injecting, processes
from executor.injecting import Injector, alive, slow_down
from lab.scenario import Scenario
from lab.strikes import hangs

Make = Callable[..., Scenario]
BUSY = "while True: pass"
ENGINE, REWARD = "actor.generate[0]", "reward.score[0]"


@pytest.fixture
def victims() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    found = {name: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for name in (ENGINE, REWARD)}
    yield found
    for process in found.values():
        process.kill()
        process.wait()


@pytest.fixture
def chosen(scenario: Make) -> Scenario:
    faults = [
        {"kind": "worker_lost", "at": 0.05, "target": ENGINE, "recovery": "restart"},
        {"kind": "scorer_lost", "at": 0.1, "target": REWARD},
        {"kind": "scorer_lost", "at": 0.15, "target": "reference.score[0]"},
    ]
    return scenario("quickstart", faults=faults)


def test_the_stated_processes_are_struck_in_order(
    chosen: Scenario, tmp_path: Path, victims: dict[str, subprocess.Popen[bytes]]
) -> None:
    processes.write(tmp_path, {name: process.pid for name, process in victims.items()})
    zero = time.monotonic()
    beside = injecting.start(chosen, tmp_path, zero)
    end = zero + 30
    while len(list(injecting.struck(tmp_path))) < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    beside.kill()
    beside.wait()
    found = list(injecting.struck(tmp_path))
    assert [said["target"] for said in found] == [ENGINE, REWARD, "reference.score[0]"]
    assert [said["pid"] for said in found] == [*(process.pid for process in victims.values()), None]
    assert found[2]["how"] == "nobody there"
    assert all(said["at_s"] >= said["stated_s"] for said in found)
    for entry, process in enumerate(victims.values()):
        ended = psutil.STATUS_STOPPED if hangs(chosen, entry, 0) else psutil.STATUS_ZOMBIE
        assert psutil.Process(process.pid).status() == ended
    again = Injector(chosen, tmp_path, zero)
    assert again._done == {(0, ENGINE, 0.05), (1, REWARD, 0.1), (2, "reference.score[0]", 0.15)}


def test_it_ends_with_its_driver(chosen: Scenario, tmp_path: Path) -> None:
    program = (
        "import os, pickle, sys, time; from pathlib import Path; from executor import injecting;"
        "print(injecting.start(pickle.load(sys.stdin.buffer), Path(sys.argv[1]), time.monotonic() + 1e6).pid, flush=True);"
        "os._exit(0)"
    )
    import pickle

    driver = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], input=pickle.dumps(chosen), capture_output=True, check=True
    )
    pid, end = int(driver.stdout), time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_straggler_works_for_its_share_of_the_time() -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        begun, used = time.monotonic(), cpu_s(process.pid)
        slow_down(process.pid, 0.25, begun + 1.0)
        share = (cpu_s(process.pid) - used) / (time.monotonic() - begun)
        assert share < 0.4  # less where others want the core too
        assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
    finally:
        process.kill()
        process.wait()


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def test_a_half_written_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / injecting.FILE).write_text(json.dumps({"pid": 1}) + '\n{"pid": 2')
    assert [said["pid"] for said in injecting.struck(tmp_path)] == [1]


def test_processes_are_told_as_long_as_a_run_goes_on(tmp_path: Path) -> None:
    assert processes.read(tmp_path) == {}
    with processes.told(tmp_path):
        assert processes.read(tmp_path) == {"driver": os.getpid()}
        processes.write(tmp_path, {ENGINE: 7})
        assert processes.read(tmp_path) == {"driver": os.getpid(), ENGINE: 7}
    assert list(tmp_path.iterdir()) == []


def test_an_injector_goes_on_behind_a_line_that_the_one_before_died_in(chosen: Scenario, tmp_path: Path) -> None:
    done = {"entry": 0, "target": ENGINE, "stated_s": 0.05, "pid": None, "how": "nobody there"}
    (tmp_path / injecting.FILE).write_text(f'{json.dumps(done)}\n{{"entry": 1, "tar')
    beside = injecting.start(chosen, tmp_path, time.monotonic())
    end = time.monotonic() + 30
    while len(list(injecting.struck(tmp_path))) < 3:
        assert time.monotonic() < end and beside.poll() is None
        time.sleep(0.01)
    beside.kill()
    beside.wait()
    assert [said["entry"] for said in injecting.struck(tmp_path)] == [0, 1, 2]
