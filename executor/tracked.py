"""MLflow's client in a process of its own: reads lines of JSON, and tells the tracking server or data base.

It prints why where it cannot, and ends with status 1; where its input ends before the run did, the run counts as killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

STATUS = {"done": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
MOST_AT_ONCE, MOST_METRICS = 100, 1000
"""parameters, and metrics, that a server takes at once"""
EVERY_S = 10.0
"""between two times that a server is told of steps"""
NICENESS = 19
"""of this process: the run that it tells of has the cores first"""
LONGEST_PARAMETER, LONGEST_TAG = 6000, 5000
"""characters that a server takes"""
SQLITE_S = 10.0
"""that another program may hold a data base"""
LONGEST_REASON = 200
"""characters of what is printed where it cannot go on"""
CHARACTERS = str.maketrans({"[": ".", "]": "", "(": "", ")": "", ",": "."})
"""that names must not hold"""


class Told:
    """One run of MLflow."""

    def __init__(self, begin: Mapping[str, Any]) -> None:
        """Makes the experiment where there is none, and the run; one that this run of the lab had is gone on with."""
        from mlflow import MlflowClient

        self._waiting: list[Any] = []
        self._told = time.monotonic()
        with _alone(begin["uri"]):
            self._client = MlflowClient(tracking_uri=begin["uri"])
            experiment = self._experiment(begin)
        mine = f"tags.`lab.run` = '{begin['run']}'"
        found = self._client.search_runs([experiment], filter_string=mine, max_results=1)
        tags = {name: text[:LONGEST_TAG] for name, text in (begin["tags"] | {"lab.revision": revision()}).items()}
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        made = self._client.create_run(experiment, run_name=begin["run"], tags=tags)
        self._id = made.info.run_id
        self._parameters(begin["parameters"])

    @property
    def late(self) -> bool:
        """Whether what waits has waited long enough."""
        return time.monotonic() - self._told > EVERY_S

    def _experiment(self, begin: Mapping[str, Any]) -> str:
        found = self._client.get_experiment_by_name(begin["experiment"])
        if found is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment(begin["experiment"], artifact_location=begin.get("artifacts")))

    def _parameters(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        rows = [Param(name.translate(CHARACTERS), text[:LONGEST_PARAMETER]) for name, text in values.items()]
        for start in range(0, len(rows), MOST_AT_ONCE):
            self._client.log_batch(self._id, params=rows[start : start + MOST_AT_ONCE])

    def step(self, line: Mapping[str, Any]) -> None:
        """The metrics of a step, which wait for others."""
        from mlflow.entities import Metric

        self._waiting += [
            Metric(name.translate(CHARACTERS), number, line["at"], line["step"])
            for name, number in line["metrics"].items()
        ]

    def flush(self) -> None:
        """Tells what waits."""
        rows, self._waiting = self._waiting, []
        for start in range(0, len(rows), MOST_METRICS):
            self._client.log_batch(self._id, metrics=rows[start : start + MOST_METRICS])
        self._told = time.monotonic()

    def end(self, status: str) -> None:
        self.flush()
        self._client.set_terminated(self._id, STATUS.get(status, "KILLED"))


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Two runs that begin at once do not make the tables of one data base together."""
    if not uri.startswith("sqlite:///"):
        yield
        return
    file = Path(uri.removeprefix("sqlite:///"))
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        _writable(file)
        yield
    finally:
        os.close(folder)


def _writable(file: Path) -> None:
    """Raises sqlite3.Error where no data base can be written there: MLflow itself would try for minutes to open it."""
    with closing(sqlite3.connect(file, timeout=SQLITE_S)) as opened:
        (version,) = opened.execute("PRAGMA user_version").fetchone()
        opened.execute(f"PRAGMA user_version = {version}")


def revision() -> str:
    """The commit of this code, with a + where files differ from it; else the version that is installed."""
    from importlib.metadata import version

    try:
        here = Path(__file__).resolve().parents[1]
        head, changed = (
            subprocess.run(
                ["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
        return f"{head}+" if changed else head
    except (OSError, subprocess.SubprocessError):
        return version("rlhf-lab")


def tell(lines: Iterable[str]) -> None:
    """Does what the lines say, one after the other."""
    told, status = None, "killed"
    for line in map(json.loads, lines):
        if "begin" in line:
            told = Told(line["begin"])
        elif told is not None and "end" in line:
            status = line["end"]
        elif told is not None:
            told.step(line)
            if told.late:
                told.flush()
    if told is not None:
        told.end(status)


def main() -> int:
    """Status 0, or 1 with the reason on standard output."""
    os.nice(NICENESS)
    try:
        tell(sys.stdin)
    except ModuleNotFoundError as error:
        print(f"the Python package {error.name} is not installed")
        return 1
    except Exception as error:  # whatever a server, a network or a data base may say
        lines = str(error).strip().splitlines() or ["it does not say why"]
        text = lines[0] if len(lines[0]) <= LONGEST_REASON else f"{lines[0][:LONGEST_REASON]} …"
        print(f"{type(error).__name__}: {text}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
