"""The same scenario under many seeds: what is a property of the placement, and what is luck of the draw."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import Any

import numpy as np

from lab.errors import InputError, RunStuck
from lab.metrics import summarise
from lab.scenario import Scenario
from profiles.profile import Profile
from simulator.run import simulate

CONFIDENCE = 0.9
"""share of the seeds that an interval holds"""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """One figure over all seeds. Raises ValueError where there are no values."""

    mean: float
    low: float
    high: float
    standard_error: float
    """of the mean"""

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        found = np.asarray(values, dtype=float)
        if not len(found):
            raise ValueError("an interval needs at least one value")
        tail = (1 - CONFIDENCE) / 2
        error = float(found.std(ddof=1) / len(found) ** 0.5) if len(found) > 1 else 0.0
        low, high = np.quantile(found, [tail, 1 - tail])
        return cls(mean=float(found.mean()), low=float(low), high=float(high), standard_error=error)


def many(
    scenario: Scenario,
    profiles: Mapping[str, Profile],
    seeds: Sequence[int],
    processes: int,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Interval]:
    """Figures of the scenario over seeds, played in so many processes; `progress` hears how many are done.

    Keys: `makespan_s`, `step_s`, `samples_per_s`, `response_tokens_per_s`, `lag`, `goodput`, `stages.NAME` (busy
    seconds per step); a figure that a run does not have is left out. The result does not depend on the number of processes.
    """
    play = partial(_figures, scenario, profiles)
    found: list[dict[str, float]] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=processes, mp_context=context, initializer=_follow_parent) as pool:
        with _deaf():
            played = pool.map(play, seeds)
        try:
            for figures in played:
                found.append(figures)
                progress(len(found))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    names = [name for name in found[0] if all(name in figures for figures in found)]
    return {name: Interval.of([figures[name] for figures in found]) for name in names}


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are started meanwhile never hear Ctrl-C, not even while they import: their parent ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _follow_parent() -> None:
    """A process ends when the one that started it is gone, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "it was started by another process"

    def follow() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _figures(scenario: Scenario, profiles: Mapping[str, Profile], seed: int) -> dict[str, float]:
    try:
        summary: dict[str, Any] = summarise(simulate(scenario.replace({"seed": seed}), profiles))
    except RunStuck as stuck:
        raise RunStuck(f"seed {seed}: {stuck}") from None
    except InputError as wrong:
        wrong.problem = f"with seed {seed}: {wrong.problem}"
        raise
    step, lag = summary["step_s"] or {}, summary["lag"] or {}
    figures = {
        "makespan_s": summary["makespan_s"],
        "step_s": step.get("mean"),
        "samples_per_s": summary["samples_per_s"],
        "response_tokens_per_s": summary["response_tokens_per_s"],
        "lag": lag.get("mean"),
        "goodput": summary["goodput"],
    } | {f"stages.{name}": row["busy_s_per_step"] for name, row in summary["stages"].items()}
    return {name: float(value) for name, value in figures.items() if value is not None}
