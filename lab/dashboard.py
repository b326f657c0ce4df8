"""The Grafana dashboard of a run, made from the list of metrics. Schema: Grafana's dashboard JSON model, version 39."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lab.watched import now, per_second

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 7
"""of a panel; a dashboard is 24 wide"""
LINES: dict[str, Any] = {
    "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
    "tooltip": {"mode": "multi", "sort": "none"},
}
HEATMAP: dict[str, Any] = {
    "calculate": False, "cellGap": 1, "showValue": "never", "legend": {"show": False}, "rowsFrame": {"layout": "auto"},
    "filterValues": {"le": 1e-9}, "tooltip": {"mode": "single", "showColorScale": False, "yHistogram": False},
    "color": {
        "mode": "scheme", "scheme": "Oranges", "scale": "exponential", "exponent": 0.5, "fill": "dark-orange",
        "reverse": False, "steps": 64,
    },
}  # fmt: skip
"""options of a chart of buckets that are counted already"""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A chart."""

    title: str
    queries: tuple[tuple[str, str], ...]
    """(PromQL, legend)"""
    unit: str = "short"
    """Grafana's id of it"""
    kind: str = "timeseries"


def _one(title: str, name: str, unit: str = "short", legend: str = "") -> Panel:
    return Panel(title=title, queries=((now(name), legend or "{{experiment_id}}"),), unit=unit)


def _spread(title: str, name: str, unit: str = "short") -> Panel:
    """A heat map of the latest step's distribution over time."""
    query = f"sum by (le) ({now(name)})"
    return Panel(title=title, queries=((query, "{{le}}"),), unit=unit, kind="heatmap")


ROWS: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel(
            title="Reward",
            queries=((now("reward"), "training"), (now("evaluation_reward"), "evaluation")),
        ),
        _one("KL to the reference", "kl"),
        _one("Entropy", "entropy"),
        _one("Loss", "loss"),
        _one("Critic loss", "critic_loss"),
        _one("Gradient norm", "gradient_norm"),
    ),
    "Distributions of a step": (
        _spread("Rewards", "reward_distribution"),
        _spread("Advantages", "advantage_distribution"),
        _spread("KL of samples", "kl_distribution"),
        _spread("Response length", "response_tokens"),
        Panel(
            title="Response length, mean and quantiles",
            queries=(
                (now("response_length_tokens"), "mean"),
                (f"histogram_quantile(0.5, sum by (le) ({now('response_tokens')}))", "median"),
                (f"histogram_quantile(0.95, sum by (le) ({now('response_tokens')}))", "95 %"),
            ),
        ),
        Panel(title="Distinct n-grams", queries=((now("distinct_ratio"), "distinct-{{n}}"),), unit="percentunit"),
    ),
    "Throughput": (
        Panel(
            title="Response tokens",
            queries=(
                (now("generated_tokens_per_second"), "latest rollout"),
                (per_second("generated_tokens_total"), "over a minute"),
            ),
        ),
        Panel(title="Buffer: rates", queries=((per_second("samples_total"), "{{fate}}"),)),
        _one("Buffer: depth", "buffer_samples", legend="samples"),
        Panel(title="Lag", queries=((now("lag_versions"), "{{of}}"),)),
        Panel(
            title="Step and stages",
            queries=((now("step_seconds"), "step"), (now("stage_seconds"), "{{stage}}")),
            unit="s",
        ),
        Panel(
            title="Engine requests",
            queries=(
                (now("engine_running_requests"), "{{worker}} running"),
                (now("engine_waiting_requests"), "{{worker}} waiting"),
            ),
        ),
    ),
    "Machines": (
        Panel(title="Device use", queries=((now("device_use_ratio"), "{{device}}"),), unit="percentunit"),
        Panel(title="Device memory", queries=((now("device_memory_bytes"), "{{device}}"),), unit="bytes"),
        Panel(
            title="Network",
            queries=((per_second("network_bytes_total"), "{{interface}} {{direction}}"),),
            unit="Bps",
        ),
        Panel(title="Cores of each process", queries=((now("worker_cpu_cores"), "{{worker}}"),)),
        Panel(title="Memory of each process", queries=((now("worker_memory_bytes"), "{{worker}}"),), unit="bytes"),
        Panel(title="KV blocks in use", queries=((now("engine_kv_use_ratio"), "{{worker}}"),), unit="percentunit"),
    ),
}


def queries() -> list[str]:
    """All queries of the dashboard; `$experiment` is its variable."""
    return [query for panels in ROWS.values() for panel in panels for query, _ in panel.queries]


def dashboard() -> dict[str, Any]:
    """What Grafana imports; it asks for the Prometheus to read."""
    return {
        "title": "The lab: a run", "uid": "rlhf-lab-run", "schemaVersion": 39, "version": 1, "editable": True,
        "tags": ["rlhf"], "time": {"from": "now-30m", "to": "now"}, "refresh": "5s", "graphTooltip": 1,
        "templating": {"list": [_datasource(), _experiment()]}, "annotations": {"list": []},
        "panels": _laid_out(),
    }  # fmt: skip


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _experiment() -> dict[str, Any]:
    query = {"query": "label_values(lab_steps_total, experiment_id)", "refId": "experiments"}
    return {
        "name": "experiment", "label": "Run", "type": "query", "datasource": DATASOURCE, "query": query, "refresh": 2,
        "multi": True, "includeAll": True, "allValue": ".*", "sort": 2,
    }  # fmt: skip


def _laid_out() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS.items():
        found.append({
            "id": len(found) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
        })  # fmt: skip
        y += 1
        for i, panel in enumerate(panels):
            place = {"x": i % 3 * WIDTH, "y": y + i // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT}
            found.append(_drawn(panel, len(found) + 1, place))
        y += -(-len(panels) // 3) * HEIGHT
    return found


def _drawn(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    heat = panel.kind == "heatmap"
    targets = [
        {
            "refId": chr(ord("A") + i), "expr": query, "legendFormat": legend, "datasource": DATASOURCE,
            "format": "heatmap" if heat else "time_series", "range": True,
        }
        for i, (query, legend) in enumerate(panel.queries)
    ]  # fmt: skip
    options = HEATMAP | {"yAxis": {"axisPlacement": "left", "reverse": False, "unit": panel.unit}} if heat else LINES
    return {
        "id": number, "type": panel.kind, "title": panel.title, "datasource": DATASOURCE, "gridPos": place,
        "targets": targets, "options": options, "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
    }  # fmt: skip
