"""What a fresh process takes from the cores until it can work: all that it has spent when it is ready."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray

from lab.measurement import Measurement


def launches(actors: Mapping[str, Any]) -> list[Measurement]:
    """By op, workers that have just become ready; a launch alone takes as long, give or take a tenth: imports and building
    use one thread."""
    spent = ray.get([actor.__ray_call__.remote(_spent_s) for actor in actors.values()])
    return [
        Measurement(op=op, quantities={"calls": 1.0}, seconds=seconds, source="sweep")
        for op, seconds in zip(actors, spent, strict=True)
    ]


def _spent_s(_: Any) -> float:
    return time.process_time()
