"""Faults from outside: a process of its own that ends, stops and slows down the processes of a run.

    python -m executor.injecting RUN ZERO DRIVER

ZERO is the moment of the run's time zero on this machine's monotonic clock; the scenario comes pickled from the standard
input. What it states is struck at those seconds, whatever the run is doing; the run learns of it as it would learn of any
other failure. What was done is appended to `strikes.jsonl`, and not done again where the run is resumed. It ends with
its driver, the process of that id, which started it.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from executor import processes
from lab.runs import mend, whole_lines
from lab.scenario import Scenario
from lab.strikes import Strike, hangs, strikes

FILE = "strikes.jsonl"
ZOMBIE = "Z"
_WAKE_S = 0.1
PERIOD_S = 0.05
"""in which a straggler works and stands once"""


class Injector:
    """Strikes the processes of one run."""

    def __init__(self, scenario: Scenario, folder: Path, zero_s: float, driver: int | None = None) -> None:
        """`driver`: the parent's process id, which may have ended by now; None: the parent is who it is."""
        self.scenario, self.folder, self._zero = scenario, folder, zero_s
        self._parent, self._num_struck = driver or os.getppid(), Counter[int]()
        mend(folder / FILE)  # the injector of an earlier attempt may have been ended while it wrote
        self._done = {(said["entry"], said["target"], said["stated_s"]) for said in struck(folder)}

    def run(self) -> None:
        """Until nothing is left to strike, or the driver has ended."""
        for strike in strikes(self.scenario):
            if (strike.entry, strike.target, strike.at) in self._done:
                self._num_struck[strike.entry] += 1
                continue
            if not self._wait(self._zero + strike.at):
                return
            self.strike(strike)
        while self._wait(time.monotonic() + 60.0):
            continue

    def strike(self, strike: Strike) -> None:
        """Does it to the process that stands for the target now, if there is one."""
        fault, pid = strike.fault, processes.read(self.folder).get(strike.target)
        number = self._num_struck[strike.entry]
        self._num_struck[strike.entry] += 1
        how = (
            "slowed"
            if fault.kind == "straggler"
            else "SIGSTOP"
            if hangs(self.scenario, strike.entry, number)
            else "SIGKILL"
        )
        here = pid is not None and alive(pid)
        said = {"at_s": time.monotonic() - self._zero, "stated_s": strike.at, "entry": strike.entry, "kind": fault.kind}
        self._note(
            said | {"target": strike.target, "pid": pid if here else None, "how": how if here else "nobody there"}
        )
        if pid is None or not here:
            return
        if how == "slowed":
            end = time.monotonic() + (fault.duration or float("inf"))
            threading.Thread(target=slow_down, args=(pid, fault.factor, end), daemon=True).start()
        else:
            send(pid, signal.SIGSTOP if how == "SIGSTOP" else signal.SIGKILL)

    def _note(self, said: dict[str, Any]) -> None:
        """Before it is done: the driver looks for it once it has noticed."""
        with (self.folder / FILE).open("ab") as file:
            file.write(json.dumps(said).encode() + b"\n")

    def _wait(self, until_s: float) -> bool:
        """Whether the driver still lives then."""
        while (left := until_s - time.monotonic()) > 0:
            time.sleep(min(left, _WAKE_S))
            if os.getppid() != self._parent:
                return False
        return os.getppid() == self._parent


def slow_down(pid: int, share: float, until_s: float) -> None:
    """A process works for so large a share of every short while, and stands for the rest, until then or its end."""
    try:
        while time.monotonic() < until_s and alive(pid):
            send(pid, signal.SIGSTOP)
            time.sleep(PERIOD_S * (1.0 - share))
            send(pid, signal.SIGCONT)
            time.sleep(PERIOD_S * share)
    finally:
        send(pid, signal.SIGCONT)


def alive(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != ZOMBIE
    except OSError:
        return False


def send(pid: int, number: int) -> None:
    """A signal to a process, if there is one."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def struck(folder: Path) -> Iterator[dict[str, Any]]:
    """What was done to a run's processes so far, in order."""
    return map(json.loads, whole_lines(folder / FILE))


def start(scenario: Scenario, folder: Path, zero_s: float) -> subprocess.Popen[bytes]:
    """An injector beside this process."""
    here = str(Path(__file__).resolve().parents[1])
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)])}
    command = [sys.executable, "-m", "executor.injecting", str(folder), repr(zero_s), str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=variables, start_new_session=True)
    assert process.stdin is not None, "it was asked for"
    with process.stdin as pipe:
        pickle.dump(scenario, pipe)
    return process


if __name__ == "__main__":
    Injector(pickle.load(sys.stdin.buffer), Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])).run()
