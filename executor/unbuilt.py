"""Keys whose mechanism is only simulated so far: the executor refuses any value but the default, by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lab.scenario import Scenario

ONLY_SIMULATED: dict[str, str] = {}
"""by dotted key, what is not executed; `*` stands for every entry of a list or mapping. A key of a section covers all
that lies in it"""


def unbuilt(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """Keys that are set to what is only simulated: key, problem and remedy."""
    given = scenario.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    for pattern, what in ONLY_SIMULATED.items():
        for key in _set(given, _parts(pattern), ()):
            yield key, f"{what} is not executed yet", "remove it, or simulate the scenario"


def _parts(pattern: str) -> tuple[str, ...]:
    """`place.reward.score.kind` has the parts place, reward.score, kind: placements contain a dot."""
    for work in ("actor.generate", "actor.train", "critic.train", "reward.train", "reference.score", "reward.score"):
        pattern = pattern.replace(work, work.replace(".", "\0"))
    return tuple(part.replace("\0", ".") for part in pattern.split("."))


def _set(value: Any, parts: tuple[str, ...], path: tuple[str, ...]) -> Iterator[str]:
    """Dotted keys below `value` that a pattern names and that are set."""
    if value is None:
        return
    if not parts:
        yield ".".join(path).replace(".[", "[")
    elif parts[0] == "*":
        entries: Any = enumerate(value) if isinstance(value, list) else value.items()
        for name, entry in entries:
            yield from _set(entry, parts[1:], (*path, f"[{name}]" if isinstance(value, list) else name))
    elif isinstance(value, dict) and parts[0] in value:
        yield from _set(value[parts[0]], parts[1:], (*path, parts[0]))
