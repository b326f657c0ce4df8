from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from lab.cli.options import RUNS, ClusterFile, Json, Out, ScenarioFile


def execute(scenario: ScenarioFile, out: Out = RUNS, json: Json = False, cluster: ClusterFile = None) -> None:
    """Run a scenario for real on Ray, vLLM and DeepSpeed."""
    from lab.cli.show import emit, failed, summary_lines, summary_table
    from lab.cli.simulate import read
    from lab.load import located

    with located(scenario):
        timeline, summary = measure(read(scenario, cluster), out)
    emit(summary, json, summary_table(summary), summary_lines(summary))
    if timeline.header.status != "done":
        failed(Path(summary["run_dir"]), timeline.header.error or timeline.header.status)
        raise typer.Exit(1)


def measure(scenario: Any, out: Path) -> tuple[Any, dict[str, Any]]:
    """Executes and writes the run folder; the timeline and its summary. Raises InputError before anything starts."""
    from lab import runs

    limits, run = executor("limits"), executor("run")
    limits.refuse(scenario)
    folder = runs.begin(out, scenario, "measured")
    with progress(scenario.num_steps) as step:
        timeline = run.execute(scenario, folder, step)
    return timeline, runs.finish(folder, scenario, timeline)


def executor(module: str) -> Any:
    """A module of the executor. Raises InputError where what it stands on is not installed."""
    import importlib

    from lab.errors import InputError

    try:
        return importlib.import_module(f"executor.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("executor", "lab"):
            raise
        problem = f"the Python package {error.name} is not installed; real runs need the `exec` extra"
        raise InputError(problem=problem, remedy="run `make setup`, or see `lab doctor`") from None


def progress(num_steps: int) -> Any:
    """A context that yields a callback (what, finished steps); silent where the output is no terminal."""
    import contextlib

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    @contextlib.contextmanager
    def shown() -> Any:
        console = Console(stderr=True)
        if not console.is_terminal:
            yield None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting workers", total=num_steps)
            yield lambda what, done: bar.update(task, description=what, completed=done)

    return shown()
