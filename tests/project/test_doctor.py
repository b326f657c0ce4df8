"""`lab doctor`: what it finds is what is there, and what it misses it says how to get."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner

doctor = importlib.import_module("lab.cli.doctor")  # the module, whatever lab.cli calls `doctor`
app = typer.Typer()
app.command()(doctor.doctor)


def report(*arguments: str) -> dict[str, dict[str, object]]:
    answer = CliRunner().invoke(app, ["--json", *arguments])
    assert answer.exit_code == 0, answer.output
    found: dict[str, dict[str, object]] = json.loads(answer.stdout)
    return found


def test_hardware_is_this_machine() -> None:
    hardware = report()["hardware"]
    assert hardware["cores"] == os.cpu_count()
    assert hardware["memory_bytes"] == psutil.virtual_memory().total
    assert hardware["cpu"]
    assert 1 <= int(str(hardware["cores_usable"])) <= len(os.sched_getaffinity(0))


def test_versions_are_those_installed() -> None:
    shown = {part["name"]: part for part in report()["installed"]}  # type: ignore[index]
    assert shown["simpy"]["version"] == importlib.metadata.version("simpy")  # type: ignore[index]


def test_a_missing_module_is_named_with_the_line_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "present", lambda module: module not in {"ray", "chromium"})
    execute = doctor.ability("execute, profile", "cpu")
    assert (execute.works, execute.missing, execute.remedy) == (False, ("ray",), "make setup")
    browser = doctor.ability("browser tests", "cpu")
    assert browser.missing == ("chromium",)
    assert "apt-get install -y chromium" in str(browser.remedy)
    assert doctor.ability("simulate", "cpu").works


def test_outside_a_checkout_pip_is_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "PROJECT", tmp_path)
    assert doctor.remedy("execute, profile", ("ray",), "gpu") == "pip install 'rlhf-lab[exec,exec-gpu]'"
    assert doctor.lock_file(()) is None


def test_status_is_1_where_simulate_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "present", lambda module: module != "simpy")
    answer = CliRunner().invoke(app, [])
    assert answer.exit_code == 1
    assert "simulate cannot run here" in answer.output


def test_a_version_that_is_not_the_locks_is_listed() -> None:
    (part,) = (part for part in doctor.installed({"packaging": "0.1"}) if part.name == "packaging")
    assert part.differs
    assert part.version == importlib.metadata.version("packaging")


def test_warming_removes_what_a_killed_build_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert doctor.stale_locks() == [lock]
    monkeypatch.setattr(doctor, "ENGINE", ())
    assert CliRunner().invoke(app, ["--warm"]).exit_code == 0
    assert not lock.exists()
