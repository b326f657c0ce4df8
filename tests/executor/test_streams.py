"""Ends of a weight sync that die or hang at every moment of it: the others come free at once, and go on without them."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from executor import streams, transfer
from executor.streams import Streams
from executor.transfer import WeightGroup, WeightSender
from executor.workers import HOST, free_port

NUM_ENDS = 4
FREE_S = 10.0
"""far less than anybody waits by itself"""
ITEMS = [("one", torch.arange(3_000_000, dtype=torch.float32)), ("two", torch.full((5,), 2.0))]
MOMENTS: dict[str, tuple[str, int]] = {
    "before it knows the others": ("_introduce", 1),
    "before it lets in who follows": ("_guest", 1),
    "before the weights": ("receive", 3),
    "amid the weights": ("receive", 6),
    "before it passes them on": ("send", 5),
    "before it acknowledges": ("meet", 1),
}
"""of an end in the middle: the method that it enters so many times, and does not play the last time"""


@pytest.fixture(scope="module")
def server() -> Any:
    """Fresh processes that have imported what is needed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["executor.transfer"])
    return context


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1 << 20)


def victim(port: int, rank: int, method: str, times: int, told: Connection) -> None:
    """Runs in a process of its own: an end that stands still when it enters a method for the nth time."""
    left, played = [times], getattr(Streams, method)

    def stands(self: Streams, *arguments: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            told.send("here")
            told.recv()
        return played(self, *arguments)

    setattr(Streams, method, stands)
    list(WeightGroup(HOST, port, rank, NUM_ENDS, lossy=True).receive())


def survivors(pool: ThreadPoolExecutor, port: int, ranks: list[int], num_ends: int, route: Any) -> list[Future[Any]]:
    """The sender and other ends, in threads of this process."""

    def sends() -> None:
        WeightSender(HOST, port, num_ends, route=route, lossy=True).send(ITEMS)

    def receives(rank: int) -> Any:
        return [
            (name, tensor.clone()) for name, tensor in WeightGroup(HOST, port, rank, num_ends, lossy=True).receive()
        ]

    return [pool.submit(sends), *(pool.submit(receives, rank) for rank in ranks)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("moment", MOMENTS)
def test_who_is_lost_sets_the_others_free_and_they_meet_without_it(server: Any, moment: str, number: int) -> None:
    """A process that hangs keeps everybody waiting until it is ended."""
    here, there = multiprocessing.Pipe()
    port, rank, others = free_port(), 1, [2, 3]
    process = server.Process(target=victim, args=(port, rank, *MOMENTS[moment], there), daemon=True)
    with ThreadPoolExecutor() as pool:
        ends = survivors(pool, port, others, NUM_ENDS, "chain")
        process.start()
        assert here.poll(60) and here.recv() == "here"
        os.kill(process.pid, number)
        assert number == signal.SIGKILL or not all(end.done() for end in ends)
        os.kill(process.pid, signal.SIGKILL)
        for end in ends:
            with pytest.raises(RuntimeError):
                end.result(FREE_S)
        again = survivors(pool, free_port(), [1, 2], NUM_ENDS - 1, "chain")
        for end in again[1:]:
            for (name, got), (wanted, tensor) in zip(end.result(FREE_S), ITEMS, strict=True):
                assert name == wanted and torch.equal(got, tensor)
    process.join()


@pytest.mark.parametrize("route", ["chain", "tree", "flat"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_on_every_route_at_every_place(server: Any, route: str, rank: int) -> None:
    here, there = multiprocessing.Pipe()
    port = free_port()
    process = server.Process(target=victim, args=(port, rank, "receive", 6, there), daemon=True)
    with ThreadPoolExecutor() as pool:
        ends = survivors(pool, port, [other for other in (1, 2, 3) if other != rank], NUM_ENDS, route)
        process.start()
        assert here.poll(60) and here.recv() == "here"
        os.kill(process.pid, signal.SIGKILL)
        for end in ends:
            with pytest.raises(RuntimeError):
                end.result(FREE_S)
    process.join()


def test_who_never_comes_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WITHIN_S", 0.3)
    port = free_port()
    with ThreadPoolExecutor() as pool:
        for end in survivors(pool, port, [1, 2], NUM_ENDS, "chain"):
            with pytest.raises(RuntimeError, match=f"{HOST}:{port}"):
                end.result(FREE_S)


@pytest.mark.parametrize("fails", ["load", "stop reading"])
def test_an_end_that_fails_by_itself_leaves_too(fails: str) -> None:
    """Its process lives on, and yet nobody waits for it."""

    def receives(port: int) -> None:
        items: Iterator[Any] = WeightGroup(HOST, port, 1, 3, lossy=True).receive()
        next(items)
        if fails == "load":
            items.throw(ValueError("no such parameter"))  # type: ignore[attr-defined]
        items.close()  # type: ignore[attr-defined]

    port = free_port()
    with ThreadPoolExecutor() as pool:
        failing: Callable[[], None] = lambda: receives(port)  # noqa: E731
        ends, one = survivors(pool, port, [2], 3, "flat"), pool.submit(failing)
        for end in ends:
            with pytest.raises(RuntimeError):
                end.result(FREE_S)
        assert isinstance(one.exception(FREE_S), ValueError if fails == "load" else type(None))
