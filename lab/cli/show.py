"""How results look in a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def emit(result: dict[str, Any], as_json: bool, table: Table, lines: list[str], more: Sequence[Table] = ()) -> None:
    """Prints a result for a program, or for a person; `more` tables stand below the first."""
    if as_json:
        print(json.dumps(result, ensure_ascii=False, allow_nan=False))
        return
    console = Console()
    for each in (table, *more):
        console.print(each)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """Says on standard error what is going on."""
    print(text, file=sys.stderr, flush=True)


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1e3:.1f} ms" if abs(value) < 1 else f"{value:.2f} s"


def percent(value: float | None, *, sign: bool = False) -> str:
    return "–" if value is None else f"{value:+.1%}" if sign else f"{value:.1%}"


def summary_table(summary: dict[str, Any]) -> Table:
    """Stages of one run with their time and share of the step."""
    step = summary["step_s"] or {}
    title = f"{summary['scenario']} ({summary['origin']}): step {seconds(step.get('mean'))}"
    title += f", {summary['steps_done']}/{summary['num_steps']} steps, {summary['status']}"
    table = Table("stage", "busy per step", "share of the step", title=title, title_justify="left")
    for stage, row in summary["stages"].items():
        table.add_row(stage, seconds(row["busy_s_per_step"]), percent(row["share"]))
    return table


def reward_table(found: dict[str, Any]) -> Table:
    """How often a reward model puts held-out pairs in the right order, by group."""
    from lab.reward_report import lines

    table = Table("held-out pairs by", "", "pairs", "in the right order", "standard error")
    table.title, table.title_justify = f"reward model: {found['verdict']}", "left"
    for name, group, pairs, accuracy, error in lines(found):
        table.add_row(name, group, str(pairs), percent(accuracy), percent(error))
    return table


def seeds_table(result: dict[str, Any]) -> Table:
    """Figures over many seeds: the mean, the interval, and how sure the mean is."""
    title = f"{result['scenario']} ({result['origin']}), {len(result['seeds'])} seeds"
    table = Table("figure", "mean", f"{result['confidence']:.0%} of seeds", "standard error")
    table.title, table.title_justify = title, "left"
    for name, row in result["figures"].items():
        timed = (name.endswith("_s") and "per_s" not in name) or name.startswith("stages.")
        low, mean, high, error = (
            seconds(row[key]) if timed else f"{row[key]:,.4g}" for key in ("low", "mean", "high", "standard_error")
        )
        table.add_row(name, mean, f"{low} to {high}", error)
    return table


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, silent where that is no terminal; what it yields is told how many are done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """What else a person asks first."""
    from lab.metrics import about_samples

    lines = []
    for device, profile in summary["profiles"].items():
        lines.append(
            f"costs of {device}: {profile['name']}, {percent(profile['extrapolated_share'])} of the time extrapolated"
        )
        if profile["unmeasured"]:
            lines.append(f"  not measured, from the datasheet: {', '.join(profile['unmeasured'])}")
        lines += [f"  {text}" for text in profile.get("notes", ())]
    for pool, row in summary["memory"].items():
        if not row["fits"]:
            lines.append(
                f"memory: pool {pool} does NOT fit, {row['peak_bytes'] / 1e9:.1f} GB of {row['capacity_bytes'] / 1e9:.1f} GB"
            )
    if summary["data"] and summary["data"]["skipped"]:
        lines.append(f"data: {summary['data']['skipped']} broken lines of {summary['data']['file']} were skipped")
    if summary["bottleneck"]:
        lines.append(f"bottleneck: {summary['bottleneck']['why']}")
    packing = summary["packing"]
    if packing["padding"]:
        told = f"{percent(packing['padding'])} of the updates' tokens are padding"
        lines.append(f"micro-batches: {told}; the fullest rank has {percent(packing['imbalance'])} above the mean")
    lines += [*about_samples(summary), *fault_lines(summary)]
    if summary["reward"]["first"] is not None:
        lines.append(f"reward: {summary['reward']['first']:.3f} → {summary['reward']['last']:.3f}")
    if summary["logprob_gap_max"] is not None:
        lines.append(f"largest engine–trainer log-prob gap: {summary['logprob_gap_max']:.2e}")
    if summary.get("reward_report"):
        from lab.reward_report import sentence

        lines.append(sentence(summary["reward_report"]))
    return [*lines, f"run folder: {summary['run_dir']}"]


def fault_lines(summary: dict[str, Any]) -> list[str]:
    """What failed, and what that and the checkpoints cost."""
    lines = []
    interrupted = [fault for fault in summary["faults"] if fault["kind"] == "interrupted"]
    if interrupted:
        again = sum(fault["steps"] for fault in interrupted)
        often = "once" if len(interrupted) == 1 else f"{len(interrupted)} times"
        lines.append(f"resumed {often}; {again} finished steps were done again")
    if summary["faults"]:
        tokens = summary["tokens"]["lost"]
        number = "1 fault" if len(summary["faults"]) == 1 else f"{len(summary['faults'])} faults"
        lost = f"{number}: {seconds(summary['lost_s'])} and {tokens:,} response tokens lost"
        lines.append(f"{lost}; {percent(summary['goodput'])} of the time made progress")
    if summary["young_daly_s"] is not None:
        held = f"checkpoints held the run up for {seconds(summary['checkpoint_s'])}"
        every = f"failures come every {seconds(summary['mtbf_s'])}: save every {seconds(summary['young_daly_s'])}"
        lines.append(f"{held}, {every} (Young, Daly)")
    return lines


def comparison_table(comparison: dict[str, Any]) -> Table:
    """Predicted against measured, per stage and for the step."""
    table = Table(
        "",
        "predicted",
        "measured",
        "error",
        "noise",
        title=f"{comparison['scenario']}: predicted and measured",
        title_justify="left",
    )
    for name, row in [*comparison["stages"].items(), ("step", comparison["step"])]:
        table.add_row(
            name,
            seconds(row["predicted"]),
            seconds(row["measured"]),
            percent(row["error"], sign=True),
            percent(row["noise"]),
        )
    return table


def unfinished(path: Path, status: str, error: str) -> None:
    """Says how a run ended that did not come to its last step."""
    if status == "cancelled":
        note(f"the run was cancelled\n  what it finished is in {path}")
    else:
        failed(path, error or status)


def failed(path: Path, error: str) -> None:
    note(f"the run failed: {error}\n  what it finished is in {path}")
