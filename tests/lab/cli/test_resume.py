"""`lab execute --resume` refuses what it cannot go on with: one message, status 2, nothing changed."""

import subprocess
import sys
from pathlib import Path

import pytest

from lab import runs
from lab.load import load

LAB = [str(Path(sys.executable).parent / "lab")]
QUICK = Path("scenarios/quickstart.yaml")


def resume(run: Path) -> subprocess.CompletedProcess[str]:
    command = [*LAB, "execute", str(QUICK), "--resume", str(run)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("case", "message"), [
    ("nothing", "not a run"),
    ("simulated", "a simulated run has nothing to go on from"),
    ("other", "the run is of scenario quickstart"),
    ("running", "is running it"),
])  # fmt: skip
def test_a_run_that_cannot_be_gone_on_with(tmp_path: Path, case: str, message: str) -> None:
    folder = tmp_path / "nothing"
    if case != "nothing":
        chosen = load(QUICK).replace({"seed": 8} if case == "other" else {})
        folder = runs.begin(tmp_path, chosen, "simulated" if case == "simulated" else "measured")
    before = {path: path.read_bytes() for path in folder.rglob("*")}
    if case == "running":
        with runs.locked(folder):
            done = resume(folder)
    else:
        done = resume(folder)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and str(folder) in done.stderr and "remedy" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*")} == before
