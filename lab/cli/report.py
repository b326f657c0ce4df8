from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lab.cli.options import Json


def report(run: Annotated[Path, typer.Argument(help="A run folder.")], json: Json = False) -> None:
    """Write a run's page again and print its summary; also for a run that was interrupted.

    Of a run that trained a reward model, also how it does on held-out pairs.
    """
    from lab import reward_report, runs
    from lab.cli.show import emit, reward_table, summary_lines, summary_table
    from lab.load import present
    from lab.metrics import summarise
    from lab.report import write_run_report

    timeline = runs.read(present(run, "the folder of a run"))
    summary = summarise(timeline) | {"run_dir": str(run)} | reward_report.summary(run)
    write_run_report(timeline, summary, run / "report.html")
    lines = [*summary_lines(summary), f"report: {(run / 'report.html').resolve()}"]
    judged = [reward_table(found)] if (found := summary.get("reward_report")) else []
    emit(summary, json, summary_table(summary), lines, judged)
