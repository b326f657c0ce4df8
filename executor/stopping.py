"""The end of a run before its last step, in order: no new rollout and no new step, then a last checkpoint.

A step whose weights are already being changed is finished, so that what is saved is the state after a whole step; what is
under way for later steps is given up.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from lab.dataflow import Dataflow
from lab.offline import UPDATES

Run = tuple[str, int]
"""a stage and its step"""


class Stopped(Exception):
    """A run has ended early because it was asked to."""


class Stopping:
    """Whether a run is to end, and what may still begin in it."""

    def __init__(self, dataflow: Dataflow, first_step: int = 0) -> None:
        """`first_step`: the first that is played; those before it have ended."""
        self._dataflow = dataflow
        self.requested = asyncio.Event()
        self.last = first_step - 1
        """the last step whose weights have been changed, or are being changed: the run ends with it"""
        self._needed = set[Run]()

    async def begin(self, run: Run) -> None:
        """Ends at once, or never where a run may not begin any more."""
        if not self.may_begin(run):
            await asyncio.get_running_loop().create_future()

    def may_begin(self, run: Run) -> bool:
        """Whether a run may begin now; where it may, it does."""
        if self.requested.is_set() and run not in self._needed:
            return False
        if run[0] in UPDATES:
            self.last = max(self.last, run[1])
        return True

    def stop(self) -> None:
        """From now on nothing begins but what the last step needs."""
        for stage, node in self._dataflow.nodes.items():
            for step in range(self.last + 1):
                if node.runs(step):
                    self._need((stage, step))
        self.requested.set()

    def _need(self, run: Run) -> None:
        missing = [run]
        while missing:
            found = missing.pop()
            if found not in self._needed:
                self._needed.add(found)
                missing += self._dataflow.requirements(*found)


@contextmanager
def interruptible(first: Callable[[], bool]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP do not end this process: the first asks for an orderly end, the second cancels the task.

    `first` returns whether such an end is possible now; else the first cancels too. Outside the main thread nothing
    changes, and a SIGHUP that is ignored (nohup) stays so.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    asked, caught = False, list[int]()

    def signalled() -> None:
        nonlocal asked
        orderly = not asked and first()
        asked = True
        if not orderly:
            task.cancel()

    def hung_up() -> None:  # a terminal that goes says so to its session, and to the group in front once more
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        _silence()
        signalled()

    ends = {signal.SIGINT: signalled, signal.SIGTERM: signalled, signal.SIGHUP: hung_up}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        del ends[signal.SIGHUP]
    for number, ended in ends.items():
        try:
            loop.add_signal_handler(number, ended)
            caught.append(number)
        except (ValueError, RuntimeError):  # not the main thread
            break
    try:
        yield
    finally:
        for handled in caught:
            loop.remove_signal_handler(handled)


def _silence() -> None:
    """The terminal is gone: what would be shown on it goes nowhere, and is no error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(nowhere, stream)
    os.close(nowhere)
