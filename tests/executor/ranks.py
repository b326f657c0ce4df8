"""Ranks of a trainer as plain processes that meet over gloo: what trainers do, without Ray."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from executor.workers import HOST, environment, free_port


class Ranks:
    """So many processes; each runs the functions that it is sent, one after the other. A context."""

    def __init__(self, world: int, port: int | None = None) -> None:
        """`port`: at which the ranks meet; a free one where None."""
        spawn, port = multiprocessing.get_context("spawn"), port or free_port()
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(world):
            mine, theirs = spawn.Pipe()
            variables = environment(threads=1) | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_SIZE": str(world),
                "MASTER_ADDR": HOST, "MASTER_PORT": str(port),
            }  # fmt: skip
            self._processes.append(spawn.Process(target=_serve, args=(theirs, variables), daemon=True))
            self._ends.append(mine)

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(rank, world, *arguments)` on every rank; raises what any of them raised."""
        for rank, end in enumerate(self._ends):
            end.send((function, (rank, len(self._ends), *arguments)))
        found = [end.recv() for end in self._ends]
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found


def _serve(end: Connection, variables: dict[str, str]) -> None:
    os.environ |= variables
    while True:
        function, arguments = end.recv()
        try:
            end.send(function(*arguments))
        except Exception as error:
            end.send(error)
