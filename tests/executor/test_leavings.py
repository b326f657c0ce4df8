"""What processes that were killed leave behind is found and deleted, and nobody else's."""

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from executor import leavings

MAPS = """
import multiprocessing, sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=64)
lock = multiprocessing.get_context("spawn").Lock()
print(memory.name, lock._semlock.name.strip("/"), flush=True)
time.sleep(60)
"""
HOLDS = """
import sys, time
from executor.leavings import Place
place = Place()
print(place.path, flush=True)
time.sleep(60)
"""


def begun(code: str, **variables: str) -> tuple["subprocess.Popen[str]", str]:
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=os.environ | variables
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def killed(process: "subprocess.Popen[str]") -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_memory_of_a_killed_process_is_deleted_and_that_of_others_stays() -> None:
    mine = SharedMemory(create=True, size=64)
    try:
        process, names = begun(MAPS)
        name, lock = names.split()
        its = {Path("/dev/shm", name), Path("/dev/shm", f"sem.{lock}")}
        assert process.pid in leavings.family()
        found = leavings.shared_by(leavings.family())
        assert its <= found and Path("/dev/shm", mine.name) not in found
        killed(process)
        leavings.remove(found)
        assert not any(path.exists() for path in its)
        assert Path("/dev/shm", mine.name).exists()
    finally:
        mine.close()
        mine.unlink()


def test_what_has_no_name_any_more_or_belongs_to_nobody_is_no_finding() -> None:
    memory = SharedMemory(create=True, size=64)
    assert Path("/dev/shm", memory.name) in leavings.shared_by([os.getpid()])
    memory.unlink()
    assert Path("/dev/shm", memory.name) not in leavings.shared_by([os.getpid()])
    memory.close()
    assert multiprocessing.active_children() == []
    assert leavings.shared_by([2**22 + 1]) == set()


def test_memory_of_a_run_whose_driver_was_killed_goes_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory, elsewhere = SharedMemory(create=True, size=64), tmp_path / "elsewhere"
    elsewhere.write_text("")
    remembers = HOLDS.replace("print(", f"place.remember(['/dev/shm/{memory.name}', '{elsewhere}'])\nprint(", 1)
    lost, its = begun(remembers, TMPDIR=str(tmp_path))
    place = leavings.Place()
    assert Path("/dev/shm", memory.name).exists() and Path(its).exists(), "its driver lives"
    killed(lost)
    leavings.Place().remove()
    place.remove()
    assert not Path("/dev/shm", memory.name).exists() and not Path(its).exists()
    assert elsewhere.exists()
    memory.close()
    resource_tracker.unregister(memory._name, "shared_memory")  # type: ignore[attr-defined]


def test_a_folder_goes_with_its_run_and_that_of_a_killed_driver_with_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "lab-notes").mkdir()
    lost, its = begun(HOLDS, TMPDIR=str(tmp_path))
    living, other = begun(HOLDS, TMPDIR=str(tmp_path))
    killed(lost)
    assert Path(its).is_dir()
    place = leavings.Place()
    assert {path.name for path in tmp_path.iterdir()} == {"lab-notes", Path(other).name, place.path.name}
    place.remove()
    killed(living)
    assert {path.name for path in tmp_path.iterdir()} == {"lab-notes", Path(other).name}
