from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lab.cli.options import Json


def report(run: Annotated[Path, typer.Argument(help="A run folder.")], json: Json = False) -> None:
    """Write a run's page again and print its summary; also for a run that was interrupted."""
    from lab import runs
    from lab.cli.show import emit, summary_lines, summary_table
    from lab.load import present
    from lab.metrics import summarise
    from lab.report import write_run_report

    timeline = runs.read(present(run, "the folder of a run"))
    summary = summarise(timeline) | {"run_dir": str(run)}
    write_run_report(timeline, summary, run / "report.html")
    emit(summary, json, summary_table(summary), [*summary_lines(summary), f"report: {(run / 'report.html').resolve()}"])
