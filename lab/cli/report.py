from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lab.cli.options import Json


def report(
    run: Annotated[Path, typer.Argument(help="A run folder, or a trace in the traces folder of one.")],
    json: Json = False,
) -> None:
    """Write a run's page again and print its summary; also for a run that was interrupted.

    Of a run that trained a reward model, also how it does on held-out pairs. Of a trace where the time went, by operator.
    """
    if run.is_file():
        operators(run, json)
        return
    from lab import reward_report, runs
    from lab.cli.show import emit, note, reward_table, summary_lines, summary_table
    from lab.load import present
    from lab.metrics import summarise
    from lab.report import write_run_report

    timeline = runs.read(present(run, "the folder of a run"))
    summary = summarise(timeline) | {"run_dir": str(run)} | reward_report.summary(run)
    written = True
    try:
        write_run_report(timeline, summary, run / "report.html")
    except OSError as refused:  # a folder that may be read only
        written = False
        note(f"{run / 'report.html'} is not written: {refused.strerror or refused}")
    error = [f"it ended early: {timeline.header.error}"] if timeline.header.error else []
    lines = [*error, *summary_lines(summary)]
    lines += [f"report: {(run / 'report.html').resolve()}"] if written else []
    judged = [reward_table(found)] if (found := summary.get("reward_report")) else []
    emit(summary, json, summary_table(summary), lines, judged)
    if not written:
        raise typer.Exit(1)


def operators(trace: Path, json: bool, top: int = 20) -> None:
    """Prints what a trace of torch.profiler holds."""
    from dataclasses import asdict

    from rich.table import Table

    from lab.cli.show import emit, percent, seconds
    from lab.operators import of_trace

    found = of_trace(trace)
    whole = sum(row.self_s for row in found)
    table = Table("operator", "calls", "inside it alone", "share", "with what it calls")
    table.title, table.title_justify = f"{trace.name}: {seconds(whole)} in operators", "left"
    for row in found[:top]:
        share = percent(row.self_s / whole if whole else None)
        table.add_row(row.name, str(row.num_calls), seconds(row.self_s), share, seconds(row.total_s))
    lines = [f"the {top} of {len(found)} operators that took longest"] if len(found) > top else []
    emit({"trace": str(trace), "operators": [asdict(row) for row in found]}, json, table, lines)
