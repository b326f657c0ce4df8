"""What a comparison of predictions with measurements made elsewhere consists of, and its statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LARGE_MISS = 0.30
"""A relative error beyond this needs a reason."""
NUM_WORST = 5


class Unavailable(Exception):
    """A set cannot be judged here: its data or an extra is absent. The text says what is missing and how to get it."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which cases are not judged, written down before anything is fitted.

    `comparison`: its rows predict a judged figure once more, in another way, and are never counted with the others.
    """

    id: str
    sentence: str
    comparison: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured figure and what the lab says of it, in one unit.

    Attributes:
        case: where the figure comes from; unique together with `quantity` within a set.
        quantity: what was measured, for example `TPOT`; statistics are also given for each quantity.
        predicted: None where nothing is predicted; then `excluded` names the rule.
        assumed: inputs that the source does not state.
        reason: why the prediction misses, where that is known.
        excluded: id of the rule by which the row is not judged; empty: it is.
    """

    case: str
    quantity: str
    predicted: float | None
    measured: float
    unit: str
    assumed: tuple[str, ...] = ()
    reason: str = ""
    excluded: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.measured) or not (self.excluded or self.measured > 0):
            raise ValueError(f"{self.case}: {self.quantity} was measured as {self.measured}, which cannot be judged")
        if not (self.predicted is None or math.isfinite(self.predicted)):
            raise ValueError(f"{self.case}: {self.quantity} is predicted as {self.predicted}")
        if self.predicted is None and not self.excluded:
            raise ValueError(f"{self.case}: {self.quantity} is judged but not predicted")

    @property
    def error(self) -> float | None:
        """predicted / measured - 1; None where one of them is missing."""
        return None if self.predicted is None or self.measured <= 0 else self.predicted / self.measured - 1.0


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """Rows of one source, and the rules by which some of them are not judged.

    `notes` say what a reader needs beside the numbers: what was fitted on what, the noise of the measurement.
    Raises ValueError where a row names a rule that is not listed.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    rules: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = {row.excluded for row in self.rows if row.excluded} - {rule.id for rule in self.rules}
        if unknown:
            raise ValueError(f"{self.name}: rows are excluded by {sorted(unknown)}, which is no rule of the set")

    @property
    def judged(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.excluded)

    @property
    def excluded(self) -> dict[str, int]:
        """How many rows each rule takes out; rules that take out none stand with 0."""
        counts = {rule.id: 0 for rule in self.rules}
        for row in self.rows:
            if row.excluded:
                counts[row.excluded] += 1
        return counts

    @property
    def assumed(self) -> dict[str, int]:
        """How many judged rows rest on each assumed input, the commonest first."""
        counts: dict[str, int] = {}
        for row in self.judged:
            for name in row.assumed:
                counts[name] = counts.get(name, 0) + 1
        return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))

    @property
    def worst(self) -> tuple[Row, ...]:
        """The judged rows with the largest errors."""
        return tuple(sorted(self.judged, key=lambda row: (-abs(row.error or 0.0), row.case, row.quantity)))[:NUM_WORST]


class Errors(NamedTuple):
    """Statistics of relative errors; `p50` and `p90` are of their absolute values, linear between two of them."""

    num: int
    bias: float
    mape: float
    p50: float
    p90: float
    num_large: int
    num_unexplained: int


def errors(rows: Iterable[Row]) -> Errors | None:
    """Statistics over the rows that have both values; None where there is none."""
    known = [(row.error, row) for row in rows if row.error is not None]
    if not known:
        return None
    signed = [error for error, _ in known]
    absolute = sorted(map(abs, signed))
    large = [row for error, row in known if abs(error) > LARGE_MISS]
    return Errors(
        num=len(signed),
        bias=math.fsum(signed) / len(signed),
        mape=math.fsum(absolute) / len(absolute),
        p50=quantile(absolute, 0.5),
        p90=quantile(absolute, 0.9),
        num_large=len(large),
        num_unexplained=sum(not row.reason for row in large),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of sorted values lie, linear between two of them."""
    place = share * (len(ordered) - 1)
    below = min(int(place), len(ordered) - 1)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def table(part: ValidationSet) -> dict[str, Errors]:
    """Statistics by quantity, and over all where there are several; then of what each rule takes out, where that is
    predicted, and over all that is predicted."""
    names = list(dict.fromkeys(row.quantity for row in part.judged))
    lines = {name: errors(row for row in part.judged if row.quantity == name) for name in names}
    if len(names) > 1:
        lines["all quantities"] = errors(part.judged)
    for rule in part.rules:
        lines[f"left out: {rule.id}"] = errors(row for row in part.rows if row.excluded == rule.id)
    again = {rule.id for rule in part.rules if rule.comparison}
    counted = [row for row in part.rows if row.excluded not in again]
    if any(row.excluded and row.error is not None for row in counted):
        lines["with what is left out"] = errors(counted)
    return {name: line for name, line in lines.items() if line is not None}
