"""Whose clock says what: offsets of workers' monotonic clocks against the driver's.

CLOCK_MONOTONIC is one clock for all processes of a machine, in one time namespace; those need no alignment. Another
machine's is asked for the time again and again: an answer that took r seconds on its way there and back says the offset
to r/2 at worst, whatever part of r each way took, so the quickest answer is kept (Cristian 1989).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PINGS = 20
"""questions to each machine; the quickest one counts"""


@dataclass(frozen=True, kw_only=True)
class Ping:
    """One question: when it was asked and answered by the asker's clock, and what the other clock said between."""

    asked_s: float
    said_s: float
    answered_s: float


@dataclass(frozen=True, kw_only=True)
class Offset:
    """What is added to the asker's clock to get the other's, within `error_s`."""

    seconds: float = 0.0
    error_s: float = 0.0


def offset(pings: Iterable[Ping]) -> Offset:
    """From the quickest of some pings. Raises ValueError where there are none."""
    best = min(pings, key=lambda ping: ping.answered_s - ping.asked_s)
    middle, half = (best.asked_s + best.answered_s) / 2, (best.answered_s - best.asked_s) / 2
    return Offset(seconds=best.said_s - middle, error_s=half)


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """Offsets by worker; those that are not named read the driver's clock."""

    offsets: Mapping[str, Offset] = field(default_factory=dict)

    def of(self, worker: str) -> float:
        """Seconds that a worker's clock is ahead of the driver's."""
        found = self.offsets.get(worker)
        return 0.0 if found is None else found.seconds

    @property
    def residual_s(self) -> float:
        """The largest error of one worker's clock against another's."""
        machines = set(self.offsets.values())
        errors = sorted((known.error_s for known in machines), reverse=True)
        return sum(errors[:2])

    def drifted(self, later: Clocks) -> Clocks:
        """These offsets, with errors that cover what was found at the end of a run too."""
        found = dict(self.offsets)
        for worker, end in later.offsets.items():
            begin = found.get(worker, end)
            away = abs(end.seconds - begin.seconds) + max(begin.error_s, end.error_s)
            found[worker] = Offset(seconds=begin.seconds, error_s=away)
        return Clocks(offsets=found)


def identity(_: Any = None) -> str:
    """Of the clock that this process reads: the machine since it was started, and the time namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.stat("/proc/self/ns/time").st_ino
    except OSError:
        return f"process {os.getpid()} of an unknown machine"
    return f"{boot}/{space}"


def now(_: Any = None) -> float:
    return time.monotonic()


async def align(actors: Mapping[str, Any], homes: Mapping[str, str]) -> Clocks:
    """The clocks of all workers, asked while they do nothing else; `homes`: the node of each.

    One worker of each node answers for the others there.
    """
    own, by_node = identity(), dict[str, Offset]()
    for node, worker in {node: worker for worker, node in homes.items()}.items():
        call = actors[worker].__ray_call__
        if await call.remote(identity) != own:
            by_node[node] = offset([await _ping(call) for _ in range(PINGS)])
    return Clocks(offsets={worker: by_node[node] for worker, node in homes.items() if node in by_node})


async def _ping(call: Any) -> Ping:
    asked = now()
    said = await call.remote(now)
    return Ping(asked_s=asked, said_s=said, answered_s=now())
