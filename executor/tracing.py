"""Traces of stages by torch.profiler, taken inside the workers and kept in the run's folder.

A worker knows that it is to trace from its environment. Nothing is imported for it: only a worker that works with torch
already has anything to trace.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FOLDER, FROM, UNTIL = "LAB_TRACES", "LAB_TRACE_FROM", "LAB_TRACE_UNTIL"
TRACES = "traces"
"""in the run's folder"""
ENDING = ".json.gz"
_one = threading.Lock()


def variables(folder: Path, first: int, num_steps: int) -> dict[str, str]:
    """What tells a worker to trace the stages of so many steps into `folder`/traces."""
    return {FOLDER: str((folder / TRACES).absolute()), FROM: str(first), UNTIL: str(first + num_steps)}


def asked() -> dict[str, str]:
    """What this process's own environment says of it, for workers that start from here."""
    return {name: os.environ[name] for name in (FOLDER, FROM, UNTIL) if name in os.environ}


def name_of(node: str, step: int, worker: str) -> str:
    """Of the file that holds the trace of a stage: update_actor-2-actor.train.0.json.gz"""
    return f"{node}-{step}-{re.sub(r'[^A-Za-z0-9.]+', '.', worker).strip('.')}{ENDING}"


@contextmanager
def traced(node: str, step: int, worker: str) -> Iterator[str | None]:
    """Traces what this thread does inside; yields the file's name, None where nothing is traced.

    Where the trace cannot be written, or another thread of this process is being traced, there is none.
    """
    folder = os.environ.get(FOLDER)
    torch = sys.modules.get("torch")
    if folder is None or torch is None or not int(os.environ[FROM]) <= step < int(os.environ[UNTIL]):
        yield None
        return
    if not _one.acquire(blocking=False):
        yield None
        return
    try:
        profile = _profile(torch)
        with profile:
            yield name_of(node, step, worker)
        _write(profile, Path(folder), name_of(node, step, worker))
    finally:
        _one.release()


def _profile(torch: Any) -> Any:
    from torch import profiler

    kinds = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(profiler.ProfilerActivity.CUDA)
    return profiler.profile(activities=kinds, record_shapes=True, with_flops=True)


def _write(profile: Any, folder: Path, name: str) -> None:
    part = folder / f".{name.removesuffix(ENDING)}.{os.getpid()}{ENDING}"
    try:
        folder.mkdir(exist_ok=True)
        profile.export_chrome_trace(str(part))
        os.replace(part, folder / name)
    except (OSError, RuntimeError):  # a full disk: the run is worth more than its trace
        with suppress(OSError):
            part.unlink(missing_ok=True)
