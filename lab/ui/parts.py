"""Parts that several pages show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import streamlit as st

from lab.cli.show import percent, seconds
from lab.errors import InputError

RUNS = Path("runs")
SCENARIOS = Path("scenarios")


@contextmanager
def told() -> Iterator[None]:
    """A user's mistake becomes one message on the page."""
    try:
        yield
    except InputError as error:
        st.error(str(error).replace("\n", "  \n"))
        st.stop()


def figure(drawn: Mapping[str, Any], key: str) -> None:
    st.plotly_chart(drawn, width="stretch", key=key, theme=None)


def stages(summary: Mapping[str, Any]) -> None:
    """A table of the stages of one run."""
    rows = [
        {"stage": stage, "busy per step": seconds(row["busy_s_per_step"]), "share of the step": percent(row["share"])}
        for stage, row in summary["stages"].items()
    ]
    st.dataframe(rows, width="stretch", hide_index=True)


def headline(summary: Mapping[str, Any]) -> None:
    """The numbers that a person looks for first."""
    cost = "–" if summary["cost"] is None else f"${summary['cost']:.2f}"
    rate = summary["response_tokens_per_s"]  # none where nothing is generated
    shown = {
        "step": seconds(summary["step_s"]["mean"]),
        "whole run": seconds(summary["makespan_s"]),
        "response tokens/s": "–" if rate is None else f"{rate:.4g}",
        "device-hours": f"{summary['device_hours']:.3g}",
        "cost": cost,
    }
    for column, (name, value) in zip(st.columns(len(shown)), shown.items(), strict=True):
        column.metric(name, value)
    if summary["bottleneck"]:
        st.info(f"Bottleneck: {summary['bottleneck']['why']}.")
    for pool, row in summary["memory"].items():
        if not row["fits"]:
            needed, there = row["peak_bytes"] / 1e9, row["capacity_bytes"] / 1e9
            st.warning(f"Pool {pool} does not fit: a device needs {needed:.1f} GB and has {there:.1f} GB.")
    for device, profile in summary["profiles"].items():
        share = percent(profile["extrapolated_share"])
        st.caption(f"Costs of {device}: profile {profile['name']}, {share} of the time extrapolated.")
