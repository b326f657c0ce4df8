"""The samples of a simulation (`lab.fates`), by the name that a run knows them by."""

from __future__ import annotations

from lab.fates import (
    ABORTED,
    BUFFERED,
    DROPPED,
    ENGINE,
    FATE,
    FATES,
    IN_FLIGHT,
    INDEX,
    LOST,
    MADE,
    PROMPT,
    RESPONSE,
    STEP,
    TRAINED,
    VERSION,
    WASTED,
)
from lab.fates import Fates as Ledger

__all__ = [
    "ABORTED", "BUFFERED", "DROPPED", "ENGINE", "FATE", "FATES", "INDEX", "IN_FLIGHT", "LOST", "MADE", "PROMPT",
    "RESPONSE", "STEP", "TRAINED", "VERSION", "WASTED", "Ledger",
]  # fmt: skip
