"""Where the time of a stage went, by operator, from the traces that torch.profiler wrote of it."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.errors import InputError

FOLDER = "traces"
"""in a run's folder"""
KINDS = {"cpu_op", "kernel", "gpu_memcpy", "gpu_memset"}
"""categories of the events that are operators; the profiler's own and those of Python are not"""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """All calls of one operator in a trace."""

    name: str
    num_calls: int
    self_s: float
    """seconds inside it and not inside an operator that it called"""
    total_s: float


def of_trace(path: Path) -> list[Operator]:
    """The operators of a trace, those that took longest first. Raises InputError where it is no trace."""
    return operators(_events(path))


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        content = path.read_bytes()
        text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        found = json.loads(text)
        events = found["traceEvents"] if isinstance(found, dict) else found
        return [event for event in events if event.get("ph") == "X" and event.get("cat") in KINDS]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, AttributeError, TypeError) as error:
        problem = f"not a trace of torch.profiler: {type(error).__name__}: {error}"
        remedy = "name the folder of a run, or a file that `lab execute --trace` wrote into its traces folder"
        raise InputError(file=str(path), problem=problem, remedy=remedy) from None


def operators(events: Iterable[dict[str, Any]]) -> list[Operator]:
    """Sums by name over Chrome trace events with ts and dur in microseconds; on each thread they nest."""
    threads: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        threads[event.get("pid"), event.get("tid")].append((event["ts"], event.get("dur", 0.0), event["name"]))
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for found in threads.values():
        for name, total, own in _nested(found):
            row = sums[name]
            row[0], row[1], row[2] = row[0] + 1, row[1] + own, row[2] + total
    rows = [
        Operator(name=name, num_calls=int(calls), self_s=own * 1e-6, total_s=total * 1e-6)
        for name, (calls, own, total) in sums.items()
    ]
    return sorted(rows, key=lambda row: (-row.self_s, row.name))


def _nested(found: Sequence[tuple[float, float, str]]) -> Iterable[tuple[str, float, float]]:
    """Of each event its name, its time and what of that no event inside it took."""
    open_: list[list[Any]] = []
    for start, seconds, name in sorted(found, key=lambda event: (event[0], -event[1])):
        while open_ and open_[-1][0] <= start:
            _, whole, inside, last = open_.pop()
            yield last, whole, max(whole - inside, 0.0)
        if open_:
            open_[-1][2] += seconds
        open_.append([start + seconds, seconds, 0.0, name])
    for _, whole, inside, last in open_:
        yield last, whole, max(whole - inside, 0.0)


def latest(folder: Path) -> dict[str, Path]:
    """By stage and worker, as the file's name has them, the latest trace of the run in a folder."""
    found: dict[str, tuple[int, Path]] = {}
    for path in (folder / FOLDER).glob("[!.]*.json.gz"):
        node, _, rest = path.name.removesuffix(".json.gz").partition("-")
        step, _, worker = rest.partition("-")
        if step.isdecimal():
            found[f"{node} on {worker}"] = max(found.get(f"{node} on {worker}", (-1, path)), (int(step), path))
    return {name: path for name, (_, path) in sorted(found.items())}
