"""Keeping the records of a run beside it: the driver writes a step's record while its workers update."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

from executor.experience import Samples
from executor.records import write
from lab.scenario import Scenario


class Recording:
    """One record at a time, each in a thread of this process; a write that fails fails the run at the next step.

    The driver only waits while workers update, so this costs a step nothing but the few milliseconds for which the
    interpreter is held.
    """

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.folder = scenario, folder
        self._created: dict[int, datetime] = {}
        self._latest = -1
        self._under_way: asyncio.Task[Path] | None = None

    def obtained(self, step: int) -> None:
        """The samples of a step have been generated or read, now; only the first time counts."""
        self._created.setdefault(step, datetime.now(UTC))

    async def begin(self, step: int, samples: Callable[[], Awaitable[Samples]]) -> None:
        """Starts to write a step's record, once the one before is done; of a step that has begun already nothing.

        Raises OSError where the record before failed.
        """
        if step == self._latest:
            return
        self._latest = step
        await self.finish()
        self._under_way = asyncio.create_task(self._write(step, samples))

    async def finish(self) -> None:
        """Waits for what is being written. Raises OSError, naming the file, where it could not be."""
        if self._under_way is not None:
            task, self._under_way = self._under_way, None
            await task

    async def _write(self, step: int, samples: Callable[[], Awaitable[Samples]]) -> Path:
        created = self._created.pop(step, None)
        return await asyncio.to_thread(write, self.folder, self.scenario, await samples(), created)
