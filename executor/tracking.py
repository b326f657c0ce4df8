"""Tells MLflow of a run: its settings, what code and data it used, and its numbers step by step.

The client runs in a process of its own (`executor.tracked`), which this one writes lines to: a server that does not
answer, or a data base that is locked, holds up nothing here.
"""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from executor.origin import origin
from lab.scenario import Scenario

FILE = "mlflow.db"
"""beside the run folders, where no server is named"""
VARIABLE = "MLFLOW_TRACKING_URI"
CLOSE_S = 30.0
"""that the client gets to tell the rest when the run is over"""
_MOST_WAITING = 10_000
"""lines that are kept for a client that does not take them"""


def address(folder: Path) -> str:
    """The server named by MLFLOW_TRACKING_URI, else a data base beside the run's folder."""
    return os.environ.get(VARIABLE) or f"sqlite:///{(folder.absolute().parent / FILE)}"


def parameters(scenario: Scenario) -> dict[str, str]:
    """Every setting of a scenario by its path, such as optimizer.lr; those without a value are left out."""
    return dict(_flat(scenario.model_dump(mode="json", by_alias=True)))


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [pair for key, part in value.items() for pair in _flat(part, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        return [pair for i, part in enumerate(value) for pair in _flat(part, f"{path}.{i}")]
    return (
        []
        if value is None or value == {} or not path
        else [(path, value if isinstance(value, str) else json.dumps(value))]
    )


def tags(scenario: Scenario, folder: Path, software: Mapping[str, str]) -> dict[str, str]:
    """What a run stands on: the scenario's digest, the data's and the weights' versions, and those of the software."""
    found = {"lab.run": folder.name, "lab.folder": str(folder.absolute()), "lab.digest": scenario.digest}
    found |= {f"lab.data.{key}": str(value) for key, value in scenario.data.about().items()}
    found |= {f"lab.software.{name}": text for name, text in software.items()}
    for role in scenario.algorithm.roles:
        with suppress(KeyError, AttributeError, TypeError, ValueError):  # a role without a model of its own
            start = origin(scenario, role)
            found[f"lab.weights.{role}"] = f"random:{start.seed}" if start.weights == "random" else start.weights
    return found


class Tracker:
    """Hands lines to the client's process; whatever happens to it is said once, and the run goes on."""

    def __init__(self, begin: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """`begin`: uri, experiment, run, parameters, tags. `say` is told of what went wrong, at most once."""
        self._say, self._uri, self._said = say, begin["uri"], False
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._client: subprocess.Popen[str] | None = None
        self._threads = [threading.Thread(target=self._write, daemon=True)]
        self._put({"begin": dict(begin)})
        self._threads[0].start()

    def step(self, step: int, numbers: Mapping[str, float], at_s: float) -> None:
        """The numbers of a step, known `at_s` seconds since the epoch; those that are not finite are left out."""
        finite = {name: number for name, number in numbers.items() if math.isfinite(number)}
        self._put({"step": step, "metrics": finite, "at": int(at_s * 1000)})

    def close(self, status: str) -> None:
        """The run has ended: done, failed or cancelled. Waits for the client, but not for long."""
        self._put({"end": status})
        with suppress(queue.Full):
            self._lines.put_nowait(None)
        for thread in self._threads:
            thread.join(CLOSE_S)
        if (client := self._client) is not None and client.poll() is None:
            self._fail(f"it did not take everything within {CLOSE_S:g} s of the end of the run")
            client.kill()
            client.wait()

    def _put(self, line: Mapping[str, Any]) -> None:
        with suppress(queue.Full):
            self._lines.put_nowait(json.dumps(line))

    def _fail(self, why: str) -> None:
        if not self._said:
            self._said = True
            self._say(f"MLflow at {self._uri} is not told of this run: {why}")

    def _write(self) -> None:
        try:
            self._client = client = _start()
            assert client.stdin is not None
            reader = threading.Thread(target=self._read, args=(client,), daemon=True)
            reader.start()
            with suppress(OSError, ValueError):  # it has ended; it said why
                while (line := self._lines.get()) is not None:
                    client.stdin.write(line + "\n")
                    client.stdin.flush()
            with suppress(OSError, ValueError):
                client.stdin.close()
            client.wait()
            reader.join()
        except OSError as error:
            self._fail(str(error.strerror or error))

    def _read(self, client: subprocess.Popen[str]) -> None:
        assert client.stdout is not None
        said = [line.strip() for line in client.stdout if line.strip()]
        if client.wait():
            self._fail(said[-1] if said else f"its client ended with status {client.returncode}")


def _start() -> subprocess.Popen[str]:
    """In a process group of its own, so that Ctrl-C at a terminal leaves it time to finish."""
    variables = {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "GIT_PYTHON_REFRESH": "quiet",
        "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true",
    }  # fmt: skip
    here = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "executor.tracked"], env=variables | os.environ | {"PYTHONPATH": paths}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
