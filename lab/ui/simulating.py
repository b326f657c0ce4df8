"""Choose a scenario, change it, simulate it, see where its time goes."""

from __future__ import annotations

import streamlit as st

from lab import charts
from lab.cli.simulate import profiles_for
from lab.load import decode, parse
from lab.metrics import summarise
from lab.ui import parts


def page() -> None:
    st.title("Simulate a scenario")
    with parts.told():
        name, text = _choose()
    st.html("<style>textarea { font-family: monospace !important; }</style>")
    edited = st.text_area(
        "Scenario", text, height=320, key=f"text-{name}", help="Change it freely; the file stays as it is."
    )
    profile = st.selectbox("Costs from", ["best available", "datasheet"], help="A measured profile where there is one.")
    if not st.button("Simulate", type="primary"):
        st.stop()
    with parts.told(), st.spinner("Simulating"):
        from simulator.run import simulate

        scenario = parse(edited, file=name)
        timeline = simulate(scenario, profiles_for(scenario, "datasheet" if profile == "datasheet" else None))
    summary = summarise(timeline)
    st.subheader(f"{scenario.name}: predicted")
    parts.headline(summary)
    parts.figure(charts.gantt(timeline), "gantt")
    left, right = st.columns(2)
    with left:
        st.subheader("Stages")
        parts.stages(summary)
    with right:
        st.subheader("Step time")
        parts.figure(charts.steps({"predicted": timeline}), "steps")
    st.subheader("Where the device-seconds go")
    parts.figure(charts.accounts({"predicted": summary["pools"]}), "accounts")
    with st.expander("Summary as JSON"):
        st.json(summary)


def _choose() -> tuple[str, str]:
    """Name and text of a scenario of the folder, or of an uploaded file."""
    found = {path.name: path for path in sorted(parts.SCENARIOS.glob("*.yaml"))}
    names = list(found)
    start = names.index("quickstart.yaml") if "quickstart.yaml" in names else 0
    left, right = st.columns(2)
    chosen = left.selectbox("Scenario file", names, index=start)
    uploaded = right.file_uploader("or a file of your own", type=["yaml", "yml"])
    if uploaded is not None:
        return uploaded.name, decode(uploaded.getvalue(), file=uploaded.name)
    if chosen not in found:
        st.info("There is no scenario in the folder `scenarios`; upload one.")
        st.stop()
    return chosen, decode(found[chosen].read_bytes(), file=str(found[chosen]))
