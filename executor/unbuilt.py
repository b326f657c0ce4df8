"""Keys whose mechanism is only simulated so far: the executor refuses any value but the default, by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lab.scenario import Scenario

ONLY_SIMULATED: dict[str, str] = {
    "schedule.trigger_samples": "a batch of its own size",
    "schedule.staleness": "a bound on the age of samples",
    "buffer": "an experience buffer",
    "faults": "a fault",
    "scaling": "a number of workers that changes",
    "rollout.over_issue": "over-issue with an early stop",
    "rollout.stealing": "work stealing",
    "experience": "a way of samples of its own",
    "weight_sync.trigger": "another way of weights than a push",
    "weight_sync.every": "a pull of weights",
    "weight_sync.transport": "a store of weights",
    "weight_sync.payload": "a part of the weights in a weight sync",
    "weight_sync.delta_share": "a part of the weights in a weight sync",
    "weight_sync.in_flight": "a weight sync beside running samples",
    "weight_sync.kv": "a weight sync beside running samples",
    "weight_sync.barrier_timeout": "a barrier that is not waited for",
}
"""by dotted key, what is not executed; `*` stands for every entry of a list or mapping. A key of a section covers all
that lies in it"""


def unbuilt(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """Keys that are set to what is only simulated: key, problem and remedy."""
    if scenario.schedule.mode == "asynchronous":
        remedy = "set it to synchronous or one_step_off, or simulate the scenario"
        yield "schedule.mode", "an asynchronous schedule is not executed yet", remedy
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
