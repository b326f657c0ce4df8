"""Who has one version of the weights, and who fetches it from whom. No clock: whoever waits is called when its turn comes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from lab.policies.weight_sync import Near, nearest


class Place(NamedTuple):
    """Where somebody stands who has the weights, or wants them."""

    site: str
    machine: str
    """empty: of no machine, as the storage of a site"""

    @property
    def levels(self) -> tuple[Hashable, ...]:
        """Who shares these with somebody is near: the machine, the site, and everything."""
        return (self.site, self.machine), self.site, None


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where weights can be had."""

    place: Place
    name: str
    """an engine, the machine of the trainer, or the site of a store"""
    ends: tuple[str, ...] = ()
    """devices, a machine's memory, or an address; none: a store"""
    many: bool = False
    """whether it gives them to many at once, as a store does"""


@dataclass(eq=False, kw_only=True)
class Turn:
    """Somebody who wants the weights."""

    granted: Callable[[int], object]
    """called with the number of the source, once it may fetch"""
    number: int | None = None
    """of that source, from then on"""


class Copies:
    """Who has one version, and who fetches it or waits for somebody to fetch it from."""

    def __init__(self, origin: Source, tree: bool) -> None:
        """`tree`: whoever has it gives it on, to one at a time; else everybody fetches from the origin."""
        self._tree = tree
        self._sources, self._busy = list[Source](), list[bool]()
        self._holders, self._fetching = Counter[Hashable](), Counter[Hashable]()
        self._free: dict[Hashable, list[int]] = {}
        self._queue: dict[Place, deque[Turn]] = {}
        self._add(origin)

    @property
    def in_turns(self) -> bool:
        """Whether somebody may have to wait."""
        return self._tree

    def ask(self, here: Place, granted: Callable[[int], object]) -> Turn:
        """Somebody who is `here` wants the weights."""
        turn = Turn(granted=granted)
        if not self._tree:
            self._grant(turn, 0)
            return turn
        self._queue.setdefault(here, deque()).append(turn)
        self._match()
        return turn

    def source(self, number: int) -> Source:
        return self._sources[number]

    def release(self, number: int, here: Place, new: Source | None) -> None:
        """A fetch has ended; `new` has the weights now, or nobody where it was given up."""
        if not self._tree:
            return
        self._fetching.subtract(here.levels)
        self._let(number)
        if new is not None:
            self._add(new)
        self._match()

    def leave(self, here: Place, turn: Turn) -> None:
        """Somebody waits no more; what was granted to it goes to others."""
        if turn.number is not None:
            self.release(turn.number, here, None)
        elif self._tree:
            self._queue[here].remove(turn)
            if not self._queue[here]:
                del self._queue[here]

    def _grant(self, turn: Turn, number: int) -> None:
        turn.number = number
        turn.granted(number)

    def _add(self, source: Source) -> None:
        self._sources.append(source)
        self._busy.append(False)
        self._holders.update(source.place.levels)
        self._let(len(self._sources) - 1)

    def _let(self, number: int) -> None:
        """A holder is free."""
        self._busy[number] = False
        for level in self._sources[number].place.levels:
            heappush(self._free.setdefault(level, []), number)

    def _first_free(self, level: Hashable) -> int | None:
        """The free holder with the least number; entries of those that were chosen at another level are left behind."""
        numbers = self._free.get(level, [])
        while numbers and self._busy[numbers[0]]:
            heappop(numbers)
        return numbers[0] if numbers else None

    def _near(self, level: Hashable) -> Near:
        number, fetching = self._holders[level], self._fetching[level]
        return Near(num_holders=number, free=self._first_free(level), num_fetching=fetching)

    def _match(self) -> None:
        """Everybody who waits and may fetch now is told so, in the order in which their machines asked."""
        num_free = self._busy.count(False)
        for here in list(self._queue):
            while num_free and (found := nearest([self._near(level) for level in here.levels])) is not None:
                self._busy[found] = bool(self._sources[found].ends) and not self._sources[found].many
                num_free -= self._busy[found]
                self._fetching.update(here.levels)
                turn = self._queue[here].popleft()
                if not self._queue[here]:
                    del self._queue[here]
                self._grant(turn, found)
                if here not in self._queue:
                    break
            if not num_free:
                return
