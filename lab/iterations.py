"""Every iteration of the engines of a measured run as one table: `engine.parquet` in its folder."""

from __future__ import annotations

import os
from pathlib import Path

from lab.timeline import Span, Timeline

FILE = "engine.parquet"
OPS = ("prefill", "decode")
COUNTS = ("sequences", "running", "waiting", "preemptions")


def iterations(timeline: Timeline) -> list[Span]:
    """The engines' iterations in order of their start."""
    return [span for span in timeline.spans if span.op in OPS and "kv_usage" in span.attrs]


def write(timeline: Timeline, path: Path) -> bool:
    """One row an iteration: worker, step, policy_version, op, start_s and end_s on the run's clock, tokens, sequences in
    it, requests running and waiting after it, preemptions, share of the KV blocks in use. False where there are none.

    In one move. Raises OSError.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = iterations(timeline)
    if not found:
        return False
    plain = ("worker", "step", "policy_version", "op", "start_s", "end_s", "tokens")
    columns = {name: [getattr(span, name) for span in found] for name in plain}
    columns |= {name: [int(span.attrs.get(name, 0)) for span in found] for name in COUNTS}
    columns["kv_usage"] = [float(span.attrs["kv_usage"]) for span in found]
    part = path.with_suffix(".part")
    try:
        pq.write_table(pa.table(columns), part, compression="zstd")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return True
