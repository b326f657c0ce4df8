"""Every line of the log is whole, and JSON."""

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor.journal import Journal


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")


def lines(path: Path) -> list[dict[str, Any]]:
    assert path.read_bytes().endswith(b"\n")
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.fixture
def said() -> list[str]:
    return []


def test_numbers_that_json_does_not_have_are_text(tmp_path: Path, said: list[str]) -> None:
    journal = Journal(tmp_path / "log.jsonl", "run ü", said.append)
    journal.line("step", 3, 4, {"loss": float("nan"), "deep": {"kl": [1.0, float("-inf")]}, "path": tmp_path})
    journal.close()
    (line,) = lines(tmp_path / "log.jsonl")
    assert (line["loss"], line["deep"]["kl"], line["path"]) == ("nan", [1.0, "-inf"], str(tmp_path))
    assert (line["experiment_id"], line["iteration"], line["model_version"]) == ("run ü", 3, 4)
    assert said == []


def test_a_line_that_an_earlier_process_died_in_does_not_take_the_next_one(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"event": "begun"}\n{"event": "sta')
    journal = Journal(path, "run", said.append)
    journal.line("ended", 1, 1, {})
    journal.close()
    assert [line["event"] for line in lines(path)] == ["begun", "ended"]


@pytest.fixture
def small_files() -> Iterator[int]:
    """Of 400 bytes at most, as on a disk that is full but for them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, before[1]))
    yield 400
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_fits_in_part_only_is_not_written_and_said_once(
    tmp_path: Path, said: list[str], small_files: int, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "log.jsonl"
    journal = Journal(path, "run", said.append)
    for step in range(6):
        journal.line("step", step, step, {"text": "x" * 40})
    assert small_files - 250 < os.path.getsize(path) <= small_files
    assert len(said) == 1 and "log.jsonl is not written" in said[0]
    whole = len(lines(path))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    journal.line("ended", 6, 6, {})
    journal.close()
    assert [line["iteration"] for line in lines(path)] == [*range(whole), 6]
