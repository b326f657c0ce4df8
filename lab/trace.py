"""Timelines as Chrome trace events, which Perfetto (https://ui.perfetto.dev) opens, and back.

One process per timeline and pool, one thread per worker, and one for what a worker writes beside its work; ops lie
inside their stage, as one track's slices must nest. Flows go from each weight sync to the rollouts that use its weights.
The format: Chrome's Trace Event Format document. Event times are whole microseconds, so that no rounding in a viewer
makes an op stick out of its stage; the exact seconds are among the arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from lab.timeline import Header, Span, Timeline


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def to_chrome(timelines: Mapping[str, Timeline]) -> bytes:
    """JSON of one or several timelines; the keys prefix the names of the processes."""
    events: list[dict[str, Any]] = []
    headers = {}
    for number, (label, timeline) in enumerate(timelines.items()):
        headers[label] = msgspec.to_builtins(timeline.header)
        events += _events(label, timeline, 1000 * (number + 1))
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events, "lab": headers})


def _events(label: str, timeline: Timeline, first_pid: int) -> Iterator[dict[str, Any]]:
    workers = list(dict.fromkeys([*timeline.header.lanes, *(span.resource for span in timeline.spans)]))
    pools = list(dict.fromkeys([*timeline.header.pools, *(span.pool for span in timeline.spans)]))
    pids = {pool: first_pid + i for i, pool in enumerate(pools)}
    pool_of = {span.resource: span.pool for span in timeline.spans}
    pool_of |= {name: lane.pool for name, lane in timeline.header.lanes.items()}
    for pool, pid in pids.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"{label}: {pool}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    tids = {worker: i + 1 for i, worker in enumerate(workers)}
    for worker, tid in tids.items():
        if worker in pool_of:
            pid = pids[pool_of[worker]]
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": worker}}
    # a stage before its ops: of two slices with one start, the viewer takes the first as the outer one
    for span in sorted(timeline.spans, key=lambda span: (span.start_s, -span.end_s, bool(span.op))):
        yield _slice(span, label, pids[span.pool], tids[span.resource])
    yield from _flows(timeline, pids, tids, label)


def _slice(span: Span, label: str, pid: int, tid: int) -> dict[str, Any]:
    start = _micros(span.start_s)
    return {
        "ph": "X", "name": span.op or span.stage, "cat": label, "pid": pid, "tid": tid, "ts": start,
        "dur": _micros(span.end_s) - start, "args": msgspec.to_builtins(span),
    }  # fmt: skip


def _flows(timeline: Timeline, pids: dict[str, int], tids: dict[str, int], label: str) -> Iterator[dict[str, Any]]:
    """From the worker that sends weights to each rollout that uses them."""
    syncs = {span.span_id: span for span in timeline.stages() if span.stage == "weight_sync"}
    for span in timeline.stages():
        if span.stage != "rollout":
            continue
        source = next((syncs[cause] for cause in span.cause_ids if cause in syncs), None)
        if source is not None:
            flow = {"name": "weights", "cat": "weights", "id": f"{label}/{span.span_id}"}
            middle, start = _micros((source.start_s + source.end_s) / 2), _micros(span.start_s)
            yield flow | {"ph": "s", "pid": pids[source.pool], "tid": tids[source.worker], "ts": middle}
            yield flow | {"ph": "f", "bp": "e", "pid": pids[span.pool], "tid": tids[span.worker], "ts": start}


def from_chrome(content: bytes) -> dict[str, Timeline]:
    """The timelines in what `to_chrome` wrote, exactly.

    Raises ValueError for any other trace.
    """
    try:
        data = msgspec.json.decode(content)
        headers = {label: msgspec.convert(header, Header) for label, header in data["lab"].items()}
        spans: dict[str, list[Span]] = {label: [] for label in headers}
        for event in data["traceEvents"]:
            if event["ph"] == "X":
                spans[event["cat"]].append(msgspec.convert(event["args"], Span))
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a trace that the lab wrote: {error!r}") from None
    return {label: Timeline.of(header, spans[label]) for label, header in headers.items()}
