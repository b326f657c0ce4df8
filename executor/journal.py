"""The log of a run: one JSON object a line, each with the run, the step and the version of the weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

FILE = "log.jsonl"


class Journal:
    """Appends whole lines, each in one write. What a disk refuses is said once; later lines are tried all the same."""

    def __init__(self, path: Path, experiment_id: str, say: Callable[[str], None]) -> None:
        self._path, self._experiment_id, self._say = path, experiment_id, say
        self._file: IO[bytes] | None = None
        self._said = False

    def line(
        self, event: str, iteration: int, model_version: int, said: Mapping[str, Any], level: str = "info"
    ) -> None:
        """One line: when, how grave (info, warning, error), what, of which step and version, and what more there is."""
        row = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"), "level": level, "event": event,
            "experiment_id": self._experiment_id, "iteration": iteration, "model_version": model_version, **said,
        }  # fmt: skip
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            self._file.write(json.dumps(row, default=str).encode() + b"\n")
        except OSError as error:
            if not self._said:
                self._said = True
                self._say(f"{self._path} is not written: {error.strerror or error}")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
