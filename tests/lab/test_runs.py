"""Run folders: complete, or saying how far they came."""

import json
import os
import signal
from pathlib import Path

import msgspec
import pytest

from lab import runs
from lab.errors import InputError
from lab.load import load
from lab.timeline import Span, Timeline, header_of

SCENARIO = load("scenarios/quickstart.yaml").replace({"num_steps": 3})


def spans(steps: int) -> list[Span]:
    worker = "actor.train[0]"
    return [
        Span(
            span_id=f"{stage}/{k}/{worker}", resource=worker, worker=worker, pool="all", step=k, stage=stage,
            start_s=k + i / 2, end_s=k + i / 2 + 0.5,
        )
        for k in range(steps)
        for i, stage in enumerate(("update_actor", "weight_sync"))
    ]  # fmt: skip


def test_a_finished_run_reads_back_and_has_every_file(tmp_path: Path) -> None:
    timeline = Timeline.of(header_of(SCENARIO, "measured"), spans(3))
    folder = runs.begin(tmp_path, SCENARIO, "measured")
    summary = runs.finish(folder, SCENARIO, timeline)
    assert runs.read(folder) == timeline
    assert {path.name for path in folder.iterdir()} == {
        "run.json", "scenario.yaml", "spans.parquet", "trace.json", "report.html"
    }  # fmt: skip
    assert json.loads((folder / "run.json").read_text())["summary"] == summary
    assert runs.read_scenario(folder).workload == SCENARIO.workload
    assert runs.list_runs(tmp_path) == [folder]


def test_two_runs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    assert len({runs.begin(tmp_path, SCENARIO, "simulated") for _ in range(5)}) == 5


def test_a_killed_run_keeps_its_finished_steps_and_says_that_it_was_interrupted(tmp_path: Path) -> None:
    folder = runs.begin(tmp_path, SCENARIO, "measured")
    lines = [msgspec.json.encode(span) for span in spans(2)]
    (folder / "spans.jsonl").write_bytes(b"\n".join(lines) + b"\n" + lines[0][:20])
    timeline = runs.read(folder)
    assert timeline.header.status == "interrupted"
    assert list(timeline.spans) == spans(2)


@pytest.mark.parametrize(("file", "line"), [
    ("spans.jsonl", b"{broken"), ("spans.jsonl", b'{"span_id": 3}'), ("spans.jsonl", b"\xff"),
    ("learning.jsonl", b"{broken"), ("learning.jsonl", b"[1]"), ("learning.jsonl", b'{"reward": 1}'), ("learning.jsonl", b"\xff"),
])  # fmt: skip
def test_a_damaged_line_is_told_with_its_place(tmp_path: Path, file: str, line: bytes) -> None:
    folder = runs.begin(tmp_path, SCENARIO, "measured")
    (folder / "spans.jsonl").write_bytes(b"\n".join(msgspec.json.encode(span) for span in spans(2)) + b"\n")
    (folder / "learning.jsonl").write_bytes(b'{"step": 0}\n')
    with (folder / file).open("ab") as end:
        end.write(line + b"\n")
    number = len((folder / file).read_bytes().splitlines())
    with pytest.raises(InputError, match=f"line {number} of {file} is damaged"):
        runs.read(folder)


@pytest.mark.parametrize("tail", [1, 3, 4, 5, 100])
@pytest.mark.parametrize("content", [b"", b"\n", b"cut", b"one\n", b"one\ntwo\n", b"one\ntwo\ncut", b"one\n\ncut off"])
def test_a_file_is_mended_whatever_part_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, tail: int
) -> None:
    monkeypatch.setattr(runs, "TAIL_BYTES", tail)
    path = tmp_path / "file"
    path.write_bytes(content)
    runs.mend(path)
    assert path.read_bytes() == b"".join(line for line in content.splitlines(keepends=True) if line.endswith(b"\n"))


@pytest.mark.parametrize(("before", "after"), [
    (b"", b""), (b"one\n", b"one\n"), (b"one\ntw", b"one\n"), (b"on", b""), (b"one\n\n", b"one\n\n"),
])  # fmt: skip
def test_a_half_written_line_is_cut_off(tmp_path: Path, before: bytes, after: bytes) -> None:
    runs.mend(tmp_path / "absent")
    (tmp_path / "file").write_bytes(before)
    runs.mend(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == after


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1", b'{"header": {"scenario": 3}}'])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(InputError, match="not a run"):
        runs.read(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="--out"):
        runs.begin(tmp_path / "file", SCENARIO, "simulated")


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    runs.write_atomically(path, b"old")
    with pytest.raises(TypeError):
        runs.write_atomically(path, "text")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"


def test_a_finished_run_without_its_spans_is_no_run(tmp_path: Path) -> None:
    folder = runs.begin(tmp_path, SCENARIO, "measured")
    runs.finish(folder, SCENARIO, Timeline.of(header_of(SCENARIO, "measured"), spans(3)))
    (folder / "spans.parquet").unlink()
    with pytest.raises(InputError, match="missing"):
        runs.read(folder)


def test_a_run_that_is_executed_is_nobody_elses(tmp_path: Path) -> None:
    folder = runs.begin(tmp_path, SCENARIO, "measured")
    with runs.locked(folder):
        with pytest.raises(InputError, match=f"process {os.getpid()} is running it"), runs.locked(folder):
            pass
        assert (folder / "lock").exists()
    assert not (folder / "lock").exists()
    with runs.locked(folder):
        pass


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    folder = runs.begin(tmp_path, SCENARIO, "measured")
    child = os.fork()
    if child == 0:
        with runs.locked(folder):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert (folder / "lock").exists(), "what it left behind holds nobody up"
    with runs.locked(folder):
        assert (folder / "lock").read_text() == str(os.getpid())


def test_a_write_that_fails_leaves_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        runs.write_atomically(tmp_path / "run.json", "text")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("file", "content", "stays"), [
    (None, b"", False), ("log.jsonl", b"{}\n", False), ("spans.jsonl", b"", False), ("spans.jsonl", b"half", False),
    ("spans.jsonl", b"{}\n", True), ("learning.jsonl", b"{}\n", True),
])  # fmt: skip
def test_a_run_that_is_refused_before_its_first_step_leaves_no_folder(
    tmp_path: Path, file: str | None, content: bytes, stays: bool
) -> None:
    folder = runs.begin(tmp_path, SCENARIO, "measured")
    if file is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(InputError), runs.locked(folder), runs.gone_if_refused(folder):
        raise InputError(problem="there is no Ray")
    assert folder.exists() == stays


def test_another_error_leaves_the_folder(tmp_path: Path) -> None:
    folder = runs.begin(tmp_path, SCENARIO, "measured")
    with pytest.raises(KeyError), runs.gone_if_refused(folder):
        raise KeyError("x")
    assert folder.is_dir()
