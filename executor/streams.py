"""The ends of a weight sync over plain TCP, for ends that may be lost.

gloo does not always tell who waits that a peer has died: a broadcast of a few pieces hung in every other trial. A socket
always does. Rank 0 is connected with every end, and each end with those that it sends to or receives from.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

WITHIN_S = 20.0
"""that ends come together, all of which have said before that they are free to"""
_AGAIN_S = 0.02
Hops = tuple[int | None, list[int]]
Hopping = Callable[[str, int, int], Hops]
"""by route, rank and number of ends: who sends to it and to whom it sends"""


class Streams:
    """One end. Blocks until all have come; raises OSError where they do not."""

    def __init__(self, host: str, port: int, rank: int, num_ends: int, route: str, hops: Hopping) -> None:
        self._until = time.monotonic() + WITHIN_S
        self._rank, self._peers = rank, dict[int, socket.socket]()
        try:
            with socket.create_server(("" if rank else host, 0 if rank else port), backlog=num_ends) as door:
                told = self._welcome(door, num_ends, route) if rank == 0 else self._arrive(host, port, door)
                self.route = str(told["route"])
                if rank:
                    self._introduce(door, told["addresses"], hops(self.route, rank, num_ends))
            for peer in self._peers.values():
                peer.settimeout(None)
        except BaseException:
            self.leave()
            raise

    def receive(self, piece: Tensor, source: int) -> None:
        """Fills bytes."""
        view = memoryview(piece.numpy())
        with _told():
            while len(view):
                number = self._peers[source].recv_into(view)
                if not number:
                    raise ConnectionError
                view = view[number:]

    def send(self, piece: Tensor, target: int) -> None:
        with _told():
            self._peers[target].sendall(memoryview(piece.numpy()))

    def sent(self) -> None:
        """What was sent has been taken over by the system already."""

    def meet(self) -> None:
        """Waits for every end."""
        with _told():
            if self._rank:
                self._peers[0].sendall(b"!")
                _exactly(self._peers[0], 1)
                return
            for peer in self._peers.values():
                _exactly(peer, 1)
            for peer in self._peers.values():
                peer.sendall(b"!")

    def leave(self) -> None:
        """Whoever waits for this end comes free."""
        for peer in self._peers.values():
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()
        self._peers = {}

    def _welcome(self, door: socket.socket, num_ends: int, route: str) -> dict[str, Any]:
        """Rank 0 tells everyone where the others are, once all have come."""
        addresses: dict[str, tuple[str, int]] = {}
        while len(self._peers) < num_ends - 1:
            rank, listens, peer = self._guest(door)
            self._peers[rank] = peer
            addresses[str(rank)] = (peer.getpeername()[0], listens)
        told: dict[str, Any] = {"route": route, "addresses": addresses}
        for peer in self._peers.values():
            _say(peer, told)
        return told

    def _arrive(self, host: str, port: int, door: socket.socket) -> dict[str, Any]:
        self._peers[0] = self._reach(host, port)
        _say(self._peers[0], [self._rank, door.getsockname()[1]])
        told: dict[str, Any] = _heard(self._peers[0])
        return told

    def _introduce(self, door: socket.socket, addresses: dict[str, tuple[str, int]], hops: Hops) -> None:
        """An end reaches who sends to it, and lets in those to whom it sends."""
        source, targets = hops
        if source:
            self._peers[source] = self._reach(*addresses[str(source)])
            _say(self._peers[source], [self._rank, 0])
        while not set(targets) <= self._peers.keys():
            rank, _, peer = self._guest(door)
            self._peers[rank] = peer

    def _guest(self, door: socket.socket) -> tuple[int, int, socket.socket]:
        door.settimeout(self._left)
        peer = door.accept()[0]
        self._prepared(peer)
        rank, listens = _heard(peer)
        return rank, listens, peer

    def _reach(self, host: str, port: int) -> socket.socket:
        while True:
            try:
                return self._prepared(socket.create_connection((host, port), timeout=self._left))
            except ConnectionRefusedError:  # the other one has not opened yet
                time.sleep(min(_AGAIN_S, self._left))

    def _prepared(self, peer: socket.socket) -> socket.socket:
        peer.settimeout(self._left)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return peer

    @property
    def _left(self) -> float:
        """Seconds. Raises TimeoutError where there are none."""
        if (left := self._until - time.monotonic()) <= 0:
            raise TimeoutError(f"not all ends have come within {WITHIN_S:g} s")
        return left


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f": {error}" if str(error) else ""
        raise RuntimeError(f"another end of a weight sync has left{reason}") from error


def _say(peer: socket.socket, what: Any) -> None:
    text = json.dumps(what).encode()
    peer.sendall(len(text).to_bytes(4, "little") + text)


def _heard(peer: socket.socket) -> Any:
    return json.loads(_exactly(peer, int.from_bytes(_exactly(peer, 4), "little")))


def _exactly(peer: socket.socket, number: int) -> bytes:
    found = b""
    while len(found) < number:
        came = peer.recv(number - len(found))
        if not came:
            raise ConnectionError
        found += came
    return found
