"""Quantities with a unit as they stand in scenario and library files: `20 ms`, `64 MiB`, `5 GB/s`.

Inside the lab there are only seconds, bytes, bytes per second and FLOP/s (GB = 10^9, GiB = 2^30).
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

_PREFIX = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_BYTES = {f"{prefix}B": scale for prefix, scale in _PREFIX.items()} | {
    f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", start=1)
}
_RATES = {f"{unit}/s": scale for unit, scale in _BYTES.items()} | {
    f"{prefix}bit/s": scale / 8 for prefix, scale in _PREFIX.items()
}
_FLOPS = {f"{prefix}FLOP/s": scale for prefix, scale in _PREFIX.items()}

_QUANTITY = re.compile(r"\s*([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*(\S.*?)?\s*")


def parse(text: str, units: dict[str, float]) -> float:
    """The value of `text` in the base unit of `units`. Raises ValueError naming the units that fit."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        known = ", ".join(units)
        raise ValueError(f"{text!r} is not a number with one of the units {known}")
    return float(match[1]) * units[match[2]]


def _validator(units: dict[str, float]) -> BeforeValidator:
    def read(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"{value!r} is not a number with one of the units {', '.join(units)}")
        number = parse(value, units) if isinstance(value, str) else float(value)
        if number < 0:
            raise ValueError(f"{value!r} is negative")
        return number

    return BeforeValidator(read, json_schema_input_type=float | str)


Seconds = Annotated[float, _validator(_SECONDS)]
Bytes = Annotated[float, _validator(_BYTES)]
BytesPerSecond = Annotated[float, _validator(_RATES)]
FlopsPerSecond = Annotated[float, _validator(_FLOPS)]
