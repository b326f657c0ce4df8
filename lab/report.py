"""Self-contained HTML pages: of one run, and of a prediction beside its measurement."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from lab import charts, devices, operators, reward_report
from lab.compare import Comparison, Row, caveats
from lab.metrics import about_samples, publications, summarise
from lab.timeline import Timeline

TOP = 8
"""operators of a trace that a page shows"""


def write_run_report(timeline: Timeline, summary: Mapping[str, Any], path: Path) -> None:
    """The page of one run, and of the reward model that it trained, if any."""
    label = {timeline.header.origin: timeline}
    figures = charts.titles(
        [
            ("Gantt chart", charts.gantt(timeline)),
            ("Where the device-seconds went", charts.accounts({timeline.header.origin: summary["pools"]})),
            ("Step time", charts.steps(label)),
            ("Reward", charts.rewards(label)),
            ("Learning", charts.learning(label)),
            ("Devices and processes", charts.devices(devices.read(path.parent))),
        ]
    )
    traces = {name: operators.of_trace(file)[:TOP] for name, file in operators.latest(path.parent).items()}
    judged = summary.get("reward_report")
    rows = reward_report.lines(judged) if judged else []
    content = {"judged": judged, "judged_rows": rows, "traces": traces, "samples": about_samples(dict(summary))}
    _write(path, "run.html.j2", figures, timeline=timeline, summary=summary, **content)


def write_comparison_report(
    comparison: Comparison, predicted: Timeline, measured: Sequence[Timeline], path: Path
) -> None:
    """The page of a comparison; the Gantt chart shows the last repeat."""
    both = {"predicted": predicted, "measured": measured[-1]}
    shares = {
        side: {pool: {name: row[side] for name, row in rows.items()} for pool, rows in comparison.pools.items()}
        for side in both
    }
    runs = (
        {f"measured {number + 1}": run for number, run in enumerate(measured)}
        if len(measured) > 1
        else {"measured": measured[0]}
    )
    figures = charts.titles(
        [
            ("Both Gantt charts on one time axis", charts.gantts(both)),
            ("One step in the middle, from its start", charts.one_step(both, middle(both.values()))),
            ("Where the device-seconds went", charts.accounts(shares)),
            ("Step time", charts.steps({"predicted": predicted} | runs)),
            ("Reward", charts.rewards(runs)),
            ("Learning", charts.learning(runs)),
        ]
    )
    rows = [*comparison.stages.items(), ("step", comparison.step)]
    table = [(name, row, verdict(row)) for name, row in rows]
    doubts = caveats(comparison, predicted, measured)
    content = {"comparison": comparison, "caveats": doubts, "table": table, "runs": [predicted, *measured]}
    content["whole"] = whole(summarise(predicted), [summarise(run) for run in measured])
    _write(path, "comparison.html.j2", figures, **content)


def whole(predicted: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """What is said of runs as a whole: the name, predicted, and the mean of the measured; only what one of them has."""
    ages, losses, told = "versions between weights and samples, ", "lost to faults, ", [predicted, *measured]
    rows: list[tuple[str, Callable[[Mapping[str, Any]], float | None], Callable[[float | None], str]]] = [
        ("the whole run", lambda run: run["makespan_s"], _seconds),
        (f"{ages}mean", lambda run: run["lag"]["mean"], _number),
        (f"{ages}most", lambda run: run["lag"]["max"], _number),
        ("faults", lambda run: len(run["faults"]), _number),
        (f"{losses}time", lambda run: run["lost_s"], _seconds),
        (f"{losses}response tokens", lambda run: run["tokens"]["lost"], _number),
        ("share of the time that made progress", lambda run: run["goodput"], _percent),
    ]
    if not any(run["faults"] for run in told):
        rows = rows[:3]
    if not any(run["lag"]["max"] for run in told):
        rows = [row for row in rows if not row[0].startswith(ages)]
    return [(name, shown(of(predicted)), shown(_mean([of(run) for run in measured]))) for name, of, shown in rows]


def _mean(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return fmean(known) if known else None


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def middle(timelines: Iterable[Timeline]) -> int:
    """The step in the middle of those that all of the timelines finished."""
    return min(len(publications(timeline)) for timeline in timelines) // 2


def verdict(row: Row) -> str:
    """Whether a row's error is told from its noise."""
    if row.error is None:
        return "only in one of the two"
    if row.noise is None:
        return "noise unknown"
    return "within the noise" if abs(row.error) <= row.noise else "outside the noise"


def _write(path: Path, template: str, figures: list[tuple[str, charts.Figure]], **content: Any) -> None:
    from lab.runs import write_atomically

    drawn = [(title, json.dumps(figure).replace("</", "<\\/")) for title, figure in figures]
    page = _templates().get_template(template).render(figures=drawn, plotly=_plotly(), **content)
    write_atomically(path, page.encode())


@cache
def _templates() -> Any:
    import jinja2

    found = jinja2.Environment(loader=jinja2.PackageLoader("lab"), autoescape=True, undefined=jinja2.StrictUndefined)
    found.filters |= {"seconds": _seconds, "percent": _percent, "signed": _signed, "gigabytes": _gigabytes}
    return found


@cache
def _plotly() -> str:
    """The drawing library's own script, so that the page needs no network."""
    from importlib import resources

    return resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1e3:.1f} ms" if abs(value) < 1 else f"{value:.2f} s"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1%}"


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.2f} GB"
