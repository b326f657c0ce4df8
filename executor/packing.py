"""Samples as one message: packed into bytes, compressed as the scenario says, and unpacked again. No heavy import."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

from executor.experience import Samples
from lab.experience import Experience

CODECS = {"none": 0, "lz4": 1, "zstd": 2}
"""by `experience.compression`, the number that a message says it with"""
_NAMES = {number: name for name, number in CODECS.items()}
_HEAD = struct.Struct("<4sBQ")
"""magic, codec, bytes before compression"""
_MAGIC = b"LAB1"


class Damaged(ValueError):
    """Bytes that are no message."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Samples on their way."""

    data: bytes
    raw_bytes: int
    """before they were compressed"""
    num_samples: int

    @property
    def ratio(self) -> float:
        """Bytes that are sent over bytes before."""
        return len(self.data) / max(self.raw_bytes + _HEAD.size, 1)


def pack(samples: Samples, said: Experience) -> Message:
    """A message with these samples."""
    raw = pickle.dumps(samples, protocol=5)
    body = raw if said.compression == "none" else _codec(said.compression).compress(raw, asbytes=True)
    head = _HEAD.pack(_MAGIC, CODECS[said.compression], len(raw))
    return Message(data=head + body, raw_bytes=len(raw), num_samples=len(samples))


def unpack(data: bytes | memoryview) -> Samples:
    """The samples of a message. Raises Damaged where it is none."""
    try:
        magic, codec, size = _HEAD.unpack_from(data)
        if magic != _MAGIC or codec not in _NAMES:
            raise Damaged("not a message of samples")
        body: Any = memoryview(data)[_HEAD.size :]
        if _NAMES[codec] != "none":
            body = _codec(_NAMES[codec]).decompress(body, size, asbytes=True)
        if len(body) != size:
            raise Damaged(f"a message of {size} bytes has {len(body)}")
        found: Samples = pickle.loads(body)
    except (struct.error, OSError, pickle.UnpicklingError, EOFError) as error:
        raise Damaged(f"not a message of samples: {error}") from None
    return found


@cache
def _codec(name: str) -> Any:
    """Of Arrow: zstd at its level 3, lz4 in frames."""
    import pyarrow as pa

    return pa.Codec(name, compression_level=3) if name == "zstd" else pa.Codec(name)
