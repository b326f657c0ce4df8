"""Samples on their way from stage to stage one by one, where the dataflow lets them overlap."""

from __future__ import annotations

from collections.abc import Sequence

import simpy

from simulator.world import Process

_CLOSED = object()


class Stream:
    """Samples of one step from one stage to another; their numbers are those of the ledger."""

    def __init__(self, env: simpy.Environment) -> None:
        self._store = simpy.Store(env)
        self._closed = False

    def put(self, samples: Sequence[int]) -> None:
        """These samples are done at the source now."""
        for sample in samples:
            self._store.put(sample)

    def close(self) -> None:
        """The source has no more."""
        self._closed = True
        self._store.put(_CLOSED)

    @property
    def waiting(self) -> int:
        """Samples that nobody has taken yet."""
        return len(self._store.items) - self._closed

    def get(self) -> Process:
        """The next sample; None once the source has no more, to everybody who asks."""
        found = yield self._store.get()
        if found is _CLOSED:
            self._store.put(_CLOSED)
            return None
        return found
