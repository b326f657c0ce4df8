"""The same scenario under many seeds: what is a property of the placement, and what is luck of the draw."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

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
    with ProcessPoolExecutor(max_workers=processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for figures in pool.map(play, seeds):
            found.append(figures)
            progress(len(found))
    names = [name for name in found[0] if all(name in figures for figures in found)]
    return {name: Interval.of([figures[name] for figures in found]) for name in names}


def _figures(scenario: Scenario, profiles: Mapping[str, Profile], seed: int) -> dict[str, float]:
    summary: dict[str, Any] = summarise(simulate(scenario.replace({"seed": seed}), profiles))
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
