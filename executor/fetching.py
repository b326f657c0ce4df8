"""Where an engine fetches weights from: the memory of those who have them, a store, or Ray's object store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from executor import holding
from executor.holding import Blob, Gone, Granted, Holder
from executor.publishing import LATEST, MANIFEST, Offered, version_name
from lab.copies import Place
from lab.policies.weight_sync import WeightsReady


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """What brings an engine to a version."""

    blobs: list[Blob]
    """in the order in which they count"""
    source: str
    """whose they were"""

    @property
    def version(self) -> int:
        return self.blobs[-1].version

    @property
    def num_bytes(self) -> float:
        return float(sum(len(blob.data) for blob in self.blobs))


class Fetching(Protocol):
    """A place of weights, as an engine sees it."""

    def hear(self, offered: Offered) -> None:
        """Something new lies there."""
        ...

    def latest(self) -> int:
        """The latest version there, 0 where there is none."""
        ...

    def turn(self) -> Any:
        """A context: waits until the engine may fetch."""
        ...

    def fetch(self, turn: Any, held: int) -> Fetched:
        """What brings an engine from the version that it holds to the latest, unchecked. Raises Gone, or OSError."""
        ...

    def keep(self, turn: Any, fetched: Fetched) -> None:
        """It was what had been published: others may have it from this engine."""
        ...

    def close(self) -> None:
        """The engine ends."""
        ...


class FromMemory:
    """Out of the memory of the trainer's process, or of that of an engine which has fetched before."""

    def __init__(self, address: str, name: str, here: Place, holder: Holder | None, changes: bool = False) -> None:
        """`holder`: serves what was fetched to others; where `changes` travel, no whole that came in place of them."""
        self._address, self._name, self._here = address, name, here
        self._holder, self._changes = holder, changes

    def hear(self, offered: Offered) -> None:
        """The trainer is asked itself."""

    def latest(self) -> int:
        found = holding.latest(self._address)
        return 0 if found is None else found.version

    @contextmanager
    def turn(self) -> Iterator[Granted]:
        with holding.turn(self._address, self._here, self._name) as granted:
            yield granted

    def fetch(self, turn: Granted, held: int) -> Fetched:
        source = turn.source
        try:
            blobs = holding.fetch(turn.address, turn.ready.version, held)
        except (Gone, OSError):
            if turn.address == self._address:
                raise
            blobs, source = holding.fetch(self._address, turn.ready.version, held), "trainer"
        if source != "trainer" and turn.address != self._address:  # what the trainer said counts
            blobs[-1] = replace(blobs[-1], digest=turn.ready.digest)
        return Fetched(blobs=blobs, source=source)

    def keep(self, turn: Granted, fetched: Fetched) -> None:
        if self._holder is not None and not (self._changes and fetched.blobs[-1].since is None):
            self._holder.keep(fetched.blobs, fetched.blobs[0].version - 1)
            turn.holds = self._holder.address

    def close(self) -> None:
        if self._holder is not None:
            self._holder.close()


class FromStore:
    """Files; a version is whole before anybody hears of it, and one that is not there any more was overtaken."""

    def __init__(self, folder: Path, name: str, others: FromMemory | None = None) -> None:
        """`others`: engines that have read them hand them on."""
        self._folder, self._name, self._others = folder, name, others

    def hear(self, offered: Offered) -> None:
        """The file that says which is the latest is read when weights are taken."""

    def latest(self) -> int:
        found = self._ready()
        return 0 if found is None else found.version

    @contextmanager
    def turn(self) -> Iterator[Granted | None]:
        if self._others is None:
            yield None
            return
        with self._others.turn() as granted:
            yield granted

    def fetch(self, turn: Granted | None, held: int) -> Fetched:
        if turn is not None and turn.address:
            with suppress(Gone, OSError):  # who gave them on is gone: the files are there
                return self._handed_on(turn, held)
        ready = self._ready()
        if ready is None:
            raise Gone(f"{self._folder} holds no version")
        found, needed, digest = list[Blob](), ready.version, ready.digest
        while needed is not None and needed > held:
            about = self._manifest(needed, digest)
            found = [*(self._read(needed, part, about["since"]) for part in about["parts"]), *found]
            needed, digest = about["since"], ""
        return Fetched(blobs=found, source=self._name)

    def keep(self, turn: Granted | None, fetched: Fetched) -> None:
        if turn is not None and self._others is not None:
            self._others.keep(turn, fetched)

    def _handed_on(self, turn: Granted, held: int) -> Fetched:
        """From an engine; what the manifests say counts."""
        blobs, digests = holding.fetch(turn.address, turn.ready.version, held), list[str]()
        for version in dict.fromkeys(blob.version for blob in blobs):
            expected = turn.ready.digest if version == turn.ready.version else ""
            digests += [part["digest"] for part in self._manifest(version, expected)["parts"]]
        found = [replace(blob, digest=digest) for blob, digest in zip(blobs, digests, strict=True)]
        return Fetched(blobs=found, source=turn.source)

    def _ready(self) -> WeightsReady | None:
        try:
            return WeightsReady(**json.loads((self._folder / LATEST).read_bytes()))
        except FileNotFoundError:
            return None

    def _manifest(self, version: int, expected: str) -> dict[str, Any]:
        """Parts of a version. Raises Damaged where it has another digest than the event said, Gone where it is not there."""
        from executor.payload import Damaged

        path = self._folder / version_name(version) / MANIFEST
        manifest = _content(path)
        if expected and hashlib.sha256(manifest).hexdigest() != expected:
            raise Damaged(f"{path} is not what was published")
        found: dict[str, Any] = json.loads(bytes(manifest))
        return found

    def _read(self, version: int, part: dict[str, Any], since: int | None) -> Blob:
        data = _content(self._folder / version_name(version) / part["file"])
        return Blob(version=version, digest=part["digest"], data=data, since=since)

    def close(self) -> None:
        """Files are the trainer's."""
        if self._others is not None:
            self._others.close()


class FromObjects:
    """Out of Ray's object store on this machine, which gets from others' what it has not."""

    def __init__(self) -> None:
        self._offers: dict[int, Offered] = {}

    def hear(self, offered: Offered) -> None:
        if offered.since is None:
            self._offers.clear()  # it does without them
        if offered.ready is not None:
            self._offers[offered.ready.version] = offered

    def latest(self) -> int:
        return max(self._offers, default=0)

    @contextmanager
    def turn(self) -> Iterator[None]:
        yield

    def fetch(self, turn: None, held: int) -> Fetched:
        import ray

        found, needed = list[Blob](), self.latest() or None
        while needed is not None and needed > held:
            offered = self._offers.get(needed)
            if offered is None or offered.ready is None:
                raise Gone(f"nothing was heard of version {needed}")
            data = bytearray(ray.get(offered.references[0]))
            found = [Blob(version=needed, digest=offered.ready.digest, data=data, since=offered.since), *found]
            needed = offered.since
        return Fetched(blobs=found, source="object store")

    def keep(self, turn: None, fetched: Fetched) -> None:
        """What was fetched is let go."""
        self._offers = {number: offer for number, offer in self._offers.items() if number > fetched.version}

    def close(self) -> None:
        self._offers.clear()


def _content(path: Path) -> bytearray:
    try:
        return bytearray(path.read_bytes())
    except FileNotFoundError:
        raise Gone(f"{path} is there no more") from None
