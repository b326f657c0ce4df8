"""Stages are traced by torch.profiler where that was asked for, and only there."""

import threading
from pathlib import Path

import pytest
import torch

from executor import tracing
from executor.recorder import Recorder
from lab.operators import latest, of_trace


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder into which steps 2 and 3 are traced."""
    for name, value in tracing.variables(tmp_path, 2, 2).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def work(recorder: Recorder, step: int) -> None:
    with recorder.stage("update_actor", step, step + 1) as notes:
        notes["samples"] = 1
        torch.ones(32, 32) @ torch.ones(32, 32)


def test_the_steps_that_were_asked_for_are_traced(asked: Path) -> None:
    recorder = Recorder("actor.train[0]", "all")
    for step in (-1, 1, 2, 3, 4):
        work(recorder, step)
    names = sorted(path.name for path in (asked / tracing.TRACES).iterdir())
    assert names == ["update_actor-2-actor.train.0.json.gz", "update_actor-3-actor.train.0.json.gz"]
    spans = recorder.take()
    assert [span.attrs.get("trace") for span in spans] == [None, None, *names, None]
    assert all(span.attrs["samples"] == 1 for span in spans)
    found = latest(asked)
    assert list(found) == ["update_actor on actor.train.0"]
    rows = {row.name: row for row in of_trace(found["update_actor on actor.train.0"])}
    assert rows["aten::mm"].num_calls == 1 and 0 < rows["aten::mm"].self_s < spans[3].seconds


def test_nothing_is_traced_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tracing.FOLDER, raising=False)
    recorder = Recorder("actor.train[0]", "all")
    work(recorder, 2)
    assert "trace" not in recorder.take()[0].attrs
    assert tracing.asked() == {}


def test_two_threads_at_once_are_traced_one_after_the_other(asked: Path) -> None:
    """The profiler takes one; the other works untraced."""
    inside, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with Recorder("a", "all").stage("rollout", 2):
            inside.set()
            go_on.wait(30)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(30)
    other = Recorder("b", "all")
    work(other, 2)
    go_on.set()
    thread.join()
    assert "trace" not in other.take()[0].attrs
    assert [path.name for path in (asked / tracing.TRACES).iterdir()] == ["rollout-2-a.json.gz"]


def test_an_error_inside_is_the_caller_s(asked: Path) -> None:
    recorder = Recorder("a", "all")
    with pytest.raises(ValueError, match="mine"), recorder.stage("rollout", 2):
        raise ValueError("mine")
    work(recorder, 3)
    assert [span.stage for span in recorder.take()] == ["rollout", "update_actor"]


def test_a_folder_that_cannot_be_written_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / tracing.TRACES).write_text("in the way")
    for name, value in tracing.variables(tmp_path, 0, 9).items():
        monkeypatch.setenv(name, value)
    recorder = Recorder("a", "all")
    work(recorder, 0)
    assert len(recorder.take()) == 1
