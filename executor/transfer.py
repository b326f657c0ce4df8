"""Weights from the trainer into live engines: a broadcast over gloo in a process group of their own.

Rank 0 is the trainer's sender, rank 1 + e is engine e. The group stands beside the trainer's own one and beside
vLLM's; no global state is touched. Nothing here imports vLLM, so a trainer starts without it.

Where adapters are trained, only they travel: an engine gets the matrices beside which they stand once, when it meets the
sender, and merges on its own side.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from executor.lora import merged

TIMEOUT = timedelta(seconds=120)
BUCKET_BYTES = 64 << 20
"""of one broadcast, unless a single tensor is larger"""
_ALIGNMENT = 16


class WeightGroup:
    """One end of the broadcast. Blocks until all `world_size` ends have joined.

    Raises RuntimeError naming the address where they have not after two minutes, or where its port is taken.
    """

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        try:
            self._store = TCPStore(host, port, world_size, is_master=rank == 0, timeout=TIMEOUT)
            self._group = ProcessGroupGloo(PrefixStore("weights", self._store), rank, world_size, TIMEOUT)
        except RuntimeError as error:
            raise RuntimeError(missed(f"{host}:{port}", f"{world_size} ends of a weight sync", error)) from error
        self._factor, self._base = 1.0, dict[str, Tensor]()
        if rank:
            self._factor, items = self._message()
            self._base = dict(items)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """From rank 0, in place."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor], options).wait()
        return tensor

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """The named tensors of one `WeightSender.send`, in its order; of adapters the matrices that they change.

        To be read to the end: asking for more than the last one tells the sender that all have been loaded.
        """
        _, items = self._message()
        yield from merged(self._base, dict(items), self._factor) if self._base else items
        self.meet()

    def meet(self) -> None:
        """Waits for every end."""
        self._group.allreduce([torch.zeros(1)]).wait()

    def _message(self) -> tuple[float, Iterator[tuple[str, Tensor]]]:
        size = int(self.broadcast(torch.zeros(1, dtype=torch.int64)))
        header = json.loads(bytes(self.broadcast(torch.zeros(size, dtype=torch.uint8)).numpy()))
        return header["factor"], self._tensors(header["buckets"])

    def _tensors(self, buckets: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
        for bucket in buckets:
            data = self.broadcast(torch.empty(bucket["bytes"], dtype=torch.uint8))
            for name, kind, shape, start, end in bucket["tensors"]:
                yield name, data[start:end].view(getattr(torch, kind)).view(shape)


class WeightSender:
    """The trainer's end."""

    def __init__(
        self, host: str, port: int, world_size: int, base: Mapping[str, Tensor] | None = None, factor: float = 1.0
    ) -> None:
        """`world_size`: one sender and every engine. `base`: matrices that have adapters, whose product counts
        `factor` times."""
        self._group = WeightGroup(host, port, 0, world_size)
        self._message((base or {}).items(), factor)

    def send(self, items: Iterable[tuple[str, Tensor]]) -> float:
        """Broadcasts named tensors, the names as Hugging Face's, and waits until every end has loaded them; returns
        the bytes of the tensors."""
        sent = self._message(items)
        self._group.meet()
        return sent

    def _message(self, items: Iterable[tuple[str, Tensor]], factor: float = 1.0) -> float:
        tensors = [(name, tensor.detach().cpu()) for name, tensor in items]
        buckets = list(_buckets(tensors))
        told = {"factor": factor, "buckets": [about for about, _ in buckets]}
        header = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
        self._group.broadcast(torch.tensor([len(header)]))
        self._group.broadcast(header)
        for about, members in buckets:
            self._group.broadcast(_filled(about, members))
        return float(sum(tensor.nbytes for _, tensor in tensors))


def _buckets(tensors: list[tuple[str, Tensor]]) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
    """What each broadcast holds, where in it, and the tensors."""
    entries: list[list[Any]] = []
    members: list[Tensor] = []
    place = 0
    for name, tensor in tensors:
        if members and place + tensor.nbytes > BUCKET_BYTES:
            yield {"bytes": place, "tensors": entries}, members
            entries, members, place = [], [], 0
        kind = str(tensor.dtype).removeprefix("torch.")
        entries.append([name, kind, list(tensor.shape), place, place + tensor.nbytes])
        members.append(tensor)
        place += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if members:
        yield {"bytes": place, "tensors": entries}, members


def _filled(about: dict[str, Any], members: list[Tensor]) -> Tensor:
    data = torch.empty(about["bytes"], dtype=torch.uint8)
    for (_, _, shape, start, end), tensor in zip(about["tensors"], members, strict=True):
        data[start:end].view(tensor.dtype).view(shape).copy_(tensor)
    return data


def missed(where: str, who: str, error: Exception) -> str:
    """A message for ends that could not meet."""
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return f"{who} cannot meet at {where}: another program has taken the port; start the run again"
    return f"{who} cannot meet at {where}: {text.splitlines()[0] if text else type(error).__name__}"
