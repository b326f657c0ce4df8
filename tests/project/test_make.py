"""The Makefile: its help is complete, the README is true about it, setting up twice installs once."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs make as a person would, not as a part of the make that may be running these tests."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=check,
        timeout=60,
    )


def targets_in_help() -> set[str]:
    return set(re.findall(r"^\s+make ([a-z-]+) ", make("help").stdout, flags=re.MULTILINE))


def test_help_is_what_make_alone_prints() -> None:
    assert make().stdout == make("help").stdout


def test_help_lists_every_target_that_has_no_leading_dot_or_file() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = set(re.findall(r"^\.PHONY: ([a-z-]+)", text, flags=re.MULTILINE)) - {"apt"}
    assert targets_in_help() == phony


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_target_that_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE))
    assert named
    assert named - targets_in_help() == set()


def test_the_readme_names_every_target() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert targets_in_help() - set(re.findall(r"make ([a-z-]+)", text)) == {"help"}


def test_a_second_setup_installs_nothing() -> None:
    stamps = sorted((ROOT / ".venv").glob(".installed-*-warm"))
    if not stamps:
        pytest.skip("this environment was not made by `make setup`")
    before = {stamp: stamp.stat().st_mtime_ns for stamp in stamps}
    start = time.monotonic()
    answer = make("setup")
    assert answer.stdout.splitlines()[-1].startswith("set up:")
    assert "installing" not in answer.stdout
    assert {stamp: stamp.stat().st_mtime_ns for stamp in stamps} == before
    assert time.monotonic() - start < 10


def test_a_changed_lock_is_installed_again(tmp_path: Path) -> None:
    """What make would do, asked of a copy: nothing with this lock's stamp, an installation with another."""
    for name in ("Makefile", "pyproject.toml", "requirements/cpu.lock"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")

    def plan() -> str:
        return make("-C", str(tmp_path), "-n", "setup", "ACCELERATOR=cpu").stdout

    first = plan()
    assert "a new environment" in first
    assert "-r requirements/cpu.lock" in first
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    for stamp in dict.fromkeys(re.findall(r"touch (\.venv/\S+)", first)):
        (tmp_path / stamp).touch()
    assert "pip install" not in plan()
    with (tmp_path / "requirements" / "cpu.lock").open("a", encoding="utf-8") as lock:
        lock.write("# another state\n")
    assert "-r requirements/cpu.lock" in plan()
    assert "a new environment" not in plan()


def test_without_a_gpu_setup_takes_the_cpu_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for works, lock in ((0, "gpu"), (1, "cpu")):
        driver = tmp_path / "nvidia-smi"
        driver.write_text(f"#!/bin/sh\nexit {works}\n")
        driver.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.delenv("ACCELERATOR", raising=False)
        assert f"ACCELERATOR={lock}" in make("help").stdout
