from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.cli.options import RUNS, ClusterFile, Json, Out, ScenarioFile

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
) -> None:
    """Run a scenario for real on Ray, vLLM and DeepSpeed."""
    from lab.cli.show import emit, failed, note, summary_lines, summary_table
    from lab.cli.simulate import read
    from lab.load import located

    with located(scenario):
        chosen = read(scenario, cluster)
        beside(scenario)
        timeline, summary = measure(chosen, out, resume)
    emit(summary, json, summary_table(summary), summary_lines(summary))
    if timeline.header.status != "done":
        failed(Path(summary["run_dir"]), timeline.header.error or timeline.header.status)
        note(f"  go on with it: lab execute {scenario} --resume {summary['run_dir']}")
        raise typer.Exit(1)


def beside(scenario: Path) -> None:
    """A reward function of the scenario may lie in a module beside it."""
    executor("rewards").importable(str(scenario.absolute().parent))


def measure(scenario: Any, out: Path, resume: Path | None = None) -> tuple[Any, dict[str, Any]]:
    """Executes and writes the run folder; the timeline and its summary. Raises InputError before anything starts."""
    from lab import runs

    limits, run = executor("limits"), executor("run")
    limits.refuse(scenario)
    folder = runs.begin(out, scenario, "measured") if resume is None else resume
    with runs.locked(folder), written(folder):
        earlier = None if resume is None else past(scenario, resume)
        with progress(scenario.num_steps) as step:
            timeline = run.execute(scenario, folder, step, earlier)
        with written(folder, timeline.header.error):
            return timeline, runs.finish(folder, scenario, timeline)


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


def progress(num_steps: int) -> Any:
    """A context that yields a callback (what, finished steps); silent where the output is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    @contextmanager
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
