"""A decision with what it observed, so that the decisions of both worlds can be compared one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Generic, TypeVar

import numpy as np

Observed = TypeVar("Observed")
Decided = TypeVar("Decided")


@dataclass(frozen=True, kw_only=True)
class Decision(Generic[Observed, Decided]):
    """What one rule saw and what it said."""

    rule: str
    """the name of the rule, `<file>.<function>`"""
    observed: Observed
    decided: Decided

    def plain(self) -> dict[str, object]:
        """The same as strings, numbers, lists and dicts: fit for JSON and for `==` between two runs."""
        parts = {"rule": self.rule, "observed": self.observed, "decided": self.decided}
        return {key: _plain(value) for key, value in parts.items()}


def recorded(rule: Callable[[Observed], Decided], observed: Observed) -> Decision[Observed, Decided]:
    """Ask a rule and keep both sides of the answer."""
    name = f"{rule.__module__.rsplit('.', 1)[-1]}.{rule.__qualname__}"
    return Decision(rule=name, observed=observed, decided=rule(observed))


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        ordered = sorted(value) if isinstance(value, set | frozenset) else value
        return [_plain(part) for part in ordered]
    return value
