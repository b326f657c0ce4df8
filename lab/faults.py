"""What is saved, what fails, and what happens then."""

from __future__ import annotations

from pydantic import Field

from lab.records import Record


class Checkpoint(Record):
    """Writes of all trained state to storage."""

    every_steps: int | None = Field(default=None, ge=1, description="null: never")
