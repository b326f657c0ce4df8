"""Work stealing: an engine that ran dry takes waiting samples from one that did not. Running ones stay: their KV would
be lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class Queues:
    """What waits where; both arrays have one entry per engine."""

    queued: npt.NDArray[np.int64]
    """units of work that wait: samples, or prompts where all samples of one must stay together"""
    free_slots: npt.NDArray[np.int64]
    """how many more could run at once"""
    speed: npt.NDArray[np.float64]
    """relative or absolute tokens/s, above 0"""
    least: int = 1
    """a move of fewer units is not worth its cost"""


@dataclass(frozen=True, kw_only=True)
class Steal:
    """One move, of the units that would have been started last."""

    thief: int
    victim: int
    num: int


@dataclass(frozen=True, kw_only=True)
class Room:
    """What one engine says of itself."""

    num_running: int
    num_queued: int
    free_slots: int
    """how many more could run at once, as far as their number is limited"""
    free_blocks: float
    """of its KV cache"""
    mean_blocks: float
    """that a sample holds in the end, on average"""


def startable(room: Room) -> int:
    """How many more could run at once: none where some wait beside others that run, for they found no room."""
    if room.num_running and room.num_queued:
        return 0
    return min(room.free_slots, int(room.free_blocks / room.mean_blocks))


def settled(queues: Queues) -> bool:
    """Whether what waits anywhere starts at once, so that nothing will move any more."""
    return not np.any(queues.queued > queues.free_slots)


def steals(queues: Queues) -> list[Steal]:
    """Moves that fill idle engines, fastest thief first, each from the queue that would then take longest.

    A thief has free slots and nothing queued. It takes as many as let both queues end together, at least one; it takes
    from another only where that one has more waiting than it can start at once.
    """
    queued = queues.queued.astype(np.int64).copy()
    moves = list[Steal]()
    for thief in np.argsort(-queues.speed, kind="stable"):
        if queued[thief] or not queues.free_slots[thief]:
            continue
        spare = np.maximum(queued - queues.free_slots, 0)
        victim = int(np.argmax(spare / queues.speed))
        num = _fair(int(spare[victim]), float(queues.speed[thief]), float(queues.speed[victim]))
        if num >= queues.least:
            moves.append(Steal(thief=int(thief), victim=victim, num=num))
            queued[victim] -= num
            queued[thief] += num
    return moves


def _fair(waiting: int, thief_speed: float, victim_speed: float) -> int:
    """Units to take of `waiting` ones so that both end together, rounded to the nearest; 1 where that would be none."""
    share = thief_speed / (thief_speed + victim_speed)
    return min(max(round(waiting * share), 1), waiting)
