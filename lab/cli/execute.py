from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
    from lab.cli.show import emit, note, summary_lines, summary_table, unfinished
    from lab.cli.simulate import read
    from lab.load import located
    from lab.publication import idles

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
    for text in _not_struck(chosen, timeline, Path(summary["run_dir"])):
        note(text)
    if timeline.header.status == "done" and (said := idles(chosen, timeline.spans)):
        note("{}: {}; {}".format(*said))
    if timeline.header.status != "done":
        unfinished(Path(summary["run_dir"]), timeline.header.status, timeline.header.error)
        note(f"  go on with it: lab execute {scenario} --resume {summary['run_dir']}")
        raise typer.Exit(1)
    with located(scenario):
        looked(chosen, summary)


def looked(scenario: Any, summary: dict[str, Any]) -> None:
    """Raises InputError where engines that pull looked for no weights before a run had ended; it is kept as it is."""
    from lab.errors import InputError
    from lab.publication import too_rare

    if said := too_rare(scenario, summary["makespan_s"]):
        key, problem, remedy = said
        raise InputError(key=key, problem=f"{problem}; it is kept in {summary['run_dir']}", remedy=remedy)


def _not_struck(scenario: Any, timeline: Any, folder: Path) -> list[str]:
    """Faults that were stated for later than the end of the run, or for a time at which their target was away."""
    from lab.strikes import missed

    if not scenario.faults:
        return []
    end_s = max((span.end_s for span in timeline.spans), default=0.0)
    strikes = list(executor("injecting").struck(folder))
    done = {(strike["entry"], strike["target"]) for strike in strikes}
    away = [strike for strike in strikes if strike["pid"] is None]
    late = [one for one in missed(scenario, end_s) if (one.entry, one.target) not in done]
    said = f"the run ended at {end_s:.1f} s"
    return [
        *(f"faults[{one.entry}].at is {one.at:g} s, and {said}: {one.target} was not struck" for one in late),
        *(f"faults[{one['entry']}] struck nobody at {one['at_s']:.1f} s: {one['target']} was away" for one in away),
    ]


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
    from lab.cli.watching import traced, watch

    limits, run = executor("limits"), executor("run")
    limits.refuse(scenario)
    asked = asked or Asked()
    asked.check()
    folder = runs.begin(out, scenario, "measured") if resume is None else resume
    new = runs.gone_if_refused(folder) if resume is None else nullcontext()
    with runs.locked(folder), new, written(folder):
        earlier = None if resume is None else past(scenario, resume)
        first = 0 if earlier is None else earlier.first_step
        with watch(scenario, folder, asked) as watched, traced(folder, first, asked.trace_steps):
            with progress(scenario.num_steps, watched.told) as step:
                timeline = run.execute(scenario, folder, step, earlier, watched)
            watched.close(timeline.header.status, timeline.header.error)
        with written(folder, timeline.header.error):
            iterations.write(timeline, folder / iterations.FILE)
            summary = runs.finish(folder, scenario, timeline)
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

    `told`: numbers to show below it.
    """
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    @contextmanager
    def shown() -> Any:
        console = Console(stderr=True)
        if not console.is_terminal:
            yield None
            return
        left = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
        bar = Progress(*left, TextColumn("ETA"), TimeRemainingColumn(), console=console)
        task, below = bar.add_task("starting workers", total=num_steps), Text(style="dim", overflow="fold")

        def step(what: str, done: int) -> None:
            bar.update(task, description=what, completed=done)
            below.plain = told()

        with Live(Group(bar, below), console=console, transient=True):
            yield step

    return shown()
