"""How tokens are drawn."""

from __future__ import annotations

from pydantic import Field

from lab.algorithm import LEARNING
from lab.records import Record


class Sampling(Record):
    """How tokens are drawn."""

    temperature: float = Field(default=1.0, gt=0, description="divides the logits", json_schema_extra=LEARNING)
