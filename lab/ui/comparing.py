"""Choose two runs, see them side by side and what explains the difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

from lab import charts, runs
from lab.cli.show import percent, seconds
from lab.compare import Comparison, caveats, compare
from lab.metrics import summarise
from lab.report import middle, verdict, whole
from lab.ui import parts


def page() -> None:
    st.title("Compare two runs")
    found = runs.list_runs(parts.RUNS)
    if len(found) < 2:
        st.info("There are no two runs in the folder `runs` yet. `lab run scenarios/quickstart.yaml` makes them.")
        st.stop()
    first, second = _start([folder.name for folder in found])
    left, right = st.columns(2)
    predicted = left.selectbox("Predicted", found, index=first, format_func=_name)
    measured = right.selectbox("Measured", found, index=second, format_func=_name)
    with parts.told():
        ours, theirs = runs.read(predicted), runs.read(measured)
        comparison = compare(ours, [theirs])
    _verdict(comparison)
    for caveat in caveats(comparison, ours, [theirs]):
        st.warning(caveat)
    both = {"predicted": ours, "measured": theirs}
    parts.figure(charts.gantts(both), "gantts")
    st.subheader("One step in the middle, from its start")
    parts.figure(charts.one_step(both, middle(both.values())), "one-step")
    st.subheader("Stages and step")
    rows = [*comparison.stages.items(), ("step", comparison.step)]
    st.dataframe([_row(name, row) for name, row in rows], width="stretch", hide_index=True)
    st.subheader("The run as a whole")
    told = whole(summarise(ours), [summarise(theirs)])
    st.dataframe(
        [{"": name, "predicted": one, "measured": other} for name, one, other in told], width="stretch", hide_index=True
    )
    st.subheader("What explains the difference")
    st.markdown("\n".join(f"1. {reason.text}" for reason in comparison.explains[:5]))
    st.subheader("Where the device-seconds went")
    shares = {
        side: {pool: {name: row[side] for name, row in accounts.items()} for pool, accounts in comparison.pools.items()}
        for side in ("predicted", "measured")
    }
    parts.figure(charts.accounts(shares), "accounts")


def _start(names: list[str]) -> tuple[int, int]:
    """Which two are shown first: the newest measured run, and the newest prediction of its scenario."""
    second = next((i for i, name in enumerate(names) if "-measured-" in name), len(names) - 1)
    scenario = names[second].rsplit("-measured-", 1)[0]
    wanted = (i for i, name in enumerate(names) if name.startswith(f"{scenario}-simulated-"))
    return next(wanted, 0), second


def _name(folder: Path) -> str:
    return folder.name


def _verdict(comparison: Comparison) -> None:
    step = comparison.step
    shown = {
        "predicted step": seconds(step.predicted),
        "measured step": seconds(step.measured),
        "error": percent(step.error, sign=True),
        f"noise ({step.noise_kind})": percent(step.noise),
    }
    for column, (name, value) in zip(st.columns(len(shown)), shown.items(), strict=True):
        column.metric(name, value)


def _row(name: str, row: Any) -> dict[str, str]:
    return {
        "": name,
        "predicted": seconds(row.predicted),
        "measured": seconds(row.measured),
        "error": percent(row.error, sign=True),
        "noise": percent(row.noise),
        "verdict": verdict(row),
    }
