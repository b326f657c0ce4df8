"""A process that keeps one core busy with real training passes, to measure what that costs the others."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any, Self

from lab.library import model as library_model

BATCH, TOKENS = 8, 64
_START_TIMEOUT_S = 120.0


class Neighbour:
    """A process that trains a network of this architecture on one thread, whenever it is not told to rest.

    A context: it rests from the beginning, and leaving the context ends it.
    """

    def __init__(self, arch: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._started = spawn.Event()
        self._process = spawn.Process(target=_train, args=(arch, self._started), daemon=True)

    def work(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def rest(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None, "inside the context"
        return self._process.pid

    def __enter__(self) -> Self:
        self._process.start()
        if not self._started.wait(_START_TIMEOUT_S):
            raise RuntimeError("the busy neighbour did not start")
        self.rest()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _train(arch: str, started: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from executor.network import build_actor

    torch.set_num_threads(1)
    network = build_actor(library_model(arch), 0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    ids = torch.randint(0, 32, (BATCH, TOKENS))
    while True:
        network(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        started.set()
