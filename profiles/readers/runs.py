"""Measured runs of the lab as Measurements: what their ops and stages took."""

from __future__ import annotations

from pathlib import Path

from lab import runs
from lab.errors import InputError
from lab.measurement import Measurement, of_spans


def read(folder: Path) -> list[Measurement]:
    """Every op of a run that says what it did. Raises InputError for a folder that holds no measured run."""
    timeline, scenario = runs.read(folder), runs.read_scenario(folder)
    if timeline.header.origin != "measured":
        problem = f"the run is {timeline.header.origin}, and a profile is fitted to measurements only"
        raise InputError(file=str(folder), key="origin", problem=problem, remedy="name a run of `lab execute`")
    device = scenario.hardware.node_of(next(iter(scenario.devices.values()))[0]).device
    model = str(scenario.model("actor").arch)
    found = of_spans(timeline.spans, model=model, device=device, source=timeline.header.scenario)
    if not found:
        problem = "no span of the run says what it did (`quantities`)"
        raise InputError(file=str(folder), key="spans", problem=problem, remedy="name a run that finished a step")
    return found
