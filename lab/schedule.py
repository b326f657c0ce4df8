"""What may overlap, and how old samples may be."""

from __future__ import annotations

from typing import Literal

from lab.records import Record


class Schedule(Record):
    """What may overlap. one_step_off: rollout of step k+1 runs beside training of step k, one version behind."""

    mode: Literal["synchronous", "one_step_off"] = "synchronous"
