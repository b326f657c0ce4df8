"""Where a pool's device-seconds went: compute by stage, communication, waiting for a stage, checkpoint, idle."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from lab.intervals import Interval, divide
from lab.timeline import Span, Timeline

COMMUNICATION_STAGES = frozenset({"weight_sync", "transfer"})
SAMPLE_WAIT = "sample_wait"
"""the op of a scorer that takes samples one by one and has none"""
APART = dict.fromkeys(("transfer", "grad_sync", "all_reduce"), "communication") | {
    "bubble": "waiting:pipeline",
    SAMPLE_WAIT: "waiting:rollout",
}
"""accounts of ops that are not the computing of their stage; a bubble is the filling and draining of a pipeline"""
FAULT = "fault"
"""work that a fault undid, and coming back from it"""
DISPATCH = "waiting:dispatch"
"""between the end of what a stage waited for and its start: the driver and the calls to the workers"""


def accounts(timeline: Timeline, makespan: float) -> dict[str, dict[str, float]]:
    """By pool: shares of its device-seconds over the makespan, which add to 1; empty without any time."""
    if makespan <= 0:
        return {pool: {} for pool in timeline.header.pools}
    latest = _latest_causes(timeline.stages())
    labelled = _labelled(timeline)
    found = {}
    for pool, devices in timeline.header.pools.items():
        total: dict[str, float] = defaultdict(float)
        for workers, number in Counter(_workers(timeline, device) for device in devices).items():
            for account, seconds in _device(workers, makespan, labelled, latest).items():
                total[account] += number * seconds
        whole = makespan * len(devices)
        found[pool] = {account: seconds / whole for account, seconds in sorted(total.items()) if seconds > 0}
    return found


def _latest_causes(stages: list[Span]) -> dict[str, Span]:
    """By span, the one of its causes that ended last."""
    by_id = {span.span_id: span for span in stages}
    causes = {span.span_id: [by_id[name] for name in span.cause_ids if name in by_id] for span in stages}
    return {name: max(found, key=lambda span: (span.end_s, span.span_id)) for name, found in causes.items() if found}


def _labelled(timeline: Timeline) -> dict[str, list[tuple[Span, list[tuple[str, Interval]]]]]:
    """By worker: its stage spans, each with the accounts that its time falls into."""
    inside: dict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.op in APART:
            inside[span.span_id.split("#")[0]].append(span)
    found: dict[str, list[tuple[Span, list[tuple[str, Interval]]]]] = defaultdict(list)
    for span in [*timeline.stages(), *timeline.lost()]:
        found[span.worker].append((span, list(_parts(span, inside.get(span.span_id, [])))))
    return found


def _parts(span: Span, apart: list[Span]) -> Iterator[tuple[str, Interval]]:
    if span.lost or span.stage == "restore":
        yield FAULT, (span.start_s, span.end_s)
        return
    if span.stage in COMMUNICATION_STAGES:
        yield "communication", (span.start_s, span.end_s)
        return
    at = span.start_s
    for op in apart:
        yield span.stage, (at, op.start_s)
        yield APART[op.op], (op.start_s, op.end_s)
        at = op.end_s
    yield span.stage, (at, span.end_s)


def _workers(timeline: Timeline, device: str) -> tuple[str, ...]:
    """Who runs on a device; devices with the same workers have the same account."""
    return tuple(name for name, lane in timeline.header.lanes.items() if device in lane.devices)


def _device(
    workers: tuple[str, ...],
    makespan: float,
    labelled: dict[str, list[tuple[Span, list[tuple[str, Interval]]]]],
    latest: dict[str, Span],
) -> dict[str, float]:
    """Seconds of one device by account; workers that are active together share it equally."""
    active: dict[str, list[Interval]] = {}
    for worker in workers:
        for _, parts in labelled.get(worker, []):
            for account, interval in parts:
                active.setdefault(f"{worker}\0{account}", []).append(interval)
    shares, gaps = divide(active, (0.0, makespan))
    total: dict[str, float] = defaultdict(float)
    for key, seconds in shares.items():
        total[key.split("\0")[1]] += seconds
    spans = sorted((span for worker in workers for span, _ in labelled.get(worker, [])), key=lambda span: span.start_s)
    for account, seconds in _waits(gaps, spans, latest):
        total[account] += seconds
    return total


def _waits(gaps: list[Interval], spans: list[Span], latest: dict[str, Span]) -> Iterator[tuple[str, float]]:
    """Every gap by what the next span on the device was waiting for."""
    position = 0
    for start, end in gaps:
        while position < len(spans) and spans[position].start_s < end - 1e-12:
            position += 1
        if position == len(spans):
            yield "idle", end - start
        else:
            yield from _walk(start, end, spans[position], latest)


def _walk(start: float, end: float, span: Span | None, latest: dict[str, Span]) -> Iterator[tuple[str, float]]:
    """Back from a span through the causes that ended last, until the gap is covered."""
    while span is not None and end > start:
        cause = latest.get(span.span_id)
        if cause is None:
            break
        after = max(cause.end_s, start)
        if end > after:
            yield DISPATCH, end - after
        end, begin = min(end, after), max(cause.start_s, start)
        if end > begin:
            yield f"waiting:{cause.stage}", end - begin
            end = begin
        span = cause
    if end > start:
        yield "idle", end - start
