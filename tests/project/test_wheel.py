"""The wheel, built and installed into an environment of its own, simulates from another folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lab", "profiles", "simulator", "executor")


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command outside the checkout, without this checkout on its path; returns what it printed."""
    environment = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    answer = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, f"{' '.join(map(str, command))}\n{answer.stdout}\n{answer.stderr}"
    return answer.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git tracks or would add, so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for path in sorted(one for name in PACKAGES for one in (ROOT / name).rglob("*") if one.is_file()):
        if "__pycache__" not in path.parts:
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    for name in ("pyproject.toml", "README.md"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source, cwd=folder)
    (built,) = folder.glob("rlhf_lab-*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment that holds the wheel, and sees the dependencies installed for this test run.

    Those lie in a folder named in a .pth file, of which Python processes no .pth files in turn: the editable
    installation of this checkout stays out of sight.
    """
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    run(
        *(sys.executable, "-m", "pip", "--python", folder / "bin" / "python"),
        *("install", "--quiet", "--no-deps", "--no-index", wheel),
        cwd=folder,
    )
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = (path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file())
    assert held == {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}


def test_the_packages_come_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    script = "import lab, profiles, simulator; print(*(m.__file__ for m in (lab, profiles, simulator)), sep='\\n')"
    found = run(environment / "bin" / "python", "-c", script, cwd=tmp_path).splitlines()
    assert len(found) == 3
    assert all(path.startswith(str(environment)) for path in found), found


def test_lab_simulate_runs_from_another_folder(environment: Path, tmp_path: Path) -> None:
    scenario = ROOT / "scenarios" / "ppo-7b-16gpu.yaml"
    summary = json.loads(run(environment / "bin" / "lab", "simulate", scenario, "--json", cwd=tmp_path))
    assert summary["origin"] == "simulated"
    assert summary["steps_done"] == summary["num_steps"] > 0
    assert Path(tmp_path, summary["run_dir"]).is_relative_to(tmp_path)
    assert Path(tmp_path, summary["run_dir"], "spans.parquet").is_file()


def test_lab_doctor_runs_outside_a_checkout(environment: Path, tmp_path: Path) -> None:
    answer = json.loads(run(environment / "bin" / "lab", "doctor", "--json", cwd=tmp_path))
    assert answer["commands"]["simulate"]["works"]
