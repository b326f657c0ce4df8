from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.cli.options import RUNS, ClusterFile, Json, Out, ScenarioFile
from lab.cli.watching import Asked, MetricsPort, NoMetrics, NoTracking, Trace, TraceSteps

Resume = Annotated[
    Path | None,
    typer.Option("--resume", metavar="RUN", help="Go on with a run of this scenario that ended early, in its folder."),
]


def execute(
    scenario: ScenarioFile,
    out: Out = RUNS,
    json: Json = False,
    cluster: ClusterFile = None,
    resume: Resume = None,
    metrics_port: MetricsPort = None,
    no_metrics: NoMetrics = False,
    no_tracking: NoTracking = False,
    trace: Trace = False,
    trace_steps: TraceSteps = 3,
) -> None:
    """Run a scenario for real on Ray, vLLM and DeepSpeed."""
    from lab.cli.show import emit, failed, note, summary_lines, summary_table
    from lab.cli.simulate import read
    from lab.load import located

    asked = Asked(
        metrics_port=metrics_port,
        no_metrics=no_metrics,
        no_tracking=no_tracking,
        trace_steps=trace_steps if trace else 0,
    )
    with located(scenario):
        chosen = read(scenario, cluster)
        beside(scenario)
        timeline, summary = measure(chosen, out, resume, asked)
    emit(summary, json, summary_table(summary), summary_lines(summary))
    for text in _not_struck(chosen, summary):
        note(text)
    if timeline.header.status != "done":
        failed(Path(summary["run_dir"]), timeline.header.error or timeline.header.status)
        note(f"  go on with it: lab execute {scenario} --resume {summary['run_dir']}")
        raise typer.Exit(1)


def _not_struck(scenario: Any, summary: dict[str, Any]) -> list[str]:
    """Faults that were stated for later than the end of the run."""
    from lab.strikes import missed

    end_s = summary["makespan_s"] or 0.0
    late = missed(scenario, end_s) if scenario.faults else []
    said = f"the run ended at {end_s:.1f} s"
    return [f"faults[{one.entry}].at is {one.at:g} s, and {said}: {one.target} was not struck" for one in late]


def beside(scenario: Path) -> None:
    """A reward function of the scenario may lie in a module beside it."""
    executor("rewards").importable(str(scenario.absolute().parent))


def measure(
    scenario: Any, out: Path, resume: Path | None = None, asked: Asked | None = None
) -> tuple[Any, dict[str, Any]]:
    """Executes and writes the run folder; the timeline and its summary. Raises InputError before anything starts.

    `asked`: how the run is watched; without, by its log and its devices alone.
    """
    from lab import iterations, runs
    from lab.cli.show import note
    from lab.cli.watching import traced, watch
    from lab.publication import too_rare

    limits, run = executor("limits"), executor("run")
    limits.refuse(scenario)
    asked = asked or Asked()
    asked.check()
    folder = runs.begin(out, scenario, "measured") if resume is None else resume
    with runs.locked(folder), written(folder):
        earlier = None if resume is None else past(scenario, resume)
        first = 0 if earlier is None else earlier.first_step
        with watch(scenario, folder, asked) as watched, traced(folder, first, asked.trace_steps):
            with progress(scenario.num_steps, watched.told) as step:
                timeline = run.execute(scenario, folder, step, earlier, watched)
            watched.close(timeline.header.status, timeline.header.error)
        with written(folder, timeline.header.error):
            iterations.write(timeline, folder / iterations.FILE)
            summary = runs.finish(folder, scenario, timeline)
    if timeline.header.status == "done" and (said := too_rare(scenario, summary["makespan_s"])):
        note("{}: {}; {}".format(*said))
    return timeline, summary


def past(scenario: Any, folder: Path) -> Any:
    """What is behind a run that is resumed; says how much of it counts. Raises InputError where it cannot be."""
    from lab.cli.show import note

    earlier = executor("resume").resume(scenario, folder)
    for text in earlier.notes:
        note(text)
    again = earlier.faults[-1]["steps"]
    note(f"resumed after {earlier.first_step} of {scenario.num_steps} steps; {again} finished steps are done again")
    return earlier


@contextmanager
def written(folder: Path, before: str = "") -> Iterator[None]:
    """What the disk refuses ends the command with status 1 and one message; finished steps are in the folder.

    `before`: what had ended the run by then.
    """
    from lab.cli.show import failed

    try:
        yield
    except OSError as error:
        failed(folder, f"{f'{before}; ' if before else ''}{error.strerror or error}: {error.filename or folder}")
        raise typer.Exit(1) from None


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


def progress(num_steps: int, told: Callable[[], str] = str) -> Any:
    """A context that yields a callback (what, finished steps); silent where the output is no terminal.

    `told`: numbers to show beside it.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    @contextmanager
    def shown() -> Any:
        console = Console(stderr=True)
        if not console.is_terminal:
            yield None
            return
        left = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
        right = (TextColumn("ETA"), TimeRemainingColumn(), TextColumn("{task.fields[told]}", style="dim"))
        with Progress(*left, *right, console=console, transient=True) as bar:
            task = bar.add_task("starting workers", total=num_steps, told="")
            yield lambda what, done: bar.update(task, description=what, completed=done, told=told())

    return shown()
