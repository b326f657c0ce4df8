"""A process that keeps one core busy with real training passes, to measure what that costs the others."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lab.library import model as library_model

BATCH, TOKENS = 8, 64
_START_TIMEOUT_S = 120.0


@contextmanager
def busy(arch: str, number: int = 1) -> Iterator[None]:
    """While the context is open, `number` processes train a network of this architecture, one thread each."""
    spawn = multiprocessing.get_context("spawn")
    started = [spawn.Event() for _ in range(number)]
    processes = [spawn.Process(target=_train, args=(arch, event), daemon=True) for event in started]
    for process in processes:
        process.start()
    try:
        for event in started:
            if not event.wait(_START_TIMEOUT_S):
                raise RuntimeError("the busy neighbour did not start")
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _train(arch: str, started: Any) -> None:
    import os

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
