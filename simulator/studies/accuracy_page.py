"""How a validation reads: as Markdown for people, as a record for programs. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from simulator.studies.accuracy import LARGE_MISS, Errors, Row, ValidationSet, table
from simulator.studies.validate import Validation

COLUMNS = ("", "n", "bias", "MAPE", "p50", "p90", f"misses over {LARGE_MISS:.0%}")
WORST_COLUMNS = ("case", "quantity", "predicted", "measured", "error", "reason")
INTRODUCTION = (
    "Written by `lab validate --output benchmarks/accuracy.md`: predictions beside figures that others measured and "
    "published, or that this machine measured and no fit used. bias: mean of predicted/measured − 1; MAPE: mean of its "
    "absolute value; p50 and p90: of the absolute values."
)
HALVES = {
    "even": "cases with an even last hex digit of sha256(id), where a set is split that way; the odd ones are for judges",
    "odd": "cases with an odd last hex digit of sha256(id), where a set is split that way",
    "all": "all cases, both halves",
}


def percent(value: float) -> str:
    return f"{value:.1%}"


def signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1%}"


def number(value: float | None, unit: str) -> str:
    """A value in its unit, to four significant digits."""
    if value is None:
        return "–"
    text = f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{text} {unit}".strip()


def misses(line: Errors) -> str:
    return f"{line.num_large}, {line.num_unexplained} without a reason" if line.num_large else "0"


def cells(name: str, line: Errors) -> tuple[str, ...]:
    """One row of a set's table, under COLUMNS."""
    figures = (signed(line.bias), *map(percent, (line.mape, line.p50, line.p90)))
    return (name, f"{line.num}", *figures, misses(line))


def worst_cells(row: Row) -> tuple[str, ...]:
    """One of the worst rows, under WORST_COLUMNS."""
    values = (number(row.predicted, row.unit), number(row.measured, row.unit))
    return (row.case, row.quantity, *values, signed(row.error), row.reason or "not known")


def exclusions(part: ValidationSet) -> list[str]:
    """Each rule with its sentence and how many rows it took out."""
    counts = part.excluded
    return [f"`{rule.id}` ({counts[rule.id]} rows): {rule.sentence}" for rule in part.rules]


def assumptions(part: ValidationSet) -> list[str]:
    return [f"{name} ({count} of {len(part.judged)} rows)" for name, count in part.assumed.items()]


def markdown(validation: Validation) -> str:
    """The page that `benchmarks/accuracy.md` keeps."""
    facts = validation.provenance
    machine = ", ".join(f"{value} {key}" if key == "cores" else str(value) for key, value in facts["machine"].items())
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    blocks = [
        "# How true predictions are",
        INTRODUCTION,
        bullets([
            f"date: {facts['date']}",
            f"commit: {facts['commit'] or 'not known'} (+: with changes not committed)",
            f"machine: {machine}",
            f"Python {facts['python']}, {packages}",
            f"judged: {HALVES[facts['half']]}",
        ]),
        *(block for part in validation.sets for block in section(part)),
    ]  # fmt: skip
    if validation.skipped:
        blocks += ["## Skipped", bullets(f"`{name}`: {why}" for name, why in validation.skipped.items())]
    return "\n\n".join(blocks) + "\n"


def section(part: ValidationSet) -> list[str]:
    """Everything about one set: statistics, worst rows, assumed inputs, what was left out and why."""
    blocks = [f"## {part.name}: {part.title}"]
    blocks += [bullets(part.notes)] if part.notes else []
    lines = [cells(name, line) for name, line in table(part).items()]
    blocks += [grid(COLUMNS, lines) if lines else "No row is judged."]
    if part.judged:
        blocks += ["Worst:", grid(WORST_COLUMNS, map(worst_cells, part.worst))]
        blocks += ["Assumed, because the source does not say:", bullets(assumptions(part) or ["nothing"])]
    if part.rules:
        blocks += ["Not judged:", bullets(exclusions(part))]
    return blocks


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def grid(head: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    rows = [head, tuple("---" for _ in head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def record(validation: Validation, *, rows: bool = True) -> dict[str, Any]:
    """All of it for a program: statistics and rules, and every row with its error where `rows` are asked for."""
    return {
        "schema_version": 1,
        **validation.provenance,
        "skipped": dict(validation.skipped),
        "sets": {part.name: _set_record(part, rows) for part in validation.sets},
    }


def _set_record(part: ValidationSet, rows: bool) -> dict[str, Any]:
    return {
        "title": part.title,
        "notes": list(part.notes),
        "accuracy": {name: line._asdict() for name, line in table(part).items()},
        "assumed": part.assumed,
        "rules": {rule.id: {"sentence": rule.sentence, "num_rows": part.excluded[rule.id]} for rule in part.rules},
        "worst": [_row_record(row) for row in part.worst],
    } | ({"rows": [_row_record(row) for row in part.rows]} if rows else {})


def _row_record(row: Row) -> dict[str, Any]:
    return asdict(row) | {"error": row.error}
