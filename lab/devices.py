"""What devices and processes did during a run: readings at moments of its clock, as a table beside its spans."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

FILE = "devices.parquet"
MAX_MOMENTS = 3600
"""kept; beyond it every second one is dropped, and the next ones are taken half as often"""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What one device, process or network interface did."""

    kind: Literal["device", "worker", "network"]
    name: str
    use: float = 0.0
    """of a device the share of the time since the reading before in which it worked; of a process, in cores"""
    memory_bytes: float = 0.0
    """of a GPU its own, of a core the machine's memory in use; of a process its resident memory"""
    received_bytes: float = 0.0
    """through an interface since the run began"""
    sent_bytes: float = 0.0


NUMBERS = ("use", "memory_bytes", "received_bytes", "sent_bytes")


class Readings:
    """Rows of numbers by (kind, name), bounded in number."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], array[float]] = {}
        self.num_moments = 0
        self.stride = 1
        """every so many calls of `add` are kept"""
        self._calls = 0

    def add(self, at_s: float, readings: Iterable[Reading]) -> None:
        """What was read at a moment of the run's clock."""
        self._calls += 1
        if (self._calls - 1) % self.stride:
            return
        for reading in readings:
            row = self._rows.setdefault((reading.kind, reading.name), array("d"))
            row.extend((at_s, *(getattr(reading, name) for name in NUMBERS)))
        self.num_moments += 1
        if self.num_moments >= MAX_MOMENTS:
            self._thin()

    def shift(self, seconds: float) -> None:
        """Moves all moments so far by so much: the clock that they were read by began elsewhere."""
        for row in self._rows.values():
            for i in range(0, len(row), 1 + len(NUMBERS)):
                row[i] += seconds

    def _thin(self) -> None:
        width = 1 + len(NUMBERS)
        for key, row in self._rows.items():
            moments = [row[i : i + width] for i in range(0, len(row), 2 * width)]
            self._rows[key] = array("d", (number for moment in moments for number in moment))
        self.num_moments, self.stride = (self.num_moments + 1) // 2, 2 * self.stride

    def write(self, path: Path, before: Any = None) -> None:
        """One row a reading, in the order of time, in one move; `before`: a table of an earlier attempt. Raises OSError."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        parts = [_table(kind, name, row) for (kind, name), row in self._rows.items()]
        table = pa.concat_tables([_schema().empty_table(), *parts]).sort_by("at_s")
        if before is not None:
            table = pa.concat_tables([before, table])
        part = path.with_suffix(".part")
        try:
            pq.write_table(table, part, compression="zstd")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
            del table, parts
            pa.default_memory_pool().release_unused()  # else a run that is written again and again takes more and more


def _table(kind: str, name: str, row: array[float]) -> Any:
    """The readings of one thing, without an object for each number."""
    import numpy as np
    import pyarrow as pa

    numbers = np.array(row).reshape(-1, 1 + len(NUMBERS))
    labels = [pa.repeat(pa.scalar(label, pa.string()), len(numbers)) for label in (kind, name)]
    return pa.Table.from_arrays([*labels, *(pa.array(column) for column in numbers.T.copy())], schema=_schema())


def read(folder: Path) -> Any:
    """The readings of the run in a folder as a table with kind, name, at_s, use, …; None where it has none.

    A file that is no such table counts as none: it says nothing of what the run did.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(folder / FILE)
    except (OSError, pa.ArrowException):
        return None
    return table if table.schema.equals(_schema()) else None


def _schema() -> Any:
    import pyarrow as pa

    numbers = [(name, pa.float64()) for name in ("at_s", *NUMBERS)]
    return pa.schema([("kind", pa.string()), ("name", pa.string()), *numbers])
