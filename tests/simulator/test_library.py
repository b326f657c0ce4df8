"""Every scenario that is shipped plays: its timeline conforms to its dataflow, no sample is lost count of."""

from itertools import takewhile
from pathlib import Path

import pytest

from lab.dataflow import conforms
from lab.load import load
from lab.metrics import summarise
from lab.wiring import build
from profiles.profile import datasheet
from simulator.run import simulate

FILES = sorted(Path("scenarios").glob("*.yaml"))
FATES = ("trained", "dropped", "aborted", "lost", "buffered", "in_flight")
MOST_STEPS = 6
WHOLE = {"faults-tiny"}
"""played to the end: its last fault comes late"""


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_it_plays_conforms_and_conserves(file: Path) -> None:
    scenario = load(file)
    if file.stem not in WHOLE:
        scenario = scenario.replace({"num_steps": min(scenario.num_steps, MOST_STEPS)})
    used = {scenario.hardware.node_of(device).device for devices in scenario.devices.values() for device in devices}
    timeline = simulate(scenario, {kind: datasheet(kind) for kind in used})
    assert conforms(build(scenario), timeline) == []
    samples = timeline.header.samples
    assert samples["issued"] == sum(samples[fate] for fate in FATES)
    summary = summarise(timeline)
    assert summary["steps_done"] == scenario.num_steps
    assert all(sum(account.values()) == pytest.approx(1) for account in summary["pools"].values())


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_it_says_what_it_shows(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    head = list(takewhile(lambda line: line.startswith("#"), lines))
    assert len(" ".join(line for line in head if "$schema" not in line)) > 40
    assert load(file).name == file.stem


@pytest.mark.parametrize("name", ["naive-coupled-8gpu", "reference-on-cpu"])
def test_what_should_not_fit_does_not(name: str) -> None:
    from profiles.memory import peaks

    assert not all(pool["fits"] for pool in peaks(load(Path("scenarios") / f"{name}.yaml")).values())
