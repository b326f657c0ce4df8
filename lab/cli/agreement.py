"""Are predictions true on this machine? Held-out scenarios, predicted, then executed for real, several times each.

Bounds: of the step max(10 %, twice its spread), of its median 10 %, of a stage that takes over 5 % of the step max(15 %,
twice its spread); the spread is (max - min) / median over the repeats. A row whose spread is over 15 % settles nothing:
repeat when nothing else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import typer

from lab import library

HELD_OUT = Path(library.__file__).parent / "held_out"
STEP_BOUND, STAGE_BOUND, SMALL = 0.10, 0.15, 0.05
COLUMNS = ("scenario", "quantity", "predicted", "measured", "error", "spread", "bound", "met")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity of one scenario; seconds of a steady step."""

    scenario: str
    quantity: str
    predicted: float
    measured: float
    spread: float
    bound: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def met(self) -> bool:
        return abs(self.error) <= self.bound

    def cells(self) -> tuple[str, ...]:
        settled = "" if self.spread <= STAGE_BOUND else " (spread too large)"
        return (
            self.scenario, self.quantity, f"{self.predicted:.4f} s", f"{self.measured:.4f} s", f"{self.error:+.1%}",
            f"{self.spread:.1%}", f"{self.bound:.0%}", ("yes" if self.met else "no") + settled,
        )  # fmt: skip


def cases() -> dict[str, Path]:
    """The held-out scenarios, by name."""
    return {path.stem: path for path in sorted(HELD_OUT.glob("*.yaml"))}


class Unfinished(Exception):
    """A run of a held-out scenario did not end well; says which, and why."""


def judge(
    chosen: Sequence[str], repeats: int, profile: str | None, out: Path, told: Callable[[Row], None]
) -> tuple[list[Row], dict[str, str]]:
    """Predicts and executes each, and compares; and by scenario why one of its runs did not end well. Raises InputError for
    what this machine cannot execute."""
    found, failed = list[Row](), dict[str, str]()
    for name in chosen:
        try:
            rows = list(_rows(name, *_played(cases()[name], repeats, profile, out)))
        except Unfinished as error:
            failed[name] = str(error)
            continue
        for row in rows:
            told(row)
        found += rows
    return found, failed


def _played(path: Path, repeats: int, profile: str | None, out: Path) -> tuple[Any, list[Any]]:
    from lab.cli.execute import executor, measure
    from lab.cli.show import unfinished
    from lab.cli.simulate import predict, read
    from lab.load import located

    with located(path):
        scenario = read(path, None)
        executor("limits").refuse(scenario)
        predicted, _ = predict(scenario, out, profile)
    measured = []
    for _ in range(repeats):
        timeline, summary = measure(scenario, out)
        if timeline.header.status == "cancelled":  # whoever ended this run wants no other one
            unfinished(Path(summary["run_dir"]), "cancelled", "")
            raise typer.Exit(1)
        if timeline.header.status != "done":
            raise Unfinished(f"{timeline.header.error or timeline.header.status} ({summary['run_dir']})")
        measured.append(timeline)
    return predicted, measured


def _rows(name: str, predicted: Any, measured: list[Any]) -> Iterator[Row]:
    """The step, its median, and the stages that take over a twentieth of it."""
    from lab.compare import compare
    from lab.metrics import step_times

    found = compare(predicted, measured)
    yield _row(name, "step", found.step, STEP_BOUND)
    steps = [median(step_times(run)[1:]) for run in measured]
    spread, middle = (max(steps) - min(steps)) / median(steps), median(steps)
    yield Row(
        scenario=name, quantity="step p50", predicted=median(step_times(predicted)[1:]), measured=middle,
        spread=spread, bound=STEP_BOUND,
    )  # fmt: skip
    for stage, row in found.stages.items():
        if (row.share or 0.0) > SMALL and row.predicted is not None:
            yield _row(name, stage, row, STAGE_BOUND)


def _row(name: str, quantity: str, row: Any, least: float) -> Row:
    noise = row.noise or 0.0
    return Row(
        scenario=name, quantity=quantity, predicted=row.predicted, measured=row.measured, spread=noise,
        bound=max(least, 2 * noise),
    )  # fmt: skip


def page(rows: Sequence[Row], failed: Mapping[str, str], repeats: int) -> str:
    """The table, how it was made, and what did not end well."""
    from lab.cli.execute import executor

    ledger = executor("ledger")
    machine, said = ledger.host(), ", ".join(f"{name} {version}" for name, version in ledger.software().items())
    made = f"Made by `lab validate --here --repeats {repeats}`, {datetime.now(UTC):%Y-%m-%dT%H:%M} UTC."
    lines = [
        "| " + " | ".join(cells) + " |" for cells in (COLUMNS, ("---",) * len(COLUMNS), *(r.cells() for r in rows))
    ]
    return "\n".join([
        "# Predicted and measured on one machine", "", made,
        f"Machine: {machine['cpu']}, {machine['cores']} cores. {said}.", "",
        *(__doc__ or "").strip().splitlines()[2:], "",
        f"{sum(row.met for row in rows)} of {len(rows)} within their bounds.", "", *lines, "",
        *(f"- {name} did not end: {why.split(' (')[0]}" for name, why in failed.items()), *([""] if failed else []),
    ])  # fmt: skip
