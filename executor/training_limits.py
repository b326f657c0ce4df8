"""What trainers on this machine cannot honour, refused by name before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from executor.origin import origin
from lab.scenario import Scenario

KNOWN = ("llama", "qwen2")
"""kinds of networks whose matrices get adapters, and whose attention takes samples laid end to end"""


def limits(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """Networks of a folder that are trained in a way that is built for others only: key, problem and remedy."""
    for role in scenario.trained:
        kind = _kind(origin(scenario, role).weights)
        if kind in KNOWN:
            continue
        if scenario.model(role).lora is not None:
            problem = f"adapters are put into {' and '.join(KNOWN)} networks, this folder's is {kind}"
            yield f"models.{role}.lora", problem, "remove it to train all weights"
        if scenario.update.pack != "padded":
            problem = f"samples are laid end to end for {' and '.join(KNOWN)} networks, the {role}'s is {kind}"
            yield "update.pack", problem, "set it to padded"


def _kind(weights: str) -> str:
    """Of the network in a folder; those drawn from a seed are known ones."""
    if weights == "random":
        return KNOWN[0]
    try:
        return str(json.loads((Path(weights) / "config.json").read_text()).get("model_type"))
    except (OSError, ValueError):  # told with the folder's own problems
        return KNOWN[0]
