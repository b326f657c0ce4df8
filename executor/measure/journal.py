"""What a sweep has measured so far, on disk after every unit, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lab.measurement import Measurement


class Found(msgspec.Struct, kw_only=True):
    """What one unit of a sweep yields."""

    unit: str = ""
    points: list[Measurement] = msgspec.field(default_factory=list)
    operators: list[dict[str, Any]] = msgspec.field(default_factory=list)
    """rows of torch.profiler's tables"""
    states: list[dict[str, Any]] = msgspec.field(default_factory=list)
    """of the devices, after the unit"""
    notes: list[str] = msgspec.field(default_factory=list)


@dataclass
class Journal:
    """Units by name. The file's first line says what machine, software and sweep it belongs to."""

    path: Path
    identity: dict[str, Any]
    units: dict[str, Found] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, identity: dict[str, Any], fresh: bool = False) -> Journal:
        """The journal at `path`; a new one where there is none, where it is another sweep's, or where asked for."""
        journal = cls(path, identity)
        if fresh or not journal.read():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(json.dumps(identity, sort_keys=True).encode() + b"\n")
        return journal

    def add(self, found: Found) -> None:
        """Keeps a unit, on disk before this returns."""
        self.units[found.unit] = found
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(found) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> bool:
        """Whether the file is this sweep's. A last line that was cut short is dropped, also on disk."""
        if not self.path.exists():
            return False
        first, *lines = self.path.read_bytes().split(b"\n")
        if first != json.dumps(self.identity, sort_keys=True).encode():
            return False
        kept = [first]
        for line in lines[:-1]:
            try:
                found = msgspec.json.decode(line, type=Found)
            except msgspec.MsgspecError:
                break
            self.units[found.unit] = found
            kept.append(line)
        self.path.write_bytes(b"\n".join([*kept, b""]))
        return True
