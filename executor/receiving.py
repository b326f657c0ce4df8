"""An engine's side of the publication: when it takes new weights, how they come, and what it does with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executor.fetching import Fetched, Fetching, FromMemory, FromObjects, FromStore
from executor.holding import Gone, Holder
from executor.publishing import Board, Offered
from lab.copies import Place
from lab.placement import Worker
from lab.policies import weight_sync as policy
from lab.policies.weight_sync import Act, Seen, Sync
from lab.scenario import Scenario
from lab.targets import loses_engines
from lab.wiring import batches

if TYPE_CHECKING:
    from torch import Tensor

    from executor.inference import InferenceBackend
    from executor.payload import Parcel, Unpacker
    from executor.recorder import Recorder

ATTEMPTS = 3
"""to fetch a version whose bytes came damaged, or were gone"""
UNPACKS = {"delta": "apply", "int8": "convert"}
"""by payload: the op in which an engine makes whole weights of it"""


def rule_of(scenario: Scenario) -> Sync:
    """The scenario's rule, as the policies take it."""
    chosen = scenario.weight_sync
    return Sync(trigger=chosen.trigger, every_s=chosen.every, in_flight=chosen.in_flight, kv=chosen.kv)


class Absent(Exception):
    """The others wait for this engine no longer."""


class Receiver:
    """What one engine has, and what it knows of.

    An engine that works without a barrier asks `due()` before each of its iterations: "drain": take no new sample and go
    on; "load": stand still and `load()`; "none": go on. `hear` may be called by another thread meanwhile.
    """

    def __init__(self, scenario: Scenario, worker: Worker, index: int) -> None:
        self._scenario, self._worker, self._rule = scenario, worker, rule_of(scenario)
        self.held = self.told = 0
        """version in the engine, and the latest that it knows of"""
        self._index, self._num_engines = index, len(scenario.team("actor", "generate"))
        self._every = batches(scenario)
        self._lock = threading.Lock()
        self._zero = time.monotonic()
        self._next = 0.0
        self._source: Fetching | None = None
        self._looks: tuple[Board, str] | None = None
        self.unpacker: Unpacker | None = None

    def look_at(self, board: Board, host: str) -> None:
        """Where weights are fetched from now on, as `Offering.open` said; what it serves to others is had at `host`.

        Looks of an engine that pulls are counted from this moment. Who looks there already goes on.
        """
        rule, first, looks = self._scenario.weight_sync, self._source is None, (board, host)
        if self._looks == looks:
            return
        self.close()
        self._looks = looks
        if rule.transport == "object_store":
            self._source = FromObjects()
        else:
            gives = rule.route == "tree" and self._num_engines > 1
            holder = Holder(host, self._worker.name) if gives else None
            memory = FromMemory(board.address, self._worker.name, self._here, holder, rule.payload == "delta")
            store = FromStore(Path(board.folder), self._here.site, memory if board.address else None)
            self._source = store if rule.transport == "store" else memory
        if first:
            self._zero = time.monotonic()
            self._next = self._next_look(0.0)

    def meet(self, host: str, port: int, rank: int, world_size: int) -> None:
        """Gets from the trainer once what is needed beside weights that are fetched: frozen matrices that have adapters,
        or the weights that changes are added to."""
        from executor.transfer import WeightGroup

        self.unpacker = WeightGroup(host, port, rank, world_size, lossy=loses_engines(self._scenario)).unpacker

    def due(self, num_running: int, now_s: float) -> Act:
        """What the engine does now, with so many samples running: none, drain or load. `now_s` of the monotonic clock."""
        if self._rule.trigger == "pull" and self.told <= self.held and now_s - self._zero >= self._next:
            self._look(now_s - self._zero)
        since = (self._rule.every_s or 0.0) if self.told > self.held else 0.0
        seen = Seen(held_version=self.held, published_version=self.told, since_pull_s=since, num_running=num_running)
        act = policy.due(self._rule, seen)
        return "none" if act == "look" else act

    def next_news_s(self, now_s: float) -> float | None:
        """Seconds until `due` may say something else though nobody has called `hear`; None: never."""
        if self._rule.trigger != "pull" or self.told > self.held:
            return None
        return max(self._next - (now_s - self._zero), 0.0)

    def hear(self, offered: Offered) -> None:
        """The trainer has published a version, or is about to push it. One that was overtaken, or came twice, is no
        news; an engine that pulls sees it when it looks."""
        with self._lock:
            if self._source is not None:
                self._source.hear(offered)
            ready = offered.ready
            if self._rule.trigger != "pull" and ready is not None and policy.wanted(ready, self.held):
                self.told = max(self.told, ready.version)

    def enter(self, version: int) -> None:
        """The engine was built with the weights of a version."""
        with self._lock:
            self.held = self.told = version

    def take_part(
        self, backend: InferenceBackend, recorder: Recorder, version: int, offered: Offered, timeout_s: float | None
    ) -> None:
        """Where the next step waits for all engines: waits until it knows of a version, and loads it, unless it has it.

        Raises Absent where it has not so long after the publication; the engine has what it had then.
        """
        until = float("inf") if timeout_s is None else offered.at_s + timeout_s
        self.hear(offered)
        while self.told < version:
            wait = self.next_news_s(time.monotonic())
            _sleep(until, wait if wait is not None else 0.05)
            self.due(0, time.monotonic())
        _sleep(until, 0.0)
        if self.held < version:
            self.load(backend, recorder, until)

    def load(self, backend: InferenceBackend, recorder: Recorder, until: float = float("inf")) -> dict[str, Any]:
        """Takes the latest version, recorded as a weight_sync span whose notes are returned; the engine stands still
        meanwhile. KV that older weights computed is the caller's business.

        Raises RuntimeError where the weights come damaged again and again; Absent, and loads nothing, where they come
        later than `until`, on the clock of the day.
        """
        version = self.told if self._source is None else max(self._source.latest(), self.told)
        with recorder.stage("weight_sync", max(version, 1) * self._every - 1, version) as notes:
            try:
                if self._source is None:
                    self._pushed(backend, recorder, version)
                else:
                    self._take(self._source, backend, recorder, until, notes)
            except Absent:
                notes["absent"] = True
                raise
            said = dict(notes)
        return said

    def close(self) -> None:
        """Nobody fetches from this engine any more."""
        if self._source is not None:
            self._source.close()

    @property
    def _here(self) -> Place:
        hardware, device = self._scenario.hardware, self._worker.devices[0]
        return Place(hardware.site_of(device).name, hardware.machine_of(device))

    def _look(self, now_s: float) -> None:
        """The engine asks for the latest version, when its turn comes between those of the others."""
        if self._source is not None:
            self.told = max(self.told, self._source.latest())
        self._next = self._next_look(now_s)

    def _next_look(self, now_s: float) -> float:
        return policy.next_look(self._rule.every_s or 1.0, now_s, self._index, self._num_engines)

    def _pushed(self, backend: InferenceBackend, recorder: Recorder, version: int) -> None:
        """The engine's part in a push."""
        start = time.monotonic()
        unpacking_s = backend.receive_weights()
        self._record(recorder, start, time.monotonic(), unpacking_s)
        self._has(version)

    def _take(
        self, source: Fetching, backend: InferenceBackend, recorder: Recorder, until: float, notes: dict[str, Any]
    ) -> None:
        """The engine fetches the latest version, and loads it."""
        from executor.payload import Unpacker

        self.unpacker = self.unpacker or Unpacker()
        asked, before = time.monotonic(), self.unpacker.seconds
        parcels, fetched, start = self._fetched(source, until, notes)
        backend.load_weights(self._unpacked(parcels))
        self._record(recorder, start, time.monotonic(), self.unpacker.seconds - before, bytes=fetched.num_bytes)
        self._has(fetched.version)
        notes |= {"source": fetched.source, "waited_s": start - asked}

    def _fetched(self, source: Fetching, until: float, notes: dict[str, Any]) -> tuple[list[Parcel], Fetched, float]:
        """What is to be loaded, checked, and when its turn came. What is damaged is fetched again, and not kept."""
        from executor.payload import Damaged, opened

        for attempt in range(ATTEMPTS):
            try:
                with source.turn() as turn:
                    start, fetched = time.monotonic(), source.fetch(turn, self.held)
                    parcels = [opened(blob.data, blob.digest) for blob in fetched.blobs]
                    source.keep(turn, fetched)
            except (Damaged, Gone) as error:
                wrong = error
                notes["refused"] = attempt + 1
                continue
            if time.time() > until:
                raise Absent
            return parcels, fetched, start
        raise RuntimeError(f"{self._worker.name} cannot have the new weights: {wrong}")

    def _unpacked(self, parcels: Sequence[Parcel]) -> Iterator[tuple[str, Tensor]]:
        """What changes in the network. Parts of a version follow each other; of several versions only the last counts,
        once the changes of all have been made."""
        assert self.unpacker is not None
        for i, parcel in enumerate(parcels):
            found = self.unpacker.unpack(parcel.about, parcel.tensors.items())
            if parcels[-1].about["payload"] == "delta" and i + 1 < len(parcels):
                for _ in found:
                    pass
            else:
                yield from found

    def _record(self, recorder: Recorder, start: float, end: float, unpacking_s: float, **notes: Any) -> None:
        """What unpacking took, between the tensors that arrived, is shown after the transfer."""
        recorder.op_between("transfer", start, end - unpacking_s, **notes)
        if name := UNPACKS.get(self._scenario.weight_sync.payload):
            recorder.op_between(name, end - unpacking_s, end)

    def _has(self, version: int) -> None:
        with self._lock:
            self.held, self.told = version, max(self.told, version)


def _sleep(until: float, seconds: float) -> None:
    """Raises Absent where `until`, on the clock of the day, is past before."""
    left = until - time.time()
    time.sleep(max(min(seconds, left), 0.0))
    if time.time() >= until:
        raise Absent
