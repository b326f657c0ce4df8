"""Figures, as the plain dictionaries that plotly draws."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lab.metrics import publications, step_times
from lab.timeline import Span, Timeline

Figure = dict[str, Any]

COLOURS = {
    # Okabe & Ito's palette, distinguishable with any colour vision, and three neutral tones
    "rollout": "#0072B2",
    "reward": "#E69F00",
    "reference": "#56B4E9",
    "value": "#F0E442",
    "advantage": "#8C8C8C",
    "update_actor": "#D55E00",
    "update_critic": "#CC79A7",
    "weight_sync": "#009E73",
    "communication": "#009E73",
    "checkpoint": "#4D4D4D",
    "dispatch": "#6A3D9A",
    "transfer": "#8B5A2B",
    "restore": "#A34A6B",
    "fault": "#A34A6B",
    "idle": "#F2F2F2",
}
_OTHER = "#B0A8B9"
_LINES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
_FONT = {"family": "system-ui, sans-serif", "size": 13, "color": "#222"}
MAX_GANTT_SPANS = 4000
"""a Gantt chart shows the first steps only where there are more stage spans"""


def colour(account: str) -> str:
    """Of a stage, or of an account; waiting for a stage is a pale tone of the stage's colour."""
    if account.startswith("waiting:"):
        base = COLOURS.get(account.removeprefix("waiting:"), _OTHER)
        mixed = [int(int(base[i : i + 2], 16) * 0.25 + 255 * 0.75) for i in (1, 3, 5)]
        return "#" + "".join(f"{part:02X}" for part in mixed)
    return COLOURS.get(account, _OTHER)


def gantt(timeline: Timeline) -> Figure:
    """Lanes are workers; setup is left out."""
    return gantts({timeline.header.origin: timeline})


def gantts(timelines: Mapping[str, Timeline], *, since: str = "seconds since the first step could start") -> Figure:
    """Gantt charts below each other on one time axis."""
    number, gap = len(timelines), 0.12
    share = (1 - gap * (number - 1)) / number
    traces: list[Figure] = []
    layout: Figure = _layout(xaxis={"title": {"text": since}, "zeroline": False})
    annotations, lanes = [], 0
    for position, (label, timeline) in enumerate(timelines.items()):
        axis = "" if position == 0 else str(position + 1)
        top = 1 - position * (share + gap)
        names = list(timeline.header.lanes) or sorted({span.worker for span in timeline.stages()})
        lanes += len(names)
        layout[f"yaxis{axis}"] = {
            "domain": [max(top - share, 0), top], "categoryorder": "array", "categoryarray": names[::-1], "automargin": True
        }  # fmt: skip
        annotations.append(_title(label, top))
        traces += _bars(timeline, f"y{axis}", {trace["name"] for trace in traces})
        traces += _faults(timeline, f"y{axis}", names, "fault" not in {trace["name"] for trace in traces})
    height = 170 + 34 * lanes + 40 * number
    layout |= {"annotations": annotations, "barmode": "overlay", "height": height}
    layout["legend"] |= {"y": 1 + 30 / (height - 110), "x": 0, "xanchor": "left"}  # above the first title
    layout["xaxis"]["anchor"] = "y" if number == 1 else f"y{number}"
    return {"data": traces, "layout": layout}


def one_step(timelines: Mapping[str, Timeline], step: int) -> Figure:
    """The Gantt charts of one step, each from its own start: from the publication before it to its own."""
    parts = {label: _step(timeline, step) for label, timeline in timelines.items()}
    return gantts(parts, since=f"seconds since step {step} began")


def _step(timeline: Timeline, step: int) -> Timeline:
    """What lies in a step, cut at its ends, in seconds since it began. Empty for a step that did not end."""
    ends = [0.0, *publications(timeline)]
    start, end = ends[step : step + 2] if step + 1 < len(ends) else (0.0, 0.0)
    inside = [span for span in timeline.stages() if span.end_s > start and span.start_s < end]
    cut = [
        msgspec.structs.replace(span, start_s=max(span.start_s, start) - start, end_s=min(span.end_s, end) - start)
        for span in inside
    ]
    faults = [
        fault | {"at_s": fault["at_s"] - start}
        for fault in timeline.header.faults
        if start <= fault.get("at_s", end) < end
    ]
    return Timeline.of(msgspec.structs.replace(timeline.header, faults=faults), cut)


def _title(text: str, y: float) -> Figure:
    return {
        "text": f"<b>{_plain(text)}</b>", "x": 0, "xref": "paper", "xanchor": "left", "y": y, "yref": "paper",
        "yanchor": "bottom", "showarrow": False, "font": {"size": 14},
    }  # fmt: skip


def _bars(timeline: Timeline, axis: str, shown: set[str]) -> list[Figure]:
    """One trace per stage."""
    by_stage: dict[str, list[Span]] = defaultdict(list)
    for span in [*timeline.stages(), *timeline.lost()][:MAX_GANTT_SPANS]:
        by_stage[span.stage].append(span)
    return [
        {
            "type": "bar", "orientation": "h", "name": stage, "legendgroup": stage, "showlegend": stage not in shown,
            "marker": {"color": colour(stage), "line": {"width": 0.8, "color": colour(stage)}},
            "yaxis": axis, "xaxis": "x", "width": 0.7,
            "y": [span.worker for span in spans], "base": [round(span.start_s, 6) for span in spans],
            "x": [round(span.seconds, 6) for span in spans], "text": [_hover(span) for span in spans],
            "hovertemplate": "%{text}<extra></extra>", "textposition": "none",
        }
        for stage, spans in by_stage.items()
    ]  # fmt: skip


def _faults(timeline: Timeline, axis: str, lanes: Sequence[str], first: bool) -> list[Figure]:
    """A cross on the lane of whom a fault struck, at its moment; on the first lane where that has none of its own."""
    found = [fault for fault in timeline.header.faults if "at_s" in fault]
    if not found or not lanes:
        return []
    return [
        {
            "type": "scatter", "mode": "markers", "name": "fault", "legendgroup": "fault", "showlegend": first,
            "marker": {"symbol": "x", "size": 9, "color": "#222", "line": {"width": 1, "color": "white"}},
            "yaxis": axis, "xaxis": "x", "hovertemplate": "%{text}<extra></extra>",
            "x": [round(float(fault["at_s"]), 6) for fault in found],
            "y": [fault["target"] if fault.get("target") in lanes else lanes[0] for fault in found],
            "text": [_plain(f"{fault['kind']}: {fault.get('target', '')} at {fault['at_s']:.4g} s") for fault in found],
        }
    ]  # fmt: skip


def _hover(span: Span) -> str:
    lines = [f"<b>{_plain(span.stage)}</b> step {span.step}", f"{_plain(span.worker)} in pool {_plain(span.pool)}"]
    lines.append(f"{span.seconds:.4g} s, from {span.start_s:.4g} s")
    lines.append(f"policy version {span.policy_version}" + (f", {span.tokens} tokens" if span.tokens else ""))
    if span.lost:
        lines.append("lost to a fault")
    return "<br>".join(lines)


def accounts(pools: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Figure:
    """Stacked shares of device-seconds; `pools`: by bar label, then pool, then account."""
    bars = [(label, pool, parts) for label, found in pools.items() for pool, parts in found.items()]
    names = list(dict.fromkeys(account for *_, parts in bars for account in parts))
    names.sort(key=lambda name: (name == "idle", name.startswith("waiting:"), name))
    labels = [f"{_plain(pool)} · {_plain(label)}" if len(pools) > 1 else _plain(pool) for label, pool, _ in bars]
    traces = [
        {
            "type": "bar", "orientation": "h", "name": name, "y": labels, "x": [parts.get(name, 0.0) for *_, parts in bars],
            "marker": {"color": colour(name)}, "hovertemplate": f"{_plain(name)}: %{{x:.1%}}<extra>%{{y}}</extra>",
        }
        for name in names
    ]  # fmt: skip
    layout = _layout(xaxis={"tickformat": ".0%", "range": [0, 1], "title": {"text": "share of device-seconds"}})
    axis = {"categoryorder": "array", "categoryarray": labels[::-1], "automargin": True}
    return {"data": traces, "layout": layout | {"barmode": "stack", "yaxis": axis, "height": 170 + 34 * len(bars)}}


def steps(timelines: Mapping[str, Timeline]) -> Figure:
    """Step time over the steps."""
    traces = [
        {
            "type": "scatter", "mode": "lines+markers", "name": label, "x": list(range(len(step_times(timeline)))),
            "y": step_times(timeline), "hovertemplate": "step %{x}: %{y:.4g} s<extra></extra>",
        }
        for label, timeline in timelines.items()
    ]  # fmt: skip
    layout = _layout(xaxis={"title": {"text": "step"}}, yaxis={"title": {"text": "seconds"}, "rangemode": "tozero"})
    return {"data": traces, "layout": layout | {"height": 320}}


def rewards(timelines: Mapping[str, Timeline]) -> Figure | None:
    """Mean reward over the steps of the measured runs; None where none recorded it."""
    traces: list[Figure] = []
    for label, timeline in timelines.items():
        rows = [row for row in timeline.header.learning[: len(publications(timeline))] if "reward" in row]
        if rows:
            points = {"x": [row["step"] for row in rows], "y": [row["reward"] for row in rows]}
            traces.append({"type": "scatter", "mode": "lines+markers", "name": label} | points)
    layout = _layout(xaxis={"title": {"text": "step"}}, yaxis={"title": {"text": "mean reward"}})
    return {"data": traces, "layout": layout | {"height": 300}} if traces else None


LEARNED = (
    "lag_mean", "lag_max", "loss", "value_loss", "kl", "clip_fraction", "effective_sample_size", "grad_norm", "margin", "accuracy",
    "sampled_entropy", "distinct_2", "temperature", "evaluation_reward", "evaluation_win_rate", "evaluation_loss",
    "evaluation_margin", "evaluation_accuracy",
)  # fmt: skip
"""numbers of a learning row that have a small chart of their own, in order"""
_PER_ROW = 3


def learning(timelines: Mapping[str, Timeline]) -> Figure | None:
    """What else was learned, a small chart for each number that changes; None where nothing was recorded."""
    rows = {label: _rounded(timeline) for label, timeline in timelines.items()}
    named = [
        name for name in LEARNED if len({row[name] for found in rows.values() for row in found if name in row}) > 1
    ]
    if not named:
        return None
    traces = [
        {
            "type": "scatter", "mode": "lines+markers", "name": label, "legendgroup": label, "showlegend": number == 0,
            "xaxis": f"x{number + 1}", "yaxis": f"y{number + 1}", "line": {"color": line}, "marker": {"size": 4},
            "x": [row["step"] for row in found if name in row], "y": [row[name] for row in found if name in row],
        }
        for number, name in enumerate(named)
        for line, (label, found) in zip(itertools.cycle(_LINES), rows.items(), strict=False)
    ]  # fmt: skip
    high = -(-len(named) // _PER_ROW)
    grid = {"rows": high, "columns": _PER_ROW, "pattern": "independent", "ygap": 0.45, "xgap": 0.15}
    layout = _layout(**{f"{axis}axis{i + 1}": {} for i in range(len(named)) for axis in "xy"})
    heads = [
        {
            "text": name.replace("_", " "), "xref": f"x{i + 1} domain", "yref": f"y{i + 1} domain", "x": 0, "y": 1.0,
            "yanchor": "bottom", "xanchor": "left", "showarrow": False,
        }
        for i, name in enumerate(named)
    ]  # fmt: skip
    shown = {"grid": grid, "annotations": heads, "height": 90 + 190 * high, "showlegend": len(rows) > 1}
    return {"data": traces, "layout": layout | shown}


def devices(readings: Any) -> Figure | None:
    """Use of each device, cores and memory of each process over time; None where nothing was read (`lab.devices.read`)."""
    if readings is None or not readings.num_rows:
        return None
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in readings.to_pylist():
        rows[row["kind"], row["name"]].append(row)
    named = {kind: sorted(name for k, name in rows if k == kind) for kind in ("device", "worker")}
    colours = {kind: dict(zip(names, itertools.cycle(_SERIES), strict=False)) for kind, names in named.items()}
    traces = [
        _readings(rows[kind, name], column, scale, number)
        | {"name": _plain(name), "line": {"color": line, "width": 1.5}}
        for number, (_, kind, column, scale) in enumerate(_READ, start=1)
        for name, line in colours[kind].items()
    ]
    heads, axes = [], Figure()
    for number, (title, *_) in enumerate(_READ, start=1):
        top, axis = 1.0 - (number - 1) * 0.36, "" if number == 1 else str(number)
        heads.append(_title(title, top + 0.01))
        axes[f"yaxis{axis}"] = {"rangemode": "tozero", "domain": [top - 0.26, top], "anchor": f"x{axis}"}
        axes[f"xaxis{axis}"] = {"anchor": f"y{axis}"} | ({"matches": "x3"} if number < len(_READ) else {})
    axes["xaxis3"]["title"] = {"text": "seconds since the first step could start; before that workers start"}
    layout = _layout(**axes) | {"annotations": heads, "height": 780}
    layout["legend"] |= {"y": 1.05, "x": 0, "xanchor": "left"}  # above the first title
    return {"data": traces, "layout": layout}


_READ = (
    ("use of each device", "device", "use", 1.0),
    ("cores that each process keeps busy", "worker", "use", 1.0),
    ("resident memory of each process, GB", "worker", "memory_bytes", 1e-9),
)
"""charts of what was read: title, kind of reading, column, and what it is multiplied by"""
_SERIES = [*_LINES, "#8C8C8C", "#6A3D9A", "#8B5A2B", "#222222", "#B8A800", "#7FBF7B"]
_PAUSES = 4
"""readings that are missing in a row where a process was away: no line is drawn over them"""


def _readings(found: list[dict[str, Any]], column: str, scale: float, number: int) -> Figure:
    """The line of one device or process; it is broken where nothing was read."""
    gaps = sorted(later["at_s"] - row["at_s"] for row, later in itertools.pairwise(found))
    longest = _PAUSES * gaps[len(gaps) // 2] if gaps else 0.0
    x, y = list[float](), list[float | None]()
    for row, later in zip(found, [*found[1:], None], strict=True):
        x.append(round(row["at_s"], 3))
        y.append(round(row[column] * scale, 4))
        if later is not None and later["at_s"] - row["at_s"] > longest:
            x.append(x[-1])
            y.append(None)
    return {
        "type": "scatter", "mode": "lines", "legendgroup": f"{found[0]['kind']} {found[0]['name']}", "x": x, "y": y,
        "showlegend": column == "use", "xaxis": f"x{number}", "yaxis": f"y{number}",
    }  # fmt: skip


def _rounded(timeline: Timeline) -> list[dict[str, float]]:
    """The numbers of the finished steps' learning rows that have a chart, to six digits: noise below is no change."""
    rows = timeline.header.learning[: len(publications(timeline))]
    return [
        {name: float(f"{row[name]:.6g}") for name in ("step", *LEARNED) if isinstance(row.get(name), int | float)}
        for row in rows
    ]


def _layout(**axes: Figure) -> Figure:
    return {
        "font": _FONT, "colorway": _LINES,
        "plot_bgcolor": "white", "paper_bgcolor": "white", "margin": {"l": 10, "r": 20, "t": 40, "b": 50},
        "legend": {"orientation": "h", "traceorder": "normal", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right"},
        "bargap": 0.3,
        "hoverlabel": {"align": "left"}, **{name: {"gridcolor": "#EEE", "automargin": True} | axis for name, axis in axes.items()},
    }  # fmt: skip


def _plain(text: str) -> str:
    """Text that plotly shows as it is: its labels take HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def titles(figures: Sequence[tuple[str, Figure | None]]) -> list[tuple[str, Figure]]:
    """The figures there are, with their titles."""
    return [(title, figure) for title, figure in figures if figure is not None]
