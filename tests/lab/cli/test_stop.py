"""`lab stop`: the process that holds a run is asked to end, and waited for; a folder that nobody holds is said so."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lab import runs
from lab.cli import main
from lab.load import load
from lab.scenario import Scenario
from lab.timeline import header_of

HOLDS = """
import signal, sys, time
from pathlib import Path
from lab import runs
signals = []
signal.signal(signal.SIGINT, lambda *_: signals.append(1))
with runs.locked(Path(sys.argv[1])):
    print("held", flush=True)
    while len(signals) < int(sys.argv[2]):
        time.sleep(0.01)
"""


@pytest.fixture
def chosen() -> Scenario:
    return load("scenarios/quickstart.yaml")


@pytest.fixture
def run(chosen: Scenario, tmp_path: Path) -> Path:
    return runs.begin(tmp_path, chosen, "measured")


def holder(run: Path, signals: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(run), str(signals)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["stop", *arguments])
    return int(left.value.code or 0)


def test_the_holder_is_asked_and_waited_for(chosen: Scenario, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.mark(
        run, chosen, msgspec.structs.replace(header_of(chosen, "measured"), status="cancelled", learning=[{}] * 3)
    )
    for process in holder(run, signals=1):
        assert runs.is_held(run) and runs.holder(run) == process.pid
        assert ended(str(run)) == 0
        assert process.wait(10) == 0
    assert not runs.is_held(run)
    assert "cancelled after 3 of 24 steps" in capsys.readouterr().err


def test_who_does_not_come_to_an_end_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for process in holder(run, signals=2):
        assert ended(str(run), "--timeout", "0.3") == 2
        assert f"process {process.pid} still runs it" in capsys.readouterr().err
        assert ended(str(run), "--now") == 0


def test_nobody_runs_it(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(str(run)) == 2
    assert "no process executes it; it was interrupted" in capsys.readouterr().err
    assert ended(str(tmp_path)) == 2
    assert "not a run" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"header": 3}', b"\xff"])
def test_a_damaged_header_is_said(run: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "run.json").write_bytes(content)
    assert ended(str(run)) == 2
    assert "no process executes it; and its run.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{stranger}", "", "x", "-1", "999999999"])
def test_a_process_that_does_not_hold_the_run_is_left_alone(run: Path, text: str) -> None:
    """Whatever the lock says: who is named in it may have ended, and its number be somebody else's."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    for process in holder(run, signals=1):
        (run / "lock").write_text(text.format(stranger=stranger.pid))
        assert ended(str(run), "--timeout", "0.1") == 2
        assert process.poll() is None and stranger.poll() is None
    (run / "lock").write_text(str(stranger.pid))
    assert ended(str(run)) == 2
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_two_runs_do_not_share_a_folder(run: Path) -> None:
    from lab.errors import InputError

    for process in holder(run, signals=1):
        with pytest.raises(InputError, match=f"process {process.pid} is running it"), runs.locked(run):
            pass
