"""The scenarios that README.md prints: each is a change to a file of the library, and plays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.load import load
from profiles.profile import datasheet
from simulator.run import simulate

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n# (scenarios/[\w-]+\.yaml)[^\n]*\n(.*?)```", README, re.S)
NAMES = [f"{number}-{Path(base).stem}" for number, (base, _) in enumerate(BLOCKS)]
MOST_STEPS = 3


def merged(old: Any, new: Any) -> Any:
    """The new values in the old mapping, key by key; anything else is replaced."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: merged(old.get(key), value) for key, value in new.items()}


def test_every_block_names_its_scenario() -> None:
    assert len(BLOCKS) == README.count("```yaml")


@pytest.mark.parametrize(("base", "change"), BLOCKS, ids=NAMES)
def test_it_plays(base: str, change: str, tmp_path: Path) -> None:
    data = merged(yaml.safe_load((ROOT / base).read_text(encoding="utf-8")), yaml.safe_load(change))
    if not data.get("faults"):
        data["num_steps"] = min(data["num_steps"], MOST_STEPS)
    file = tmp_path / "example.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    scenario = load(file)
    used = {scenario.hardware.node_of(device).device for devices in scenario.devices.values() for device in devices}
    assert simulate(scenario, {kind: datasheet(kind) for kind in used}).header.status == "done"
