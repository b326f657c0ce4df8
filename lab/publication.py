"""How new weights reach the engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lab.records import Record


class WeightSync(Record):
    """How weights reach the engines."""

    topology: Literal["chain", "tree", "flat"] = Field(
        default="chain",
        description="chain: in pieces from device to device; tree: whoever has them sends to one more; flat: the trainer "
        "sends to every device",
    )
