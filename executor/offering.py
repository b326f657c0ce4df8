"""A trainer rank's side of the publication: new weights are packed, and pushed to the engines or left where they fetch them.

Left in the memory of the process (`executor.holding`), in Ray's object store, or as files of a store, which are whole and
have their hashes beside them before anybody hears of them.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from executor.holding import Blob, Holder
from executor.payload import Packer, Parcel, digest
from executor.publishing import LATEST, MANIFEST, Board, Offered, version_name
from executor.transfer import WeightSender
from lab.copies import Copies, Place, Source
from lab.policies.weight_sync import WeightsReady
from lab.runs import write_atomically
from lab.scenario import Scenario
from lab.targets import loses_engines

if TYPE_CHECKING:
    from executor.learner import Learner
    from executor.recorder import Recorder

T = TypeVar("T")
PREPARES = {"delta": "diff", "int8": "quantize"}
"""by payload: the op in which it is made of whole weights"""


class Offering:
    """What one rank does with new weights."""

    def __init__(self, scenario: Scenario, rank: int, world: int, recorder: Recorder) -> None:
        self._scenario, self._rank, self._world, self._recorder = scenario, rank, world, recorder
        self._rule = scenario.weight_sync
        self._packer: Packer | None = None
        self.sender: WeightSender | None = None
        self._holder: Holder | None = None
        self._folder: Path | None = None
        self._latest: tuple[int, Offered] = (-1, Offered())
        self._since = 0 if self._rule.payload == "delta" else None
        """of changes: the version that they are added to"""

    def meet(self, host: str, port: int, world_size: int, learner: Learner | None) -> None:
        """Meets engines, on rank 0, and sends them once what they need beside what will travel; without a learner they have
        that. Every rank takes part in gathering it."""
        base = ({}, None) if learner is None else self._base(learner)
        if self._rank:
            return
        if self.sender is not None:
            self.sender.leave()  # whoever still waits in the circle of before comes free
        lossy = loses_engines(self._scenario)
        self.sender = WeightSender(host, port, world_size, *base, route=self._rule.route, lossy=lossy)

    def _base(self, learner: Learner) -> tuple[Mapping[str, Tensor], float | None]:
        if self._rule.payload == "delta":
            if self._packer is None:
                self._packer = Packer(self._rule.payload, self._mine(learner.weights()))
            held = dict(self._packer.whole().tensors)
            return (held if self._rule.transport != "store" else _joined(self._together(held)), None)
        return learner.base() if learner.lora is not None and self._rank == 0 else ({}, None)

    def open(self, host: str, folder: Path) -> Board:
        """Makes ready the place where engines fetch weights; returns where they look for it."""
        if self._rule.transport == "store":
            if self._folder is None and self._rank == 0:
                shutil.rmtree(folder, ignore_errors=True)  # of a run that ended there
            self._folder = folder
        hands_on = self._rule.transport == "nccl" or (self._rule.transport == "store" and self._rule.route == "tree")
        if hands_on and self._rank == 0:
            self._holder = self._holder or Holder(host, "the trainer", self._whole)
        return Board(
            address="" if self._holder is None else self._holder.address,
            folder="" if self._folder is None else str(self._folder),
        )

    def push(self, learner: Learner) -> None:
        """Sends new weights to every engine that was met, from rank 0; every rank takes part in gathering them."""
        weights = self._gathered(learner)
        if self._rank:
            return
        assert self.sender is not None, "`meet` comes first"
        parcel = self._packed(weights)
        with self._recorder.op("transfer") as notes:
            size = self.sender.send(parcel.tensors.items(), parcel.about)
            notes |= {"bytes": size, "quantities": {"calls": 1.0, "bytes": size}}

    def offer(self, version: int, acknowledged: int, learner: Learner) -> Offered:
        """Leaves a new version where engines fetch it; one that lies there stays as it is. `acknowledged`: a version that
        all engines have."""
        if version == self._latest[0]:
            return replace(self._latest[1], at_s=time.time())
        if self._rule.payload != "delta":  # each does without the ones before; one may be on its way still
            acknowledged = max(acknowledged, version - 2)
        offered = self._offered(version, acknowledged, learner)
        self._latest = version, offered
        self._since = version if self._rule.payload == "delta" else None
        return offered

    def _offered(self, version: int, acknowledged: int, learner: Learner) -> Offered:
        weights = self._mine(self._gathered(learner))
        if self._rule.transport == "store":
            return self._upload(version, self._packed(weights), acknowledged)
        if self._rank:
            return Offered()
        if self._rule.transport == "nccl" and self._holder is not None:
            with self._holder.lock:
                parcel = self._packed(weights)
                return self._hold(self._holder, version, parcel, acknowledged)
        return self._put(version, self._packed(weights))

    def close(self) -> None:
        """Nobody fetches any more."""
        if self._holder is not None:
            self._holder.close()
        self._holder = None

    def _gathered(self, learner: Learner) -> dict[str, Tensor]:
        """Whole weights; where ranks have shards of them, this is an op of its own."""
        if learner.zero_stage < 3 or self._world == 1 or self._rule.transport == "store":
            return learner.weights()
        with self._recorder.op("reshard") as notes:
            found = learner.weights()
            notes["bytes"] = float(sum(tensor.nbytes for tensor in found.values()))
        return found

    def _packed(self, weights: Mapping[str, Tensor]) -> Parcel:
        name = PREPARES.get(self._rule.payload)
        packer = self._packer = self._packer or Packer(self._rule.payload)
        if name is None:
            return packer.pack(weights)
        with self._recorder.op(name) as notes:
            parcel = packer.pack(weights)
            notes |= {"bytes": float(sum(tensor.nbytes for tensor in weights.values())) + parcel.num_bytes}
            notes |= parcel.notes
        return parcel

    def _mine(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What this rank publishes: all on the first one, or of a store its part."""
        if self._rule.transport != "store":
            return weights if self._rank == 0 else {}
        return parts(weights, self._world)[self._rank]

    def _hold(self, holder: Holder, version: int, parcel: Parcel, acknowledged: int) -> Offered:
        with self._recorder.op("snapshot") as notes:
            blob = _blob(version, parcel, self._since)
            ready = WeightsReady(version=version, place=holder.address, digest=blob.digest)
            origin = Source(place=self._here, name=self._here.machine, ends=(holder.address,))
            holder.publish(ready, [blob], Copies(origin, self._rule.route == "tree"), acknowledged)
            notes |= _moved(parcel.num_bytes)
        return Offered(ready=ready, notes=parcel.notes)

    def _put(self, version: int, parcel: Parcel) -> Offered:
        import numpy as np
        import ray

        with self._recorder.op("snapshot") as notes:
            blob = _blob(version, parcel, self._since)
            reference = ray.put(np.frombuffer(blob.data, dtype=np.uint8))
            notes |= _moved(parcel.num_bytes)
        ready = WeightsReady(version=version, place=f"object:{reference.hex()}", digest=blob.digest)
        return Offered(ready=ready, references=(reference,), notes=parcel.notes, since=blob.since)

    def _upload(self, version: int, parcel: Parcel, acknowledged: int) -> Offered:
        assert self._folder is not None, "`open` comes first"
        own = self._folder / version_name(version)
        with self._recorder.op("upload") as notes:
            blob, name = _blob(version, parcel, self._since), f"part-{self._rank}.safetensors"
            own.mkdir(parents=True, exist_ok=True)
            write_atomically(own / name, bytes(blob.data))
            notes |= _moved(float(len(blob.data)))
        written = self._together({"file": name, "digest": blob.digest, "bytes": len(blob.data)})
        if self._rank:
            return Offered()
        manifest = json.dumps({"version": version, "since": blob.since, "parts": written}).encode()
        ready = WeightsReady(version=version, place=str(own / MANIFEST), digest=digest(manifest))
        write_atomically(own / MANIFEST, manifest)
        about = {"version": version, "place": ready.place, "digest": ready.digest}
        write_atomically(self._folder / LATEST, json.dumps(about).encode())
        if self._holder is not None:
            store = Source(place=Place(self._here.site, ""), name=self._here.site)
            self._holder.publish(ready, [], Copies(store, tree=True), acknowledged)
        retire(self._folder, version, acknowledged)
        return Offered(ready=ready, notes=parcel.notes)

    def _together(self, mine: T) -> list[T]:
        """What every rank says, once all have said it."""
        if self._world == 1:
            return [mine]
        from torch import distributed

        found: list[Any] = [None] * self._world
        distributed.all_gather_object(found, mine)
        return found

    def _whole(self) -> Blob:
        """The latest version, for an engine that has none of what it is made of."""
        assert self._packer is not None and self._holder is not None and self._holder.ready is not None, (
            "it was published"
        )
        whole = self._packer.whole().blob()
        return Blob(version=self._holder.ready.version, digest=digest(whole), data=whole)

    @property
    def _here(self) -> Place:
        trainer, hardware = self._scenario.team("actor", "train")[0], self._scenario.hardware
        device = trainer.devices[0]
        return Place(hardware.site_of(device).name, hardware.machine_of(device))


def _joined(found: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for part in found for name, tensor in part.items()}


def parts(weights: Mapping[str, Tensor], number: int) -> list[dict[str, Tensor]]:
    """Weights in the order in which they are given, in so many parts of about the same bytes."""
    found: list[dict[str, Tensor]] = [{} for _ in range(number)]
    whole, before = sum(tensor.nbytes for tensor in weights.values()), 0
    for name, tensor in weights.items():
        found[min(before * number // max(whole, 1), number - 1)][name] = tensor
        before += tensor.nbytes
    return found


def retire(folder: Path, latest: int, acknowledged: int) -> None:
    """Deletes versions that nobody will fetch: all engines have them or a later one."""
    for old in folder.glob("v*"):
        if int(old.name[1:]) <= acknowledged and int(old.name[1:]) != latest:
            shutil.rmtree(old, ignore_errors=True)


def _blob(version: int, parcel: Parcel, since: int | None) -> Blob:
    data = parcel.blob()
    return Blob(version=version, digest=digest(data), data=data, since=since)


def _moved(size: float) -> dict[str, Any]:
    return {"bytes": size, "quantities": {"calls": 1.0, "bytes": size}}
