"""Span and Timeline: what happened, or is predicted to happen. The interchange type between all parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lab.schedule import num_batches

if TYPE_CHECKING:
    from lab.scenario import Scenario

SCHEMA_VERSION = 1


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """An observed or predicted interval.

    A span without an `op` is a stage on one worker; spans with an `op` lie inside it, on the same worker.
    `span_id` is `stage/step/worker` for a stage and `stage/step/worker#i` for its ops: equal in both worlds. What is done
    again after a fault is `stage/step/worker~2`.
    """

    span_id: str
    cause_ids: tuple[str, ...] = ()
    """spans whose end allowed this one to start; ops name their stage"""
    resource: str
    """what is held exclusively: the worker's name; of an op that goes on beside the worker's next stages, its own"""
    step: int
    stage: str
    op: str = ""
    pool: str
    worker: str
    start_s: float
    """seconds since the first step could start; setup lies before zero"""
    end_s: float
    policy_version: int = 0
    tokens: int = 0
    """tokens processed (rollout: generated and prefilled; scoring and training: of the sequences)"""
    bytes: float = 0.0
    """bytes moved"""
    attrs: dict[str, Any] = {}

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def lost(self) -> bool:
        """Whether a fault undid what was done here."""
        return "lost" in self.attrs

    @property
    def node(self) -> str:
        """The node of the dataflow that this is of."""
        return self.span_id.partition("/")[0]


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as the accounts and charts see it."""

    pool: str
    devices: tuple[str, ...]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a timeline is of, and how it came about."""

    scenario: str
    digest: str
    """of the scenario"""
    origin: str
    """simulated or measured"""
    seed: int
    num_steps: int
    barrier: bool = True
    """whether engines wait for each other at the end of a step"""
    batches: int = 1
    """of a step: spans count their steps in batches"""
    status: str = "done"
    """done, failed or cancelled"""
    startup_s: float = 0.0
    data: dict[str, Any] = {}
    """source and file, its sha256, and how many broken lines of it were skipped; empty where a task supplies all"""
    pools: dict[str, tuple[str, ...]] = {}
    """devices of each pool"""
    lanes: dict[str, Lane] = {}
    """workers by name"""
    profiles: dict[str, Any] = {}
    """by device kind: name, extrapolated_share, unmeasured"""
    memory: dict[str, Any] = {}
    """by pool: peak_bytes, capacity_bytes, fits"""
    learning: list[dict[str, Any]] = []
    """by step: reward, loss, kl, logprob_gap, … of a measured run"""
    samples: dict[str, int] = {}
    """issued, trained, dropped, aborted, lost, buffered, in_flight"""
    faults: list[dict[str, Any]] = []
    """what failed: at_s, kind, target, recovery, lost_s, lost_tokens; where the run went back, to which step, and from_s
    and until_s: what was done since the first and before the second is lost, or stood still"""
    lost_s: float = 0.0
    """seconds of the run whose work was lost or in which it came back from a fault"""
    lost_tokens: int = 0
    """response tokens generated for samples that faults took"""
    mtbf_s: float | None = None
    """mean time between faults that take the run back to a checkpoint; None where there are none"""
    storage: dict[str, Any] = {}
    """of the checkpoints: written_bytes, peak_bytes, bytes (at the end), steps (that are there at the end)"""
    wasted_tokens: int | None = None
    """response tokens generated for samples that were never trained on; None where nobody counted"""
    price_per_hour: float | None = None
    """US dollars per hour of all devices; null where a price is unknown"""
    software: dict[str, str] = {}
    host: dict[str, Any] = {}
    clock_residual_s: float = 0.0
    """largest error of one worker's clock against another's"""
    wall_s: float = 0.0
    """how long making this timeline took"""
    error: str = ""


def header_of(scenario: Scenario, origin: str) -> Header:
    """What a timeline's header says before anything has happened."""
    return Header(
        scenario=scenario.name,
        digest=scenario.digest,
        origin=origin,
        seed=scenario.seed,
        num_steps=scenario.num_steps,
        barrier=scenario.schedule.mode != "asynchronous",
        batches=num_batches(scenario.schedule, scenario.workload.samples_per_step),
        data=scenario.data.about(),
        pools=scenario.devices,
        lanes={worker.name: Lane(pool=worker.pool, devices=worker.devices) for worker in scenario.workers.values()},
    )


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Spans in order of (start, id), and a header."""

    header: Header
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, header: Header, spans: Iterable[Span]) -> Timeline:
        return cls(header=header, spans=tuple(sorted(spans, key=lambda span: (span.start_s, span.span_id))))

    def stages(self) -> list[Span]:
        """The stage spans of all steps, setup left out, and what faults undid."""
        return [span for span in self.spans if not span.op and span.step >= 0 and not span.lost]

    def lost(self) -> list[Span]:
        """The stage spans that faults undid."""
        return [span for span in self.spans if not span.op and span.step >= 0 and span.lost]

    def digest(self) -> str:
        """SHA-256 over the spans and what the header says of the work; wall time, host and paths are left out."""
        work = (self.header.digest, self.header.origin, self.header.seed, self.header.num_steps, self.header.samples)
        content = msgspec.json.encode((work, self.spans), order="deterministic")
        return hashlib.sha256(content).hexdigest()[:16]


def write_parquet(timeline: Timeline, path: Path) -> None:
    """One row a span, the header as metadata of the schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [msgspec.structs.asdict(span) | {"attrs": json.dumps(span.attrs, sort_keys=True)} for span in timeline.spans]
    table = pa.Table.from_pylist(rows, schema=_schema(pa))
    header = msgspec.json.encode(timeline.header)
    pq.write_table(table.replace_schema_metadata({"lab.header": header}), path, compression="zstd")


def read_parquet(path: Path) -> Timeline:
    """The timeline in a file that `write_parquet` wrote. Raises ValueError for any other file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        header = msgspec.json.decode((table.schema.metadata or {})[b"lab.header"], type=Header)
        rows = [row | {"attrs": json.loads(row["attrs"])} for row in table.to_pylist()]
        return Timeline(header=header, spans=tuple(msgspec.convert(rows, list[Span])))
    except (pa.ArrowException, KeyError, msgspec.MsgspecError, json.JSONDecodeError) as error:
        raise ValueError(f"not a timeline of the lab: {error}") from None


def _schema(pa: Any) -> Any:
    text, number = pa.string(), pa.float64()
    kinds = {
        "span_id": text, "cause_ids": pa.list_(text), "resource": text, "step": pa.int64(), "stage": text, "op": text,
        "pool": text, "worker": text, "start_s": number, "end_s": number, "policy_version": pa.int64(),
        "tokens": pa.int64(), "bytes": number, "attrs": text,
    }  # fmt: skip
    return pa.schema(list(kinds.items()))
