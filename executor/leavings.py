"""What killed processes leave outside of a run's folder: temporary files, and files in shared memory."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

SHARED = "/dev/shm/"
_PREFIX, _HELD, _SHARED_NAMES = "lab-", "held", "shared"


def family() -> list[int]:
    """The processes that this one began, and those that these began."""
    with suppress(psutil.Error):
        return [process.pid for process in psutil.Process().children(recursive=True)]
    return []


def shared_by(pids: Iterable[int]) -> set[Path]:
    """Files in shared memory that processes have mapped, by whatever name: a semaphore is made under another one."""
    mapped = set[int]()
    for pid in pids:
        with suppress(OSError):  # it has ended meanwhile
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            mapped |= {int(line.split(maxsplit=5)[4]) for line in lines if f" {SHARED}" in line}
    found = set[Path]()
    for name in os.listdir(SHARED):
        with suppress(OSError):
            if os.lstat(SHARED + name).st_ino in mapped:
                found.add(Path(SHARED + name))
    return found


def remove(files: Iterable[Path]) -> None:
    """Deletes those that are there yet."""
    for file in files:
        with suppress(OSError):
            os.unlink(file)


class Place:
    """A folder for the temporary files of one run. Those of runs whose driver was killed are deleted when one is made."""

    def __init__(self) -> None:
        root = Path(tempfile.gettempdir())
        for folder in root.glob(f"{_PREFIX}*"):
            _sweep(folder)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))  # short: paths of sockets end at 107 bytes
        self._lock = (self.path / _HELD).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remember(self, files: Iterable[Path]) -> None:
        """Files in shared memory that go with this folder, should the driver be killed."""
        with suppress(OSError):
            (self.path / _SHARED_NAMES).write_text("\n".join(map(str, files)))

    def remove(self) -> None:
        """With everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _sweep(folder: Path) -> None:
    """Deletes a folder that was somebody's who has ended: the kernel let go of its lock."""
    with suppress(OSError), (folder / _HELD).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError):
            names = (folder / _SHARED_NAMES).read_text().splitlines()
            remove(Path(name) for name in names if name.startswith(SHARED))
        shutil.rmtree(folder, ignore_errors=True)
