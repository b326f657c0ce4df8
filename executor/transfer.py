"""Weights pushed from the trainer into live engines: over gloo, in a process group of their own; over plain TCP where
engines may be lost.

Rank 0 is the trainer's sender, rank 1 + e is engine e. The group stands beside the trainer's own one and beside
vLLM's; no global state is touched. Nothing here imports vLLM, so a trainer starts without it.

Where adapters are trained, only they travel: an engine gets the matrices beside which they stand once, when it meets the
sender, and merges on its own side. Where only changes travel, it gets all weights then.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from executor.payload import Unpacker
from executor.streams import Streams

TIMEOUT = timedelta(seconds=120)
"""that ends have to come together"""
DRAIN_TIMEOUT = timedelta(minutes=30)
"""that an end may take over what it does before it takes part"""
BUCKET_BYTES = 64 << 20
"""of what is filled and loaded at once, unless a single tensor is larger"""
PIECE_BYTES = 8 << 20
"""that an end passes on before the next ones have come"""
Route = Literal["chain", "tree", "flat"]
Hops = tuple[int | None, list[int]]
_ALIGNMENT = 16


class Ends(Protocol):
    """How an end reaches the others."""

    route: str

    def receive(self, piece: Tensor, source: int) -> None: ...

    def send(self, piece: Tensor, target: int) -> None: ...

    def sent(self) -> None:
        """Waits until what was sent is on its way."""

    def meet(self) -> None:
        """Waits for every end."""

    def leave(self) -> None:
        """Whoever waits for this end comes free."""


class Gloo:
    """Over gloo."""

    def __init__(self, host: str, port: int, rank: int, num_ends: int, route: str) -> None:
        self._store = TCPStore(host, port, num_ends, is_master=rank == 0, timeout=TIMEOUT)
        self._group = ProcessGroupGloo(PrefixStore("weights", self._store), rank, num_ends, TIMEOUT)
        if rank == 0:
            self._store.set("route", route)
        self.route = self._store.get("route").decode()
        self._group._set_default_timeout(DRAIN_TIMEOUT)
        self._sending, self._numbers = deque[Any](), Counter[int | None]()

    def receive(self, piece: Tensor, source: int) -> None:
        self._numbers[None] += 1
        self._group.recv([piece], source, self._numbers[None]).wait()

    def send(self, piece: Tensor, target: int) -> None:
        self._numbers[target] += 1
        self._sending.append(self._group.send([piece], target, self._numbers[target]))

    def sent(self) -> None:
        while self._sending:
            self._sending.popleft().wait()

    def meet(self) -> None:
        self._group.allreduce([torch.zeros(1)]).wait()

    def leave(self) -> None:
        self._sending.clear()  # what is on its way keeps the connections
        del self._group, self._store


class WeightGroup:
    """One end of a push. Blocks until all ends have joined.

    An end that fails leaves, so that the others, who would wait for it, fail as well. Raises RuntimeError naming the
    address where they have not come together in time, or where its port is taken.
    """

    def __init__(
        self, host: str, port: int, rank: int, world_size: int, route: Route = "chain", *, lossy: bool = False
    ) -> None:
        """`route`: as rank 0 says, whatever the others do. `lossy`: ends may die or hang; where one does, and is ended,
        all of them come free at once."""
        self.unpacker, place = Unpacker(), (host, port, rank, world_size, route)
        try:
            self._ends: Ends | None = Streams(*place, _hops) if lossy else Gloo(*place)
        except (RuntimeError, OSError) as error:
            raise RuntimeError(missed(f"{host}:{port}", f"{world_size} ends of a weight sync", error)) from error
        self._hops = _hops(self._ends.route, rank, world_size)
        if rank:
            with self.leaves():
                told, items = self._message()
                self.unpacker = Unpacker(dict(items), told["factor"])

    def leave(self) -> None:
        """Nothing is sent or received any more, and whoever waits for this end comes free."""
        if self._ends is not None:
            self._ends.leave()
        self._ends = None

    @contextmanager
    def leaves(self) -> Iterator[None]:
        """What fails here makes this end leave."""
        try:
            yield
        except BaseException:
            self.leave()
            raise

    def broadcast(self, tensor: Tensor) -> Tensor:
        """From rank 0, in place: every end passes on what it got, piece by piece."""
        (source, targets), ends = self._hops, self._joined
        for piece in tensor.view(-1).view(torch.uint8).split(PIECE_BYTES):
            if source is not None:
                ends.receive(piece, source)
            for target in targets:
                ends.send(piece, target)
        ends.sent()
        return tensor

    @property
    def _joined(self) -> Ends:
        if self._ends is None:
            raise RuntimeError("this end of a weight sync has left it")
        return self._ends

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """The named tensors that change with one `WeightSender.send`, in its order, unpacked; of adapters the matrices
        that they change.

        To be read to the end: asking for more than the last one tells the sender that all have been loaded.
        """
        with self.leaves():
            told, items = self._message()
            yield from self.unpacker.unpack(told["about"], items)
            self.meet()

    def meet(self) -> None:
        """Waits for every end."""
        with self.leaves():
            self._joined.meet()

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


def _hops(route: str, rank: int, num_ends: int) -> Hops:
    return HOPS[route](rank, num_ends)


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
        *,
        lossy: bool = False,
    ) -> None:
        """`world_size`: one sender and every engine, which may be lost where it is `lossy`. `base`: matrices that have
        adapters, whose product counts `factor` times; without a factor all weights, of which only changes will travel."""
        self._group = WeightGroup(host, port, 0, world_size, route, lossy=lossy)
        with self._group.leaves():
            self._message((base or {}).items(), {"factor": factor})

    def send(self, items: Iterable[tuple[str, Tensor]], about: Mapping[str, str] | None = None) -> float:
        """Sends named tensors, packed as is said `about` them, the names as Hugging Face's, and waits until every end
        has loaded them; returns the bytes of the tensors."""
        with self._group.leaves():
            sent = self._message(items, {"about": dict(about or {})})
            self._group.meet()
        return sent

    def leave(self) -> None:
        """Nothing is sent any more, and engines that wait for it come free."""
        self._group.leave()

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
