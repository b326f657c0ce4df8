"""Which engine gets the next prompt, and what becomes of prompts that wait. Both worlds call this.

The rules of `DISPATCH` see the prompts that wait (`Prompts`) and the engines as the dispatcher knows them
(`Engines`): its own ledger, and the load that each engine last reported. None sees how long a response will be; a
predicted length comes from `lab.policies.lengths`. The functions named `fill_…` are plain loops over arrays that make
no arrays themselves, so that they can be compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MANY = 100_000
"""pairs of a prompt and an engine from which on rules are compiled"""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts that wait, in the order in which they came."""

    predicted_tokens: Floats
    """(num_prompts,) prompt and predicted response tokens that one sample of it will hold in a KV cache"""
    samples_per_prompt: int = 1
    """all samples of a prompt go to one engine, so that they share the KV blocks of the prompt"""
    num_buckets: int = 1
    """classes of predicted length, for `length_buckets`"""

    def __len__(self) -> int:
        return len(self.predicted_tokens)


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Engines as the dispatcher knows them; every array has one entry per engine."""

    speed: Floats
    """relative or absolute tokens/s, above 0"""
    given: Ints
    """prompts that the dispatcher gave each one before"""
    queued: Ints
    """samples that wait in it: as last reported, plus those sent since"""
    running: Ints
    """samples that run in it, as last reported"""
    free_kv_tokens: Floats
    """room in its KV cache: as last reported, less what was sent since"""

    def __len__(self) -> int:
        return len(self.speed)

    @classmethod
    def idle(cls, speed: npt.ArrayLike, free_kv_tokens: float = np.inf) -> Engines:
        """Engines that were given nothing yet."""
        speeds, zeros = np.asarray(speed, float), np.zeros(np.size(speed), np.int64)
        room = np.full(len(speeds), float(free_kv_tokens))
        return cls(speed=speeds, given=zeros, queued=zeros, running=zeros, free_kv_tokens=room)


Rule = Callable[[Prompts, Engines], list[list[int]]]
"""the indices of the prompts that each engine gets, in the order in which it gets them"""


def round_robin(num_prompts: int, num_engines: int) -> list[list[int]]:
    """Prompts of each engine: engine e takes e, e + engines, …; all samples of a prompt stay together."""
    return [list(range(engine, num_prompts, num_engines)) for engine in range(num_engines)]


def in_turn(prompts: Prompts, engines: Engines) -> list[list[int]]:
    """Round robin that goes on where the last call ended."""
    first = int(engines.given.sum()) % len(engines)
    return [list(range((engine - first) % len(engines), len(prompts), len(engines))) for engine in range(len(engines))]


def weighted(prompts: Prompts, engines: Engines) -> list[list[int]]:
    """In turn, a faster engine more often: at every moment each has its share by speed, within one prompt."""
    chosen = np.empty(len(prompts), np.int64)
    fill = _quick(fill_weighted, len(prompts) * len(engines))
    fill(chosen, engines.given.copy(), engines.speed / engines.speed.sum())
    return grouped(chosen, len(engines))


def fill_weighted(chosen: Ints, given: Ints, share: Floats) -> None:
    """Write the engine of each prompt to `chosen`, and count it in `given` (both are changed).

    Tijdeman's rule for the chairman assignment problem (Discrete Mathematics 32, 1980): among the engines that are
    behind their share by at least 1/(2n − 2), the one that would be a whole prompt behind first. Nobody is then ever
    more than 1 − 1/(2n − 2) off; the better known rule that serves whoever is furthest behind has no such bound.
    """
    slack = 1.0 / max(2 * len(share) - 2, 1)
    total = 0
    for count in given:
        total += count
    for i in range(len(chosen)):
        total += 1
        best, soonest, furthest = 0, np.inf, -np.inf
        for engine in range(len(share)):
            behind = total * share[engine] - given[engine]
            due = (1.0 - slack - behind) / share[engine] if behind >= slack else np.inf
            if due < soonest or (soonest == np.inf and behind > furthest):
                best, soonest, furthest = engine, due, behind
        chosen[i] = best
        given[best] += 1


def least_loaded(prompts: Prompts, engines: Engines) -> list[list[int]]:
    """Each to the engine with room for it that would reach it first, by what waits and runs there; see the kernel."""
    chosen = np.empty(len(prompts), np.int64)
    ahead, room = (engines.queued + engines.running).astype(float), engines.free_kv_tokens.copy()
    tokens, samples = prompts.predicted_tokens, prompts.samples_per_prompt
    fill = _quick(fill_least_loaded, len(prompts) * len(engines))
    fill(chosen, ahead, room, engines.speed, tokens, samples, *tournaments(len(engines)))
    return grouped(chosen, len(engines))


def tournaments(num_engines: int) -> tuple[Floats, Ints]:
    """What `fill_least_loaded` works in: two keys of each engine, and for each key a tournament of the engines.

    In a tournament node i holds the winner of nodes 2i and 2i + 1, and the engines are the leaves from `num_engines`
    on; the winner of all, at node 1, is the engine with the smallest key.
    """
    leaves = np.arange(num_engines)
    return np.full((2, num_engines), np.inf), np.tile(np.concatenate([np.zeros_like(leaves), leaves]), (2, 1))


def fill_least_loaded(
    chosen: Ints,
    ahead: Floats,
    room: Floats,
    speed: Floats,
    tokens: Floats,
    samples_per_prompt: int,
    keys: Floats,
    winners: Ints,
) -> None:
    """Write the engine of each prompt to `chosen`; `ahead` (samples) and `room` (tokens) are kept up to date.

    First come engines whose free KV holds the prompt's samples, then the smallest (samples ahead + own) / speed, then
    the most free KV, then the lowest index. An engine that another beats in one respect and equals in the rest is
    never chosen. The last two arguments are from `tournaments`: key 0 is the wait, key 1 the room, negative.
    """
    size = len(speed)
    for i in range(-size, len(chosen)):
        best = i + size  # first, every engine enters the tournaments
        if i >= 0:
            need, best, roomiest = tokens[i] * samples_per_prompt, winners[0, 1], winners[1, 1]
            if room[best] < need <= room[roomiest]:
                best = roomiest
                for engine in range(size):
                    shorter = keys[0, engine] < keys[0, best]
                    even = keys[0, engine] == keys[0, best] and keys[1, engine] < keys[1, best]
                    if room[engine] >= need and (shorter or even):
                        best = engine
            chosen[i] = best
            ahead[best] += samples_per_prompt
            room[best] -= need
        keys[0, best], keys[1, best] = (ahead[best] + samples_per_prompt) / speed[best], -room[best]
        for k in range(2):
            node = (size + best) // 2
            while node:
                one, other = winners[k, 2 * node], winners[k, 2 * node + 1]
                less, even = keys[k, one] < keys[k, other], keys[k, one] == keys[k, other]
                if even:
                    less = keys[1 - k, one] < keys[1 - k, other]
                    even = keys[1 - k, one] == keys[1 - k, other]
                if even:
                    less = one < other
                winners[k, node] = one if less else other
                node //= 2


def length_buckets(prompts: Prompts, engines: Engines) -> list[list[int]]:
    """Classes of predicted length, the longest on the fastest engines; inside a class as `least_loaded`.

    The classes have equally many prompts; each is served by neighbours in the order of speed, so many that the
    classes' predicted tokens per unit of speed are as equal as whole engines allow.
    """
    num_buckets = min(prompts.num_buckets, len(engines), max(len(prompts), 1))
    longest_first = np.argsort(-prompts.predicted_tokens, kind="stable")
    fastest_first = np.argsort(-engines.speed, kind="stable")
    buckets = [np.sort(part) for part in np.array_split(longest_first, num_buckets)]
    work = [float(prompts.predicted_tokens[part].sum()) for part in buckets]
    assigned: list[list[int]] = [[] for _ in range(len(engines))]
    for bucket, (first, last) in zip(buckets, _bound(work, engines.speed[fastest_first]), strict=True):
        team = fastest_first[first:last]
        own = least_loaded(prompts_of(prompts, bucket), engines_of(engines, team))
        for engine, indices in zip(team, own, strict=True):
            assigned[int(engine)] = [int(bucket[i]) for i in indices]
    return assigned


def _bound(work: list[float], speed: Floats) -> list[tuple[int, int]]:
    """Ranges of engines (in order of speed), one per class and none empty, whose speeds follow the classes' work."""
    reached = np.cumsum(speed) / speed.sum()
    targets = np.cumsum(work) / max(sum(work), 1e-300)
    ranges, first = list[tuple[int, int]](), 0
    for bucket in range(len(work)):
        left = len(work) - bucket - 1
        nearest = int(np.argmin(np.abs(reached - targets[bucket]))) + 1 if left else len(speed)
        last = min(max(nearest, first + 1), len(speed) - left)
        ranges.append((first, last))
        first = last
    return ranges


def _quick(fill: Callable[..., None], choices: int) -> Callable[..., None]:
    """The function, compiled where there is so much to choose that it pays."""
    return _compiled(fill) if choices > MANY else fill


@cache
def _compiled(fill: Callable[..., None]) -> Callable[..., None]:
    from lab.compiled import compiled  # takes half a second to import

    return compiled(fill)


def grouped(chosen: Ints, num_engines: int) -> list[list[int]]:
    """Prompts of each engine, from the engine of each prompt."""
    order = np.argsort(chosen, kind="stable")
    ends = np.cumsum(np.bincount(chosen, minlength=num_engines))
    return [part.tolist() for part in np.split(order, ends[:-1])]


def prompts_of(prompts: Prompts, indices: npt.NDArray[Any]) -> Prompts:
    """Some of the prompts."""
    return Prompts(
        predicted_tokens=prompts.predicted_tokens[indices],
        samples_per_prompt=prompts.samples_per_prompt,
        num_buckets=prompts.num_buckets,
    )


def engines_of(engines: Engines, indices: npt.NDArray[Any]) -> Engines:
    """Some of the engines."""
    return Engines(**{name: getattr(engines, name)[indices] for name in Engines.__dataclass_fields__})


DISPATCH: dict[str, Rule] = {
    "round_robin": in_turn,
    "weighted": weighted,
    "least_loaded": least_loaded,
    "length_buckets": length_buckets,
}
"""by the name in the scenario file"""
