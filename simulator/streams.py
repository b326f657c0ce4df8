"""Samples on their way from stage to stage one by one, where the dataflow lets them overlap."""

from __future__ import annotations

from collections.abc import Sequence

import simpy

from simulator.world import Process


class Stream:
    """Samples of one step from one stage to another; their numbers are those of the ledger."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._samples: list[int] = []
        self._closed = False
        self._news = env.event()

    def put(self, samples: Sequence[int]) -> None:
        """These samples are done at the source now."""
        if len(samples):
            self._samples.extend(samples)
            self._wake()

    def close(self) -> None:
        """The source has no more."""
        self._closed = True
        self._wake()

    @property
    def waiting(self) -> int:
        """Samples that nobody has taken yet."""
        return len(self._samples)

    def take(self) -> Process:
        """All samples that wait, as soon as there are any; None once the source has no more, to everybody who asks."""
        while not self._samples and not self._closed:
            yield self._news
        taken, self._samples = self._samples, []
        return taken or None

    def _wake(self) -> None:
        news, self._news = self._news, self._env.event()
        news.succeed()
