"""The shape shared by everything read from a user's file: frozen, strict, no unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen, strictly typed part of a file; unknown keys are errors.

    A field's `json_schema_extra={"effect": ...}` says what changing it does where it does not change the spans:
    `learning` (recorded losses or rewards), `label` (a name), `memory` (only whether the work fits), `resume` (only
    how long a run takes to load what was saved), `storage` (only what lies in storage).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
