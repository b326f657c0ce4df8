"""What of new weights travels: all of it, the parameters that changed, or eight bits of each with a scale for each block.

A `Packer` stands on the trainer's side, an `Unpacker` on the engine's; both keep the weights of before where only changes
travel. A `Parcel` is sent tensor by tensor, or as one blob: a safetensors file, whose SHA-256 is its digest.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from executor.lora import merged

Payload = Literal["full", "delta", "int8"]
Named = Iterator[tuple[str, Tensor]]
BLOCK = 128
"""parameters that share a scale, as `lab.policies.weight_sync.SCALE_BYTES` counts them"""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""by the names that safetensors files have for them"""
_ORDER = "order"
_SCALES, _PLACES, _BITS, _VALUES = "|scales", "|places", "|bits", "|values"


class Damaged(Exception):
    """Bytes that are not what was published."""


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """New weights as they travel."""

    tensors: dict[str, Tensor]
    """by the names of parameters, with a suffix where a parameter travels as two tensors, which are adjacent"""
    about: dict[str, str]
    """how they are packed: `payload`, and of int8 the `dtype` that they had"""
    notes: dict[str, float] = field(default_factory=dict)
    """what packing them found: `changed_share`, of delta; `error_max` and `error_relative`, of int8"""

    @property
    def num_bytes(self) -> float:
        """Of the tensors."""
        return float(sum(tensor.nbytes for tensor in self.tensors.values()))

    def blob(self) -> bytes:
        """All of it."""
        order = {_ORDER: "\n".join(self.tensors)}  # the file's own is another one
        return save({name: _owned(tensor) for name, tensor in self.tensors.items()}, metadata=self.about | order)


def digest(blob: bytes | bytearray) -> str:
    """SHA-256, in hexadecimal digits."""
    return hashlib.sha256(blob).hexdigest()


def opened(blob: bytes | bytearray, expected: str) -> Parcel:
    """A parcel that arrived. Raises Damaged where its digest is not the expected one."""
    if digest(blob) != expected:
        raise Damaged(f"{len(blob)} bytes of weights have another digest than was published")
    return _parsed(blob if isinstance(blob, bytearray) else bytearray(blob))


def _parsed(blob: bytearray) -> Parcel:
    """The tensors lie in the blob's memory."""
    start = 8 + int.from_bytes(blob[:8], "little")
    table = json.loads(bytes(blob[8:start]))
    about, body = table.pop("__metadata__", {}), torch.frombuffer(blob, dtype=torch.uint8)[start:]
    tensors = {}
    for name in filter(None, about.pop(_ORDER).split("\n")):
        one = table[name]
        tensors[name] = body[slice(*one["data_offsets"])].view(DTYPES[one["dtype"]]).view(one["shape"])
    return Parcel(tensors=tensors, about=about)


class Packer:
    """The trainer's side."""

    def __init__(self, payload: Payload, start: Mapping[str, Tensor] | None = None) -> None:
        """`start`: what engines have at first; needed for delta."""
        self._payload = payload
        self._held = {name: _owned(tensor) for name, tensor in (start or {}).items()} if payload == "delta" else {}

    def pack(self, weights: Mapping[str, Tensor]) -> Parcel:
        """The next version of the weights."""
        return PACKINGS[self._payload](self, {name: tensor.detach().cpu() for name, tensor in weights.items()})

    def whole(self) -> Parcel:
        """Of delta: the latest version as a whole, for an engine that has none of it."""
        return Parcel(tensors=dict(self._held), about={"payload": "full"})

    def _full(self, weights: Mapping[str, Tensor]) -> Parcel:
        return Parcel(tensors=dict(weights), about={"payload": "full"})

    def _int8(self, weights: Mapping[str, Tensor]) -> Parcel:
        tensors: dict[str, Tensor] = {}
        worst = wrong = whole = 0.0
        for name, tensor in weights.items():
            numbers, scales = quantized(tensor)
            tensors |= {name: numbers, name + _SCALES: scales}
            gap = (dequantized(numbers, scales, torch.float32) - tensor.float()).flatten()
            worst = max(worst, float(gap.abs().max()) if len(gap) else 0.0)
            wrong, whole = wrong + float(gap.square().sum()), whole + float(tensor.float().square().sum())
        dtype = next((str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()), "float32")
        notes = {"error_max": worst, "error_relative": (wrong / whole) ** 0.5 if whole else 0.0}
        return Parcel(tensors=tensors, about={"payload": "int8", "dtype": dtype}, notes=notes)

    def _delta(self, weights: Mapping[str, Tensor]) -> Parcel:
        tensors: dict[str, Tensor] = {}
        num_changed = 0
        for name, tensor in weights.items():
            changed = (tensor != self._held[name]).flatten()
            number = int(changed.sum())
            if not number:
                continue
            num_changed += number
            tensors |= _places(name, changed, number) | {name + _VALUES: tensor.flatten()[changed]}
            self._held[name].copy_(tensor)
        share = num_changed / max(sum(tensor.numel() for tensor in weights.values()), 1)
        return Parcel(tensors=tensors, about={"payload": "delta"}, notes={"changed_share": share})


PACKINGS: dict[Payload, Callable[[Packer, Mapping[str, Tensor]], Parcel]] = {
    "full": Packer._full,
    "int8": Packer._int8,
    "delta": Packer._delta,
}


class Unpacker:
    """The engine's side; `seconds` of unpacking so far, without the waits for what arrives."""

    def __init__(self, base: Mapping[str, Tensor] | None = None, factor: float | None = None) -> None:
        """`base`: of delta all that the engine has, whose memory is then this one's; or, with a `factor`, the matrices
        that have adapters, whose product counts so many times."""
        self._base, self._factor = dict(base or {}), factor
        self.seconds = 0.0

    def unpack(self, about: Mapping[str, str], items: Iterable[tuple[str, Tensor]]) -> Named:
        """What changes in the network, whole tensors by Hugging Face's names; of delta all of them, because an engine
        loads matrices that it keeps as one only together."""
        if about.get("payload") == "delta":
            yield from self._changed(iter(items))
            return
        plain = self._dequantized(about, iter(items)) if about.get("payload") == "int8" else items
        if self._factor is not None:
            yield from merged(self._base, dict(plain), self._factor)
        elif self._base:
            yield from self._replaced(plain)
        else:
            yield from plain

    def _replaced(self, items: Iterable[tuple[str, Tensor]]) -> Named:
        """The whole, for an engine to which changes come otherwise."""
        for name, tensor in items:
            yield name, self._base[name].copy_(tensor)

    def _dequantized(self, about: Mapping[str, str], items: Named) -> Named:
        for name, numbers in items:
            _, scales = next(items)
            start = time.perf_counter()
            tensor = dequantized(numbers, scales, getattr(torch, about["dtype"]))
            self.seconds += time.perf_counter() - start
            yield name, tensor

    def _changed(self, items: Named) -> Named:
        for key, places in items:
            _, values = next(items)
            start = time.perf_counter()
            name, kind = key.rsplit("|", 1)
            held = self._base[name]
            at = places.long() if f"|{kind}" == _PLACES else _set_bits(places, held.numel())
            held.view(-1)[at] = values
            self.seconds += time.perf_counter() - start
        yield from self._base.items()


def _places(name: str, changed: Tensor, number: int) -> dict[str, Tensor]:
    """Which parameters changed: four bytes for each, or a bit for every parameter where that is less."""
    if 4 * number <= len(changed) / 8:
        return {name + _PLACES: changed.nonzero().flatten().int()}
    return {name + _BITS: torch.from_numpy(np.packbits(changed.numpy()))}


def _set_bits(bits: Tensor, number: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=number).astype(np.bool_))


def quantized(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Eight-bit numbers in the tensor's shape, and a float32 scale for each block of its flattened values.

    The largest magnitude of a block becomes 127, as in blockwise quantization (DeepSeek-V3 report 2024, section 3.3).
    """
    flat = tensor.detach().float().flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1) / 127
    numbers = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
    return numbers.flatten()[: len(flat)].view(tensor.shape).contiguous(), scales


def dequantized(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What `quantized` was given, to half a scale."""
    flat = numbers.flatten().float()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK) * scales[:, None]
    return blocks.flatten()[: len(flat)].view(numbers.shape).to(dtype)


def _owned(tensor: Tensor) -> Tensor:
    """A copy in memory of its own."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
