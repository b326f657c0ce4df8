import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from executor.checkpoint import MANIFEST, STATE, WEIGHTS, name, read, write
from executor.network import build_actor
from lab.library import model

STATE_OF = {"optimizer": {"step": 3, "moments": torch.arange(4.0)}, "torch": torch.get_rng_state()}


def written(folder: Path) -> tuple[Path, dict[str, torch.Tensor], float]:
    weights = {key: value.detach() for key, value in build_actor(model("tiny-llama"), 0).named_parameters()}
    path = folder / name(7, "actor", 0)
    return path, weights, write(path, weights, STATE_OF, {"step": 7})


def test_what_is_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    path, weights, size = written(tmp_path)
    found, state, manifest = read(path)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) for key in weights)
    assert torch.equal(state["optimizer"]["moments"], STATE_OF["optimizer"]["moments"])
    assert manifest["step"] == 7
    assert (
        size
        == sum((path / file).stat().st_size for file in (WEIGHTS, STATE))
        > model("tiny-llama").weight_bytes("float32")
    )


def test_nothing_half_written_lies_beside_it_and_a_second_write_replaces_it(tmp_path: Path) -> None:
    path, _, _ = written(tmp_path)
    (path.parent / f".{path.name}.part").mkdir()  # what a crash would leave
    written(tmp_path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_ranks_beyond_the_first_write_no_weights(tmp_path: Path) -> None:
    write(tmp_path / "one", None, STATE_OF, {})
    assert read(tmp_path / "one")[0] == {}


@pytest.mark.parametrize("file", [WEIGHTS, STATE])
def test_a_changed_or_missing_file_is_found(tmp_path: Path, file: str) -> None:
    path, _, _ = written(tmp_path)
    content = bytearray((path / file).read_bytes())
    content[len(content) // 2] ^= 1
    (path / file).write_bytes(content)
    with pytest.raises(ValueError, match=file):
        read(path)
    (path / file).unlink()
    with pytest.raises(ValueError, match=file):
        read(path)


def test_the_manifest_names_every_file(tmp_path: Path) -> None:
    path, _, _ = written(tmp_path)
    named = json.loads((path / MANIFEST).read_text())["sha256"]
    assert set(named) | {MANIFEST} == {entry.name for entry in path.iterdir()}


def test_the_manifest_has_the_size_of_every_file(tmp_path: Path) -> None:
    path, _, size = written(tmp_path)
    sizes = json.loads((path / MANIFEST).read_text())["bytes"]
    assert sizes == {file: (path / file).stat().st_size for file in (WEIGHTS, STATE)}
    assert sum(sizes.values()) == size


KILLED_BEFORE_THE_RENAME = """
import os, sys, torch
from pathlib import Path
from executor import checkpoint
os.replace = lambda *names: os._exit(9)
checkpoint.write(Path(sys.argv[1]), {"w": torch.ones(3)}, {"step": 1}, {})
"""


def test_a_process_that_dies_before_the_rename_leaves_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / name(1, "actor", 0)
    ended = subprocess.run([sys.executable, "-c", KILLED_BEFORE_THE_RENAME, str(path)], check=False)
    assert ended.returncode == 9
    assert [entry.name for entry in path.parent.iterdir()] == [f".{path.name}.part"]
    write(path, {"w": torch.zeros(3)}, {"step": 1}, {})
    assert read(path)[0]["w"].tolist() == [0, 0, 0]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_rename_that_fails_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, weights, _ = written(tmp_path)
    rename = os.replace

    def failing(source: Path, target: Path) -> None:
        if source.name.endswith(".part"):
            raise OSError("no space left")
        rename(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="no space"):
        write(path, {"w": torch.ones(3)}, {"step": 1}, {})
    assert read(path)[0].keys() == weights.keys()
