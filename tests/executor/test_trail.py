"""What a driver remembers of a run does not grow with the run: the rest is on disk, and is read from there."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from executor import ledger, resume, trail
from executor.earlier import SPANS
from executor.ledger import Ledger, append
from executor.recorder import Recorder
from executor.trail import Known, Trail
from lab import runs
from lab.scenario import Scenario
from lab.timeline import Span
from lab.wiring import build

Make = Callable[..., Scenario]
FEW = 8


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ledger, resume, trail):
        monkeypatch.setattr(module, "REMEMBERED", FEW)


@pytest.fixture
def chosen(scenario: Make) -> Scenario:
    return scenario("quickstart", num_steps=1000)


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def begun(chosen: Scenario, root: Path) -> Ledger:
    known = Ledger(chosen, build(chosen), runs.begin(root, chosen, "measured"))
    known.start([info(chosen, "setup", -1, name) for name in chosen.workers])
    return known


def info(chosen: Scenario, stage: str, step: int, worker: str) -> dict[str, Any]:
    recorder = Recorder(worker, chosen.workers[worker].pool)
    with recorder.stage(stage, step, step):
        for _ in range(20):
            with recorder.op("forward"):
                pass
    return {"spans": recorder.take(), "learning": {f"of_{stage}": float(step)}}


def play(chosen: Scenario, known: Ledger, steps: range) -> None:
    for step in steps:
        for stage, node in known.dataflow.nodes.items():
            known.issue(stage)
            if node.runs(step):
                known.add(stage, step, [info(chosen, stage, step, name) for name in node.workers])
                if stage == "checkpoint":
                    known.saved(step)


def test_a_ledger_does_not_grow_with_the_steps(chosen: Scenario, tmp_path: Path, traced: None) -> None:
    known = begun(chosen, tmp_path)
    play(chosen, known, range(5 * FEW))
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    play(chosen, known, range(5 * FEW, 15 * FEW))
    gc.collect()
    assert tracemalloc.get_traced_memory()[0] - before < 20_000
    assert known.num_finished == 15 * FEW


def test_rows_of_steps_long_past_come_from_the_disk(chosen: Scenario, tmp_path: Path) -> None:
    known = begun(chosen, tmp_path)
    play(chosen, known, range(5 * FEW))
    assert known.row(1)["of_rollout"] == 1.0
    late = {"spans": [], "learning": {"evaluation_reward": 0.5, "of_nothing": float("nan")}}
    known.add("rollout", 1, [late])  # an evaluation may come after the end of its step
    play(chosen, known, range(5 * FEW, 10 * FEW))
    stages = [stage for stage, node in known.dataflow.nodes.items() if node.every == 1]
    expected = {"step": 1, "evaluation_reward": 0.5} | {f"of_{stage}": 1.0 for stage in stages}
    assert known.row(1) == expected
    header = known.timeline("cancelled").header
    assert [row["step"] for row in header.learning] == list(range(10 * FEW))
    assert header.learning[1] == expected
    assert all(row[f"of_{stage}"] == row["step"] for row in header.learning for stage in stages)


def test_going_back_takes_no_more_memory_after_more_steps(chosen: Scenario, tmp_path: Path, traced: None) -> None:
    def peak(steps: int) -> int:
        known = begun(chosen, tmp_path / str(steps))
        play(chosen, known, range(steps))
        known.running()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        earlier = resume.resume(chosen, known.folder)
        assert earlier.faults[-1]["steps"] == steps, "there is no checkpoint"
        return tracemalloc.get_traced_memory()[1] - before

    few, many = peak(30), peak(150)
    size = (tmp_path / "150").glob(f"*/{SPANS}")
    assert many < few + sum(path.stat().st_size for path in size) / 10


def test_stages_that_are_forgotten_count_as_causes() -> None:
    known = Known()
    for step in range(3 * FEW):
        known.add(f"rollout/{step}/a")
    last = 3 * FEW - 1
    assert f"rollout/{last}/a" in known
    assert not known.may_have(f"rollout/{last}/b")
    assert "rollout/0/a" not in known
    assert known.may_have("rollout/0/a")
    known.discard(f"rollout/{last}/a")
    assert not known.may_have(f"rollout/{last}/a")


def test_a_trail_tells_of_spans_as_they_come(tmp_path: Path) -> None:
    def span(step: int, op: str = "", **attrs: Any) -> Span:
        name = f"rollout/{step}/a" + (f"#{op}" if op else "")
        return Span(
            span_id=name, resource="a", step=step, stage="rollout", op=op, pool="p", worker="a", start_s=float(step),
            end_s=step + 1.0, policy_version=step, attrs=attrs,
        )  # fmt: skip

    found = Trail()
    for one in (span(0, aborted=2), span(1, "forward"), span(1, lost=True, aborted=3), span(2, wasted_tokens=5)):
        found.add(one)
    assert (found.ended_s, found.ends, found.num_aborted, found.num_wasted) == (3.0, {"a": 3.0}, 2, 5)
    assert found.redone == {"rollout/1/a": 1}
    assert "rollout/2/a" in found.known
    assert "rollout/1/a" not in found.known


def test_a_half_written_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append(path, [b"one", b"two"])
    with path.open("ab") as file:
        file.write(b"thr")
    assert [*runs.whole_lines(path)] == [b"one\n", b"two\n"]
    assert [*runs.whole_lines(tmp_path / "none")] == []


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    runs.write_atomically(path, b"before")
    with pytest.raises(TypeError), runs.replacing(path) as part:
        part.writelines([b"half", "no bytes"])  # type: ignore[list-item]
    assert path.read_bytes() == b"before"
    assert [*tmp_path.iterdir()] == [path]
    with runs.replacing(path) as part:
        part.write(b"after")
    assert path.read_bytes() == b"after"
