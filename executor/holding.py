"""Weights out of the memory of whoever has them: a small server beside each holder, and what others ask it.

A request is a line of JSON. `latest`: what the trainer published last. `turn`: from whom to fetch a version; the answer
comes when somebody is free, and is given back with the connection. `fetch`: the bytes.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any, BinaryIO

from lab.copies import Copies, Place, Source, Turn
from lab.policies.weight_sync import WeightsReady

TIMEOUT_S = 120.0
"""that an answer may take"""


class Gone(Exception):
    """A version that a holder has no more."""


@dataclass(frozen=True, kw_only=True)
class Blob:
    """A packed version, or what changed in it since the one before."""

    version: int
    digest: str
    data: bytes | bytearray
    since: int | None = None
    """the version that its changes are added to; None: nothing earlier is needed beside it"""


class _Server(ThreadingTCPServer):
    daemon_threads, allow_reuse_address = True, True

    def __init__(self, host: str, holder: Holder) -> None:
        self.holder = holder
        super().__init__((host, 0), _Answer)


class _Answer(StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError, ValueError):  # whoever asked is gone
            asked = json.loads(self.rfile.readline())
            ANSWERS[asked["ask"]](self.server.holder, asked, self)

    def say(self, answer: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(answer).encode() + b"\n")


class Holder:
    """Serves what it keeps until it is closed; the trainer's one also says who may fetch from whom."""

    def __init__(self, host: str, name: str, whole: Callable[[], Blob] | None = None) -> None:
        """`whole`: packs the latest version for somebody whom the changes that are kept do not help."""
        self.lock = threading.RLock()
        """held while what is kept changes"""
        self.ready: WeightsReady | None = None
        self.copies: Copies | None = None
        self._name, self._whole = name, whole
        self._blobs: dict[int, list[Blob]] = {}
        """by version, in as many parts as there are"""
        self._server = _Server(host, self)
        self.address = f"{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True, kwargs={"poll_interval": 0.1}).start()

    def keep(self, blobs: list[Blob], above: int = -1) -> None:
        """These are had from now on; versions up to `above` are had no more, but for the latest."""
        with self.lock:
            self._blobs |= {version: list(parts) for version, parts in groupby(blobs, key=lambda blob: blob.version)}
            latest = max(self._blobs, default=above)
            self._blobs = {number: kept for number, kept in self._blobs.items() if number > above or number == latest}

    def publish(self, ready: WeightsReady, blobs: list[Blob], copies: Copies, above: int) -> None:
        """A new version can be had from now on; without blobs it lies elsewhere."""
        with self.lock:
            self.keep(blobs, above)
            self.ready, self.copies = ready, copies

    def parcels(self, version: int, held: int) -> list[Blob]:
        """What brings somebody from the version that it holds to another. Raises Gone."""
        with self.lock:
            if version not in self._blobs:
                raise Gone(f"{self._name} has no version {version}")
            found, number = list[Blob](), version
            while number in self._blobs:
                found, since = [*self._blobs[number], *found], self._blobs[number][0].since
                if since is None or since == held:
                    return found
                number = since
            if self._whole is None or self.ready is None or self.ready.version != version:
                raise Gone(f"{self._name} has not all that changed from version {held} to {version}")
            return [self._whole()]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _latest(self, asked: dict[str, Any], to: _Answer) -> None:
        ready = self.ready
        to.say({} if ready is None else {"version": ready.version, "place": ready.place, "digest": ready.digest})

    def _fetch(self, asked: dict[str, Any], to: _Answer) -> None:
        try:
            found = self.parcels(asked["version"], asked["held"])
        except Gone as gone:
            to.say({"gone": str(gone)})
            return
        to.say(
            {
                "parcels": [
                    {"version": b.version, "digest": b.digest, "bytes": len(b.data), "since": b.since} for b in found
                ]
            }
        )
        for blob in found:
            to.connection.sendall(blob.data)

    def _turn(self, asked: dict[str, Any], to: _Answer) -> None:
        here, granted = Place(asked["site"], asked["machine"]), threading.Event()
        with self.lock:
            copies, ready = self.copies, self.ready
            if copies is None or ready is None:
                to.say({"gone": "nothing was published"})
                return
            turn = copies.ask(here, lambda number: granted.set())
        new = None
        try:
            if granted.wait(TIMEOUT_S):
                source = copies.source(turn.number or 0)
                address = source.ends[0] if source.ends else ""
                to.say({"version": ready.version, "digest": ready.digest, "name": source.name, "address": address})
                said = json.loads(to.rfile.readline() or b"{}")
                new = Source(place=here, name=said["name"], ends=(said["address"],)) if said.get("address") else None
        finally:
            self._end(copies, turn, here, new)

    def _end(self, copies: Copies, turn: Turn, here: Place, new: Source | None) -> None:
        with self.lock:
            if turn.number is None:
                copies.leave(here, turn)
            else:
                copies.release(turn.number, here, new)


ANSWERS: dict[str, Callable[[Holder, dict[str, Any], _Answer], None]] = {
    "latest": Holder._latest,
    "fetch": Holder._fetch,
    "turn": Holder._turn,
}
"""by what is asked"""


def latest(address: str) -> WeightsReady | None:
    """What the trainer published last. Raises OSError."""
    with _asking(address, {"ask": "latest"}) as (answer, _):
        return WeightsReady(**answer) if answer else None


def fetch(address: str, version: int, held: int) -> list[Blob]:
    """What brings an engine from the version that it holds to another. Raises Gone, or OSError."""
    with _asking(address, {"ask": "fetch", "version": version, "held": held}) as (answer, stream):
        return [_received(stream, about) for about in answer["parcels"]]


@dataclass(kw_only=True)
class Granted:
    """A turn to fetch; who has fetched says in `holds` where others get it from it."""

    ready: WeightsReady
    source: str
    address: str
    """empty: a store"""
    holds: str | None = None


@contextmanager
def turn(address: str, place: Place, name: str) -> Iterator[Granted]:
    """Waits for one of those who have the latest version, and has it for itself inside. Raises Gone, or OSError."""
    with _asking(address, {"ask": "turn", "site": place.site, "machine": place.machine}, speaks=True) as (said, stream):
        ready = WeightsReady(version=said["version"], place=address, digest=said["digest"])
        granted = Granted(ready=ready, source=said["name"], address=said["address"])
        yield granted
        stream.write(json.dumps({"address": granted.holds, "name": name}).encode() + b"\n")
        stream.flush()


@contextmanager
def _asking(address: str, question: dict[str, Any], speaks: bool = False) -> Iterator[tuple[dict[str, Any], Any]]:
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(json.dumps(question).encode() + b"\n")
        with connection.makefile("rwb" if speaks else "rb") as stream:
            line = stream.readline()
            if not line:
                raise ConnectionError(f"{address} gave no answer")
            answer = json.loads(line)
            if "gone" in answer:
                raise Gone(answer["gone"])
            yield answer, stream


def _received(stream: BinaryIO, about: dict[str, Any]) -> Blob:
    data = bytearray(about["bytes"])
    view, place = memoryview(data), 0
    while place < len(data):
        number = stream.readinto(view[place:])  # type: ignore[attr-defined]
        if not number:
            raise ConnectionError(f"{place} of {len(data)} bytes came")
        place += number
    return Blob(version=about["version"], digest=about["digest"], data=data, since=about["since"])
