"""Weights pushed from the trainer into live engines: over gloo, in a process group of their own.

Rank 0 is the trainer's sender, rank 1 + e is engine e. The group stands beside the trainer's own one and beside
vLLM's; no global state is touched. Nothing here imports vLLM, so a trainer starts without it.

Where adapters are trained, only they travel: an engine gets the matrices beside which they stand once, when it meets the
sender, and merges on its own side. Where only changes travel, it gets all weights then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from executor.payload import Unpacker

TIMEOUT = timedelta(seconds=120)
"""that ends have to come together"""
DRAIN_TIMEOUT = timedelta(minutes=30)
"""that an end may take over what it does before it takes part; one that dies is noticed at once"""
BUCKET_BYTES = 64 << 20
"""of what is filled and loaded at once, unless a single tensor is larger"""
PIECE_BYTES = 8 << 20
"""that an end passes on before the next ones have come"""
Route = Literal["chain", "tree", "flat"]
Hops = tuple[int | None, list[int]]
_ALIGNMENT = 16


class WeightGroup:
    """One end of a push. Blocks until all `world_size` ends have joined.

    Raises RuntimeError naming the address where they have not after two minutes, or where its port is taken.
    """

    def __init__(self, host: str, port: int, rank: int, world_size: int, route: Route = "chain") -> None:
        """`route`: as rank 0 says, whatever the others do."""
        try:
            self._store = TCPStore(host, port, world_size, is_master=rank == 0, timeout=TIMEOUT)
            self._group = ProcessGroupGloo(PrefixStore("weights", self._store), rank, world_size, TIMEOUT)
        except RuntimeError as error:
            raise RuntimeError(missed(f"{host}:{port}", f"{world_size} ends of a weight sync", error)) from error
        if rank == 0:
            self._store.set("route", route)
        self._hops = HOPS[self._store.get("route").decode()](rank, world_size)
        self._num_sent = 0
        self.unpacker = Unpacker()
        if rank:
            told, items = self._message()
            self.unpacker = Unpacker(dict(items), told["factor"])
        self._group._set_default_timeout(DRAIN_TIMEOUT)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """From rank 0, in place: every end passes on what it got, piece by piece."""
        source, targets = self._hops
        pieces, sending = tensor.view(-1).view(torch.uint8).split(PIECE_BYTES), []
        for piece in pieces:
            self._num_sent += 1
            if source is not None:
                self._group.recv([piece], source, self._num_sent).wait()
            sending += [self._group.send([piece], target, self._num_sent) for target in targets]
        for under_way in sending:
            under_way.wait()
        return tensor

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """The named tensors that change with one `WeightSender.send`, in its order, unpacked; of adapters the matrices
        that they change.

        To be read to the end: asking for more than the last one tells the sender that all have been loaded.
        """
        told, items = self._message()
        yield from self.unpacker.unpack(told["about"], items)
        self.meet()

    def meet(self) -> None:
        """Waits for every end."""
        self._group.allreduce([torch.zeros(1)]).wait()

    def _message(self) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
        size = int(self.broadcast(torch.zeros(1, dtype=torch.int64)))
        told = json.loads(bytes(self.broadcast(torch.zeros(size, dtype=torch.uint8)).numpy()))
        return told, self._tensors(told["buckets"])

    def _tensors(self, buckets: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
        for bucket in buckets:
            data = self.broadcast(torch.empty(bucket["bytes"], dtype=torch.uint8))
            for name, kind, shape, start, end in bucket["tensors"]:
                yield name, data[start:end].view(getattr(torch, kind)).view(shape)


def _chain(rank: int, world_size: int) -> Hops:
    """From each end to the next."""
    return (rank - 1 if rank else None), [rank + 1] if rank + 1 < world_size else []


def _flat(rank: int, world_size: int) -> Hops:
    """From the trainer to everyone."""
    return (0, []) if rank else (None, list(range(1, world_size)))


def _tree(rank: int, world_size: int) -> Hops:
    """Whoever has it sends it to one more, and so on: in round j end r sends to end r + 2^j."""
    first = rank.bit_length()
    targets = [rank + 2**j for j in range(first, world_size.bit_length()) if rank + 2**j < world_size]
    return (rank - 2 ** (first - 1) if rank else None), targets


HOPS: dict[str, Callable[[int, int], Hops]] = {"chain": _chain, "flat": _flat, "tree": _tree}
"""by `weight_sync.topology`: of an end, who sends to it and to whom it sends, in order"""


class WeightSender:
    """The trainer's end."""

    def __init__(
        self,
        host: str,
        port: int,
        world_size: int,
        base: Mapping[str, Tensor] | None = None,
        factor: float | None = None,
        route: Route = "chain",
    ) -> None:
        """`world_size`: one sender and every engine. `base`: matrices that have adapters, whose product counts
        `factor` times; without a factor all weights, of which only changes will travel."""
        self._group = WeightGroup(host, port, 0, world_size, route)
        self._message((base or {}).items(), {"factor": factor})

    def send(self, items: Iterable[tuple[str, Tensor]], about: Mapping[str, str] | None = None) -> float:
        """Sends named tensors, packed as is said `about` them, the names as Hugging Face's, and waits until every end
        has loaded them; returns the bytes of the tensors."""
        sent = self._message(items, {"about": dict(about or {})})
        self._group.meet()
        return sent

    def _message(self, items: Iterable[tuple[str, Tensor]], told: dict[str, Any]) -> float:
        tensors = [(name, tensor.detach().cpu()) for name, tensor in items]
        buckets = list(_buckets(tensors))
        told = told | {"buckets": [about for about, _ in buckets]}
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
