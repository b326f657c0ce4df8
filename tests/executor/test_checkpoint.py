"""A checkpoint is complete or absent, whatever happens while it is written, and it holds what was written."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executor import checkpoint
from executor.checkpoint import DRIVER, MANIFEST, PART, Damaged, Rank, folder_of, staging

RANKS = [Rank(role="actor", rank=rank, world=2) for rank in range(2)] + [Rank(role="critic", rank=0, world=1)]


def part(root: Path, step: int, rank: Rank, attempt: int = 0, other: dict[str, Any] | None = None) -> None:
    """A rank's part with two files that say whose they are."""
    own = staging(root, step, attempt) / rank.name
    own.mkdir(parents=True, exist_ok=True)
    (own / "weights").write_bytes(f"{step} {rank.name} ".encode() * 500)
    (own / "numbers").write_text(json.dumps({"step": step}))
    about = {"step": step, "digest": "d", "attempt": attempt, "role": rank.role, "rank": rank.rank, "world": rank.world}
    checkpoint.seal(own, about | {"start_s": 0.0} | (other or {}))


def saved(root: Path, step: int, attempt: int = 0) -> Path:
    for rank in RANKS:
        part(root, step, rank, attempt)
    checkpoint.commit(root, step, attempt, RANKS, {"step": step})
    return folder_of(root, step)


def test_a_checkpoint_is_whole_and_its_manifest_names_every_file(tmp_path: Path) -> None:
    folder = saved(tmp_path, 3)
    manifest = checkpoint.verify(folder, RANKS)
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(manifest["files"]) | {MANIFEST} == there
    assert {f"{rank.name}/{file}" for rank in RANKS for file in ("weights", "numbers", PART)} | {DRIVER} <= there
    assert (manifest["step"], manifest["digest"], checkpoint.steps(tmp_path)) == (3, "d", [3])
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


@pytest.mark.parametrize("file", ["actor-1/weights", "critic-0/numbers", f"actor-0/{PART}", DRIVER, MANIFEST])
def test_a_changed_or_missing_file_is_named(tmp_path: Path, file: str) -> None:
    path = saved(tmp_path, 3) / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(Damaged, match=file):
        checkpoint.verify(folder_of(tmp_path, 3), RANKS)
    path.unlink()
    with pytest.raises(Damaged, match=file):
        checkpoint.verify(folder_of(tmp_path, 3), RANKS)


@pytest.mark.parametrize("other", [{"step": 2}, {"digest": "e"}, {"attempt": 1}, {"world": 3}])
def test_parts_of_different_checkpoints_never_become_one(tmp_path: Path, other: dict[str, Any]) -> None:
    for rank in RANKS[:-1]:
        part(tmp_path, 3, rank)
    with pytest.raises(Damaged, match="critic-0"):
        checkpoint.commit(tmp_path, 3, 0, RANKS, {"step": 3})
    part(tmp_path, 3, RANKS[-1], other=other)
    with pytest.raises(Damaged, match=f"critic-0/{PART} is of {next(iter(other))}"):
        checkpoint.commit(tmp_path, 3, 0, RANKS, {"step": 3})
    assert checkpoint.steps(tmp_path) == []


def test_a_part_of_another_step_under_a_manifest_that_fits_it_is_refused_by_name(tmp_path: Path) -> None:
    """Somebody copies a rank's folder from the checkpoint of another step, and the manifest's hashes with it."""
    ours, theirs = saved(tmp_path, 3), saved(tmp_path, 2)
    manifest, other = (json.loads((folder / MANIFEST).read_text()) for folder in (ours, theirs))
    for path in (theirs / "actor-1").iterdir():
        (ours / "actor-1" / path.name).write_bytes(path.read_bytes())
    manifest["files"] |= {name: entry for name, entry in other["files"].items() if name.startswith("actor-1")}
    del manifest["sha256"]
    (ours / MANIFEST).write_text(json.dumps(manifest | {"sha256": checkpoint._own_hash(manifest)}))
    with pytest.raises(Damaged, match=f"actor-1/{PART} is of step 2, not 3"):
        checkpoint.verify(ours, RANKS)


def test_ranks_of_another_world_are_refused_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path, 3)
    with pytest.raises(Damaged, match=r"actor-0/.* is of world 2, not 1"):
        checkpoint.verify(folder, [Rank(role="actor", rank=0, world=1)])
    with pytest.raises(Damaged, match="critic-1"):
        checkpoint.verify(folder, [Rank(role="critic", rank=1, world=2)])


def test_everything_is_on_disk_before_a_name_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed, renamed = list[str](), list[list[str]]()
    sync, rename = os.fsync, os.replace

    def syncing(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def renaming(source: Path, target: Path) -> None:
        if Path(target) == folder_of(tmp_path, 3):
            part_of = Path(source)
            inside = [part_of, *part_of.rglob("*")]
            renamed.append([path.name for path in inside if str(path) not in said(flushed)])
        rename(source, target)

    def said(paths: list[str]) -> set[str]:
        """A file that was written under a name with a dot has its own name by now."""
        return {str(Path(path).with_name(Path(path).name.removeprefix("."))) for path in paths} | set(paths)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", renaming)
    saved(tmp_path, 3)
    assert renamed == [[]]
    assert flushed[-1] == str(tmp_path)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 2)

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write_whole", full)
    with pytest.raises(OSError, match="No space"):
        saved(tmp_path, 3)
    assert checkpoint.steps(tmp_path) == [2]
    checkpoint.verify(folder_of(tmp_path, 2), RANKS)


def test_a_checkpoint_that_cannot_be_used_is_set_aside_not_deleted(tmp_path: Path) -> None:
    for _ in range(2):
        saved(tmp_path, 3)
        checkpoint.set_aside(tmp_path, 3)
    assert checkpoint.steps(tmp_path) == []
    assert {path.name for path in tmp_path.iterdir()} == {"damaged-step-000003-1", "damaged-step-000003-2"}


KILLED = """
import os, signal, sys
from pathlib import Path
import test_checkpoint as own
from executor import checkpoint

os.fsync = lambda descriptor: None  # what a process has written, its death does not take back
root, scene = Path(sys.argv[1]), sys.argv[2]
FILES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree")

def run(kill_at):
    count = 0
    def watch(event, arguments):
        nonlocal count
        if event in FILES:
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)
    own.SCENES[scene](at)
    os._exit(0)

kill_at = 0
while True:
    kill_at += 1
    at = root / str(kill_at)
    at.mkdir()
    own.saved(at, 1)
    if scene == "again":
        own.saved(at, 2)
    child = os.fork()
    if child == 0:
        run(kill_at)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
"""


def next_one(root: Path) -> None:
    """The checkpoint of step 2 is written, and the one before goes."""
    saved(root, 2)
    checkpoint.remove(root, 1)


def again(root: Path) -> None:
    """A checkpoint of step 2 is there and is written once more, by another attempt."""
    saved(root, 2, attempt=1)


def late(root: Path) -> None:
    """A run that was killed is put in order."""
    for rank in RANKS:
        part(root, 2, rank)
    os.replace(folder_of(root, 1), root / ".step-000001.old")
    checkpoint.tidy(root)


SCENES: dict[str, Callable[[Path], None]] = {"next": next_one, "again": again, "tidy": late}


@pytest.mark.parametrize("scene", SCENES)
def test_a_kill_at_every_file_operation_leaves_a_whole_checkpoint(
    tmp_path: Path, scene: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL before each open, mkdir, rename, remove and listing of a write; then the next attempt succeeds."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    here = Path(__file__).resolve()
    paths = os.pathsep.join([str(here.parent), str(here.parents[2])])
    command = [sys.executable, "-c", KILLED, str(tmp_path), scene]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folders = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(folders) > 15, "that many operations were killed"
    for root in folders:
        checkpoint.tidy(root)
        found = checkpoint.steps(root)
        assert found, f"killed before operation {root.name}, no checkpoint is left"
        for step in found:
            assert checkpoint.verify(folder_of(root, step), RANKS)["step"] == step
            assert (folder_of(root, step) / "actor-0" / "weights").read_bytes() == f"{step} actor-0 ".encode() * 500
        saved(root, 2, attempt=2)
        assert checkpoint.verify(folder_of(root, 2), RANKS)["attempt"] == 2
        assert {path.name for path in root.iterdir()} <= {"step-000001", "step-000002"}
