"""Weights from the trainer into live engines: a broadcast over gloo in a process group of their own.

Rank 0 is the trainer's sender, rank 1 + e is engine e. The group stands beside the trainer's own one and beside
vLLM's; no global state is touched. Nothing here imports vLLM, so a trainer starts without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

TIMEOUT = timedelta(seconds=120)


class WeightGroup:
    """One end of the broadcast. Blocks until all `world_size` ends have joined; raises after two minutes."""

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        self._store = TCPStore(host, port, world_size, is_master=rank == 0, timeout=TIMEOUT)
        self._group = ProcessGroupGloo(PrefixStore("weights", self._store), rank, world_size, TIMEOUT)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """From rank 0, in place."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor], options).wait()
        return tensor

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors of one `WeightSender.send`, in its order."""
        size = int(self.broadcast(torch.zeros(1, dtype=torch.int64)))
        header = self.broadcast(torch.zeros(size, dtype=torch.uint8))
        for name, dtype, shape in json.loads(bytes(header.numpy())):
            yield name, self.broadcast(torch.empty(shape, dtype=getattr(torch, dtype)))


class WeightSender:
    """The trainer's end."""

    def __init__(self, host: str, port: int, world_size: int) -> None:
        """`world_size`: one sender and every engine."""
        self._group = WeightGroup(host, port, 0, world_size)

    def send(self, items: Iterable[tuple[str, torch.Tensor]]) -> float:
        """Broadcasts named tensors, the names as Hugging Face's; returns the bytes of the tensors."""
        tensors = [(name, tensor.detach().cpu().contiguous()) for name, tensor in items]
        entries = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors]
        header = torch.frombuffer(bytearray(json.dumps(entries).encode()), dtype=torch.uint8)
        self._group.broadcast(torch.tensor([len(header)]))
        self._group.broadcast(header)
        for _, tensor in tensors:
            self._group.broadcast(tensor)
        return float(sum(tensor.nbytes for _, tensor in tensors))
