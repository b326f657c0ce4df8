"""The engines' iterations as a table of their own."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from lab import iterations
from lab.timeline import Header, Span, Timeline

HEADER = Header(scenario="x", digest="0", origin="measured", seed=0, num_steps=1)


def span(op: str, start: float, **attrs: float) -> Span:
    return Span(
        span_id=f"rollout/0/e#{start}", resource="e", step=0, stage="rollout", op=op, pool="all", worker="e",
        start_s=start, end_s=start + 0.5, policy_version=3, tokens=7, attrs=attrs,
    )  # fmt: skip


FOUND = (
    span("decode", 1.0, sequences=4, running=4, waiting=1, kv_usage=0.25, preemptions=2),
    span("prefill", 0.0, sequences=8, running=8, waiting=0, kv_usage=0.5, preemptions=0),
)


def test_one_row_an_iteration_in_order(tmp_path: Path) -> None:
    others = (span("transfer", 2.0), span("decode", 3.0, quantities=1.0))
    assert iterations.write(Timeline.of(HEADER, (*FOUND, *others)), tmp_path / iterations.FILE)
    rows = pq.read_table(tmp_path / iterations.FILE).to_pylist()
    assert [(row["op"], row["start_s"], row["end_s"], row["running"]) for row in rows] == [
        ("prefill", 0.0, 0.5, 8), ("decode", 1.0, 1.5, 4),
    ]  # fmt: skip
    assert rows[1] == {
        "worker": "e", "step": 0, "policy_version": 3, "op": "decode", "start_s": 1.0, "end_s": 1.5, "tokens": 7,
        "sequences": 4, "running": 4, "waiting": 1, "preemptions": 2, "kv_usage": 0.25,
    }  # fmt: skip


def test_a_run_without_engines_has_no_table(tmp_path: Path) -> None:
    assert not iterations.write(Timeline.of(HEADER, (span("transfer", 0.0),)), tmp_path / iterations.FILE)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_leaves_nothing_half_written(tmp_path: Path) -> None:
    (tmp_path / iterations.FILE).mkdir()
    with pytest.raises(OSError):
        iterations.write(Timeline.of(HEADER, FOUND), tmp_path / iterations.FILE)
    assert [path.name for path in tmp_path.iterdir()] == [iterations.FILE]
