"""What may still begin once a run is asked to end, and what a signal does."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from benchmarks.kills import Attempt, differences, finished, uninterrupted, wait_until
from executor import checkpoint, processes
from executor.stopping import Stopping, interruptible
from lab import runs
from lab.dataflow import conforms
from lab.load import dump, load
from lab.scenario import Scenario
from lab.wiring import build

LAB = [sys.executable, "-c", "from lab.cli import app; app()"]

STEPS = ("rollout", "reference", "reward", "advantage", "update_actor", "weight_sync")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Short, for sockets lie below it, whose paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="lp-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def begins(stopping: Stopping, run: tuple[str, int]) -> bool:
    async def attempt() -> bool:
        try:
            await asyncio.wait_for(stopping.begin(run), 0.01)
        except TimeoutError:
            return False
        return True

    return asyncio.run(attempt())


@pytest.mark.parametrize("name", ["quickstart", "ppo-tiny"])
def test_a_step_in_training_is_finished_and_no_other_begun(name: str) -> None:
    """One step off, the weights of step 3 wait for the rollout of step 4: that one belongs to it."""
    dataflow = build(load(f"scenarios/{name}.yaml"))
    stopping = Stopping(dataflow)
    assert begins(stopping, ("update_actor", 3))
    stopping.stop()
    ahead = ("rollout", 4) in dataflow.requirements("weight_sync", 3)
    assert ahead == (name == "ppo-tiny")
    for stage, step in product(STEPS, (3, 4, 5)):
        assert begins(stopping, (stage, step)) == (step == 3 or (stage == "rollout" and step == 4 and ahead))


def test_an_update_that_began_ahead_of_the_request_is_finished_with_its_step() -> None:
    """It was called while its advantages were computed, before the driver came to it."""
    stopping = Stopping(build(load("scenarios/quickstart.yaml")))
    assert stopping.may_begin(("update_actor", 2))
    stopping.stop()
    assert stopping.last == 2
    assert begins(stopping, ("weight_sync", 2))
    assert not stopping.may_begin(("update_actor", 3))
    assert stopping.last == 2


def test_a_run_that_has_trained_nothing_begins_nothing() -> None:
    stopping = Stopping(build(load("scenarios/quickstart.yaml")))
    assert begins(stopping, ("rollout", 0))
    stopping.stop()
    assert stopping.last == -1
    assert not any(begins(stopping, (stage, 0)) for stage in STEPS)


@pytest.mark.parametrize(("possible", "signals", "ends"), [(True, 1, False), (True, 2, True), (False, 1, True)])
def test_the_second_signal_ends_a_run_at_once(possible: bool, signals: int, ends: bool) -> None:
    asked = []

    def first() -> bool:
        asked.append(1)
        return possible

    async def run() -> bool:
        with interruptible(first):
            try:
                for _ in range(signals):
                    os.kill(os.getpid(), signal.SIGINT)
                    await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                return True
            return False

    assert asyncio.run(run()) == ends
    assert asked == [1]


HANGS_UP = """
import asyncio, os, signal, sys
from executor.stopping import interruptible
asked = []

async def run():
    with interruptible(lambda: not asked.append(1)):
        print("begun", flush=True)
        while not asked:
            await asyncio.sleep(0.01)
    print("what nobody reads", flush=True)
    print("nor this", file=sys.stderr, flush=True)

asyncio.run(run())
open(sys.argv[1], "w").write("ended in order")
"""


def in_terminal(code: str, *arguments: str) -> tuple[int, int]:
    """A program in a terminal of its own, once it has said something: its process, and the terminal's other end."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
        os.execv(sys.executable, [sys.executable, "-c", code, *arguments])
    said = b""
    while not said.endswith(b"\n"):
        said += os.read(terminal, 100)
    assert said.strip() == b"begun"
    return pid, terminal


def test_a_terminal_that_is_closed_ends_a_run_in_order(tmp_path: Path) -> None:
    """What is said after that goes nowhere, and is no error."""
    pid, terminal = in_terminal(HANGS_UP, str(tmp_path / "ended"))
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "ended").read_text() == "ended in order"


def test_a_terminal_that_says_twice_that_it_goes_asks_once(tmp_path: Path) -> None:
    pid, terminal = in_terminal(HANGS_UP, str(tmp_path / "ended"))
    for _ in range(20):
        os.kill(pid, signal.SIGHUP)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
    assert (tmp_path / "ended").read_text() == "ended in order"


def test_a_run_under_nohup_goes_on(tmp_path: Path) -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)" + HANGS_UP
    command = [sys.executable, "-c", ignoring, str(tmp_path / "ended")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    process.stdout.close()


@pytest.mark.real
@pytest.mark.full
def test_a_stopped_run_is_saved_and_goes_on_to_the_bit(scenario: Callable[..., Scenario], short_path: Path) -> None:
    """Between two of its checkpoints: the steps that were finished are not done again."""
    saving = {"every_steps": 20, "blocking": False}
    chosen = scenario("sft-learns", num_steps=40, checkpoint=saving, evaluate={"every_steps": None})
    file = short_path / "scenario.yaml"
    file.write_text(dump(chosen))
    reference = uninterrupted(file, short_path / "reference")
    attempt = Attempt([str(file), "--out", str(short_path / "stopped")], short_path / "log")
    wait_until(lambda: any(finished(run) >= 3 for run in (short_path / "stopped").glob("*")), 300)
    (run,) = (short_path / "stopped").iterdir()
    subprocess.run([*LAB, "stop", str(run)], check=True, capture_output=True)
    assert attempt.process.wait(60) == 1
    assert attempt.family() == []
    header = runs.read(run).header
    assert header.status == "cancelled" and len(header.learning) == finished(run)
    assert processes.read(run) == {}
    assert checkpoint.steps(run / "checkpoints")[-1] == finished(run) - 1
    resumed = Attempt([str(file), "--resume", str(run)], short_path / "log")
    assert resumed.process.wait(300) == 0, (short_path / "log").read_text()[-2000:]
    after = runs.read(run)
    assert conforms(build(chosen), after) == []
    assert after.header.samples["lost"] == 0
    extra = f"step-{len(header.learning) - 1:06d}"
    wrong = [name for name in differences(reference, run) if extra not in name]
    assert wrong == []
