from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.cli.options import RUNS, Json, Out


def compare(
    predicted: Annotated[Path, typer.Argument(help="Run folder of the prediction.")],
    measured: Annotated[
        list[Path], typer.Argument(help="Run folders of the measurement; several repeats give the noise.")
    ],
    out: Out = RUNS,
    json: Json = False,
) -> None:
    """Put a predicted and a measured run side by side and say what explains the gap."""
    from lab import runs
    from lab.cli.show import comparison_table, emit

    first, rest = runs.read(predicted), [runs.read(folder) for folder in measured]
    result = side_by_side(first, rest, out)
    emit(result, json, comparison_table(result), lines(result))


def lines(result: dict[str, Any]) -> list[str]:
    """What explains the gap, and where to look."""
    reasons = [reason["text"] for reason in result["explains"] if abs(reason["seconds"]) > 1e-9]
    said = [*(f"· {text}" for text in reasons[:3]), *(f"caution: {text}" for text in result["caveats"])]
    return [*said, f"report: {result['report']}"]


def side_by_side(predicted: Any, measured: Sequence[Any], out: Path) -> dict[str, Any]:
    """Compares timelines and writes report.html, trace.json and comparison.json; the comparison as a dict."""
    import json

    from lab.compare import caveats
    from lab.compare import compare as contrast
    from lab.report import write_comparison_report
    from lab.runs import comparison_folder, write_atomically
    from lab.trace import to_chrome

    comparison = contrast(predicted, measured)
    folder = comparison_folder(out, predicted.header.scenario)
    write_comparison_report(comparison, predicted, measured, folder / "report.html")
    write_atomically(folder / "trace.json", to_chrome({"predicted": predicted, "measured": measured[-1]}))
    result: dict[str, Any] = comparison.to_dict() | {
        "caveats": caveats(comparison, predicted, measured),
        "report": str((folder / "report.html").resolve()),
    }
    write_atomically(folder / "comparison.json", json.dumps(result, indent=1).encode())
    return result
