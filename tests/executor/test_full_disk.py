"""A disk that is really full while a run goes on: one message, nothing finished is lost, and the run goes on once there is
room."""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from executor import checkpoint
from lab import runs
from lab.load import dump, load
from lab.scenario import Scenario
from tests.executor.test_stopping import LAB

Make = Callable[..., Scenario]
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
PLAY = """
mount -t tmpfs -o size={size} none {disk}
cp {scenario} {disk}/scenario.yaml
cd {disk}
{lab} execute scenario.yaml --out runs 2> {kept}/first.txt &
run=$!
until [ "$(cat runs/*/learning.jsonl 2>/dev/null | wc -l)" -ge {steps} ]; do
  kill -0 $run 2>/dev/null || break
  sleep 0.01
done
head -c 1G /dev/zero > ballast 2>/dev/null
truncate -s -{left} ballast
wait $run
echo $? > {kept}/first
cp -r runs {kept}/full
rm ballast
{lab} execute scenario.yaml --resume runs/* 2> {kept}/second.txt
echo $? > {kept}/second
cp -r runs {kept}/room
"""


def may_mount() -> bool:
    """Whether this user may have a small disk of its own."""
    return (
        shutil.which("unshare") is not None and not subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode
    )


@pytest.mark.real
@pytest.mark.full
@pytest.mark.skipif(not may_mount(), reason="no user namespaces here")
@pytest.mark.parametrize("left", [0, 400_000], ids=["for nothing", "for rows, not for a checkpoint"])
def test_a_disk_that_fills_up_amid_a_run(scenario: Make, tmp_path: Path, left: int) -> None:
    disk, kept, steps = tmp_path / "disk", tmp_path / "kept", 6
    for folder in (disk, kept):
        folder.mkdir()
    chosen = scenario("quickstart", num_steps=14, checkpoint={"every_steps": 4})
    (tmp_path / "scenario.yaml").write_text(dump(chosen))
    script = PLAY.format(
        size="300m", disk=disk, scenario=tmp_path / "scenario.yaml", kept=kept, steps=steps, left=left, lab=shlex.join(LAB)
    )  # fmt: skip
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    subprocess.run([*NAMESPACE, "sh", "-c", script], env=variables, timeout=400, check=True)
    (full,), (room,) = (list((kept / name).iterdir()) for name in ("full", "room"))
    said = (kept / "first.txt").read_text()
    assert (kept / "first").read_text().strip() == "1", said
    assert "No space left" in said and "Traceback" not in said and said.count("failed:") == 1
    before = list(runs.finished_rows(full).values())
    assert [row["step"] for row in before] == list(range(len(before))) and len(before) >= steps
    assert 3 in checkpoint.steps(full / "checkpoints")
    assert not [path for path in full.rglob("*") if path.is_file() and ".part" in str(path.relative_to(full))]
    assert (kept / "second").read_text().strip() == "0", (kept / "second.txt").read_text()
    after = list(runs.finished_rows(room).values())
    assert [row["step"] for row in after] == list(range(chosen.num_steps))
    assert json.loads((room / "run.json").read_text())["header"]["status"] == "done"
    assert [row for row in after if row["step"] <= 3] == [row for row in before if row["step"] <= 3]
    assert not [path for path in room.rglob("*") if ".part" in path.name]
    assert load(room / "scenario.yaml") == chosen
