"""The experience buffer: an actor of its own that engines give samples to, and that makes batches of them.

What is in it was generated and is whole; which of it makes up a batch is the driver's to say (`lab.collecting`). The samples
of a batch are kept, pinned, until the update has ended: whoever trains on them may ask again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor.delivery import NUMBERS
from executor.experience import Samples, joined
from executor.packing import unpack
from executor.rewards import Columns
from executor.services import whole
from lab.policies.buffer import LINGER_S

CALLS_AT_ONCE = 64
"""engines, scorers and trainers call it"""
LONGEST_S = 5.0
"""that `news` waits for a sample"""


class Buffer:
    """Samples by the number under which they were issued. Nothing heavy is imported here."""

    def __init__(self, stages: Sequence[str] = ()) -> None:
        """`stages` that score samples as they come: without all of their scores no sample is whole."""
        self._stages = tuple(stages)
        self._scores: dict[int, dict[str, tuple[Columns, int]]] = {}
        """by number and stage: the columns that a sample's scores came with, and its place there"""
        self._rows: dict[int, tuple[Samples, int]] = {}
        """by number: what it came with, and its place there"""
        self._pages: dict[int, Samples] = {}
        """batches that are being trained on"""
        self._told: list[int] = []
        self._changed = asyncio.Condition()

    async def put(self, numbers: Sequence[int], samples: Samples) -> None:
        """Samples that have ended, from an engine, by whatever way."""
        async with self._changed:
            self._rows |= {number: (samples, row) for row, number in enumerate(numbers)}
            self._tell(numbers)

    async def deliver(self, data: NDArray[np.uint8]) -> None:
        """As `put`, of a message that was packed."""
        samples = unpack(data.data)
        numbers = samples.columns[NUMBERS].tolist()
        columns = {name: column for name, column in samples.columns.items() if name != NUMBERS}
        await self.put(numbers, replace(samples, columns=columns))

    async def scored(self, stage: str, numbers: Sequence[int], columns: Columns) -> None:
        """What samples score, from a scorer; it may come before the sample does."""
        async with self._changed:
            for row, number in enumerate(numbers):
                self._scores.setdefault(number, {})[stage] = (columns, row)
            self._tell(numbers)

    def _tell(self, numbers: Sequence[int]) -> None:
        """Those that are whole now."""
        self._told += [
            number for number in numbers
            if number in self._rows and len(self._scores.get(number, ())) == len(self._stages)
        ]  # fmt: skip
        self._changed.notify_all()

    async def news(self, num_wanted: int = 1) -> list[int]:
        """The numbers of samples that came since the last call, as soon as there are as many as are wanted, or some, a
        little later; none after a while."""
        async with self._changed:
            if await self._here(1, LONGEST_S):
                await self._here(num_wanted, LINGER_S)
            found, self._told = self._told, []
            return found

    async def _here(self, number: int, longest_s: float) -> bool:
        """Whether so many have come, once they have or so long after."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait_for(lambda: len(self._told) >= number), longest_s)
        return len(self._told) >= number

    async def take(
        self, batch: int, policy_version: int, numbers: Sequence[int], columns: Mapping[str, Any] | None = None
    ) -> tuple[Samples, list[int]]:
        """A batch of samples in this order, which leave, and its numbers; its page is pinned until `release`.

        `columns` are added, [N] each. Raises KeyError naming what is not here: a batch has no holes.
        """
        if missing := [number for number in numbers if number not in self._rows]:
            raise KeyError(f"batch {batch} has no samples {missing[:5]}: the buffer does not hold them")
        page = _page([self._rows[number] for number in numbers])
        page = replace(page, step=batch, policy_version=policy_version).with_columns(**(columns or {}))
        for stage in self._stages:
            page = page.with_columns(**whole([self._scores[number][stage] for number in numbers]))
        self._pages[batch] = page
        await self.drop(numbers)
        return page, list(numbers)

    async def again(self, batch: int) -> Samples:
        """A pinned batch once more, for somebody who trains on it from the beginning. Raises KeyError where it is gone."""
        return self._pages[batch]

    async def release(self, batch: int) -> None:
        """The update on a batch has ended: its page may be overwritten."""
        self._pages.pop(batch, None)

    async def drop(self, numbers: Sequence[int]) -> None:
        """These leave, where they are here."""
        for number in numbers:
            self._rows.pop(number, None)
            self._scores.pop(number, None)

    async def pid(self) -> int:
        """Of this process."""
        return os.getpid()


def _page(rows: Sequence[tuple[Samples, int]]) -> Samples:
    """Rows out of many parts as one, in order."""
    parts: dict[int, tuple[Samples, list[int], list[int]]] = {}
    for place, (samples, row) in enumerate(rows):
        _, mine, places = parts.setdefault(id(samples), (samples, [], []))
        mine.append(row)
        places.append(place)
    whole = joined([samples.take(mine) for samples, mine, _ in parts.values()])
    order = [0] * len(rows)
    for at, place in enumerate(place for _, _, places in parts.values() for place in places):
        order[place] = at
    return whole.take(order)
