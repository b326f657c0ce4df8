"""Collectives between two ranks on a gloo group of their own; the functions run in the ranks' processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

REPEATS = 5
TIMEOUT = timedelta(seconds=60)
OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


def join(worker: Any, host: str, port: int, rank: int, ranks: int) -> None:
    """Blocks until all ranks have come."""
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

    store = TCPStore(host, port, ranks, is_master=rank == 0, timeout=TIMEOUT)
    worker.measured = ProcessGroupGloo(PrefixStore("measure", store), rank, ranks, TIMEOUT), ranks


def timings(worker: Any, size: int) -> dict[str, list[float]]:
    """Seconds of each collective of `size` bytes on this rank, the group meeting before every one."""
    group, ranks = worker.measured
    found: dict[str, list[float]] = {}
    for op in OPS:
        call = _call(op, group, ranks, size)
        call().wait()
        found[op] = []
        for _ in range(REPEATS):
            group.barrier().wait()
            start = time.perf_counter()
            call().wait()
            found[op].append(time.perf_counter() - start)
    return found


def _call(op: str, group: Any, ranks: int, size: int) -> Callable[[], Any]:
    import torch
    from torch.distributed import BroadcastOptions

    whole = torch.ones(max(size // 4 // ranks, 1) * ranks)
    part = torch.ones(len(whole) // ranks)
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return {
        "all_reduce": lambda: group.allreduce([whole]),
        "reduce_scatter": lambda: group._reduce_scatter_base(part, whole),
        "all_gather": lambda: group._allgather_base(whole, part),
        "broadcast": lambda: group.broadcast([whole], options),
    }[op]
