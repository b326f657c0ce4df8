"""What it takes to send samples: their bytes, and the time to pack and unpack them on a host."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lab.scenario import Scenario

ID_BYTES = 8.0
"""of a token id: frameworks keep them as int64 tensors (verl's DataProto, OpenRLHF's Experience)"""
FLOAT_BYTES = 4.0
"""of a log-probability"""
SAMPLE_BYTES = 64.0
"""beside its tokens: which sample it is, policy version, lengths; order of a message's header"""


class Codec(NamedTuple):
    """What a compressor does on one core.

    Ratios are compressed over raw bytes: of the ids of one sample of 900 tokens, of the ids of many samples together, and
    of log-probabilities, which have little to spare. Speeds are of raw bytes per second.
    """

    alone: float
    together: float
    floats: float
    packing: float
    unpacking: float


CODECS = {
    "none": Codec(1.0, 1.0, 1.0, float("inf"), float("inf")),
    "lz4": Codec(0.38, 0.26, 1.0, 600e6, 2000e6),
    "zstd": Codec(0.235, 0.155, 0.91, 240e6, 800e6),
}
"""by `experience.compression`. Ratios: measured once on the 375,000 int64 ids of the Rust book in the tokenizer of Qwen,
with zstd 1.5 at level 3 and lz4 1.10 (pyarrow 26): zstd saves 76 % of a sample and 85 % of many, lz4 62 % and 74 %; as int32,
which has fewer zeros to drop, zstd saves 57 % and 74-76 %. Chinese prose: 71-76 % as int64. Speeds: as measured there on
one core of a busy server; zstd's own table has 350 and 1,550 MB/s on a desktop at this level, lz4's 675 and 3,850"""


class Transport(NamedTuple):
    """What a way of sending costs on the hosts."""

    packing: float
    """bytes per second of the sender's copy; infinite: sent as it lies"""
    unpacking: float
    message_s: float
    """of each message, on its sender"""
    trips: float
    """latencies of the way before a message is known to have arrived"""


TRANSPORTS = {
    "rpc": Transport(1e9, 1e9, 1e-3, 2.0),
    "object_store": Transport(5e9, float("inf"), 2e-4, 2.0),
    "rdma": Transport(float("inf"), float("inf"), 5e-6, 1.0),
    "shared_memory": Transport(5e9, float("inf"), 2e-5, 0.0),
}
"""by `experience.transport`. rpc: pickle or protobuf copy, and TCP's copies in the kernel: about 1 GB/s a core, and about
1 ms a call in Python (gRPC's benchmarks, Ray's own). object_store: one copy into Ray's store, about 5,000 puts a second
(Ray's microbenchmark), read without a copy. shared_memory: one copy. Copies: the library's shared-memory link"""


def id_bytes(tokens: float) -> float:
    """Of the ids of so many tokens."""
    return ID_BYTES * tokens


def float_bytes(scenario: Scenario, responses: float, num_floats: int = 0) -> float:
    """Of what goes with so many response tokens: the engine's log-probabilities, and `num_floats` others for each token.

    The k largest go with their ids.
    """
    said = scenario.experience
    kept = "none" if said is None else said.logprobs
    each = {
        "none": 0.0,
        "sampled": FLOAT_BYTES,
        "top_k": (FLOAT_BYTES + FLOAT_BYTES) * float((said and said.top_k) or 0),
        "full": FLOAT_BYTES * scenario.spec("actor").vocabulary,
    }[kept]
    return (each + FLOAT_BYTES * num_floats) * responses


class Message(NamedTuple):
    """Samples that are sent together."""

    raw: float
    """bytes before they are compressed"""
    sent: float
    packing_s: float
    unpacking_s: float


def message(scenario: Scenario, num_samples: int, tokens: float, responses: float, num_floats: int = 0) -> Message:
    """A message of samples with so many tokens in all, of which so many are of responses."""
    said = scenario.experience
    codec = CODECS["none" if said is None else said.compression]
    way = TRANSPORTS["rpc" if said is None else said.transport]
    ids, floats = id_bytes(tokens), float_bytes(scenario, responses, num_floats)
    ratio = codec.together + (codec.alone - codec.together) / max(num_samples, 1)
    raw = ids + floats + SAMPLE_BYTES * num_samples
    sent = ids * ratio + floats * codec.floats + SAMPLE_BYTES * num_samples
    packing = way.message_s + raw / codec.packing + sent / way.packing
    return Message(raw=raw, sent=sent, packing_s=packing, unpacking_s=sent / way.unpacking + raw / codec.unpacking)
