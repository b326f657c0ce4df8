"""Time by operator of torch.profiler's traces: own times add up to the time that anything ran, and wrong files are told."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lab.cli import app
from lab.errors import InputError
from lab.operators import FOLDER, latest, of_trace, operators


def event(name: str, start: float, seconds: float, thread: int = 1, kind: str = "cpu_op") -> dict[str, Any]:
    """Times in microseconds."""
    return {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": seconds}


NESTED = [
    event("linear", 0, 100), event("mm", 10, 60), event("copy", 20, 10), event("mm", 75, 20), event("linear", 100, 50),
    event("mm", 0, 7, thread=2),
]  # fmt: skip


def test_what_an_operator_calls_is_not_its_own_time() -> None:
    found = {
        row.name: (row.num_calls, round(row.self_s * 1e6, 6), round(row.total_s * 1e6, 6)) for row in operators(NESTED)
    }
    assert found == {"linear": (2, 70, 150), "mm": (3, 77, 87), "copy": (1, 10, 10)}


@st.composite
def forests(draw: st.DrawFn, start: int = 0, most: int = 1000) -> list[dict[str, Any]]:
    """Operators of one thread that follow each other or lie inside each other."""
    found, at = [], start
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(at, most))
        end = draw(st.integers(begin, most))
        found.append(event(draw(st.sampled_from("abc")), begin, end - begin))
        if end - begin > 3 and draw(st.booleans()):
            found += draw(forests(begin, end))
        at = end
    return found


@given(forests())
def test_own_times_add_up_to_the_time_that_anything_ran(events: list[dict[str, Any]]) -> None:
    busy = {moment for one in events for moment in range(one["ts"], one["ts"] + one["dur"])}
    rows = operators(events)
    assert sum(row.self_s for row in rows) == pytest.approx(len(busy) * 1e-6)
    assert sum(row.num_calls for row in rows) == len(events)
    assert all(0 <= row.self_s <= row.total_s + 1e-12 for row in rows)


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_a_trace_is_printed(tmp_path: Path) -> None:
    path = write(
        tmp_path / FOLDER / "update_actor-2-actor.train.0.json.gz", [*NESTED, event("run", 0, 999, kind="user")]
    )
    told = CliRunner().invoke(app, ["report", str(path), "--json"])
    assert told.exit_code == 0
    assert [row["name"] for row in json.loads(told.stdout)["operators"]] == ["mm", "linear", "copy"]
    assert "linear" in CliRunner().invoke(app, ["report", str(path)]).stdout


def test_the_latest_trace_of_each_stage_is_found(tmp_path: Path) -> None:
    for name in ("update_actor-2-a", "update_actor-10-a", "rollout-3-b", "rollout-x-b"):
        write(tmp_path / FOLDER / f"{name}.json.gz", NESTED)
    write(tmp_path / FOLDER / ".rollout-4-b.17.json.gz", NESTED)
    found = {name: path.name.removesuffix(".json.gz") for name, path in latest(tmp_path).items()}
    assert found == {"rollout on b": "rollout-3-b", "update_actor on a": "update_actor-10-a"}
    assert latest(tmp_path / "none") == {}


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\x1f\x8b\x08 cut", b'{"traceEvents": 3}', b"seed: 0"])
def test_another_file_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"not a trace of torch\.profiler"):
        of_trace(path)
