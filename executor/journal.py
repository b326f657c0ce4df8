"""The log of a run: one JSON object a line, each with the run, the step and the version of the weights."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from lab.runs import mend

FILE = "log.jsonl"


class Journal:
    """Appends whole lines, each in one write. What a disk refuses is said once; later lines are tried all the same."""

    def __init__(self, path: Path, experiment_id: str, say: Callable[[str], None]) -> None:
        self._path, self._experiment_id, self._say = path, experiment_id, say
        self._file: FileIO | None = None
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
            self._append(json.dumps(_plain(row), default=str).encode() + b"\n")
        except OSError as error:
            if not self._said:
                self._said = True
                self._say(f"{self._path} is not written: {error.strerror or error}")

    def _append(self, line: bytes) -> None:
        """All of it or nothing. Raises OSError."""
        if self._file is None:
            mend(self._path)
            self._file = self._path.open("ab", buffering=0)
        if (written := self._file.write(line)) < len(line):
            self._file.truncate(self._file.tell() - written)
            raise OSError(errno.ENOSPC, "there was room for a part of a line only")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _plain(value: Any) -> Any:
    """Numbers that JSON does not have as text: a line is read by other programs too."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
