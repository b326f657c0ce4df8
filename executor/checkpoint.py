"""Checkpoints: one folder for each step and rank, complete or absent, with a checksum of every file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS, STATE, MANIFEST = "model.safetensors", "state.pt", "manifest.json"


def name(step: int, role: str, rank: int) -> str:
    """Of a rank's folder below the run's `checkpoints`."""
    return f"step-{step:06d}/{role}-{rank}"


def write(folder: Path, weights: dict[str, torch.Tensor] | None, state: dict[str, Any], about: dict[str, Any]) -> float:
    """Writes a rank's checkpoint; returns its bytes.

    `weights` by Hugging Face's names (rank 0 only), `state` of the optimizer and the random generator. Everything is
    written into a temporary folder, flushed to disk and renamed, so that `folder` is complete or absent after a
    crash. An earlier checkpoint of the same name is moved aside first and deleted last.
    """
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    if weights is not None:
        save_file({key: value.contiguous() for key, value in weights.items()}, str(part / WEIGHTS))
    torch.save(state, part / STATE)
    files = {path.name: _digest(path) for path in sorted(part.iterdir())}
    sizes = {file: (part / file).stat().st_size for file in files}
    (part / MANIFEST).write_text(json.dumps(about | {"sha256": files, "bytes": sizes}, indent=1))
    for path in part.iterdir():
        _flush(path)
    _flush(part)
    _swap(part, folder)
    return float(sum(sizes.values()))


def read(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """Weights (empty but on rank 0), state and manifest. Raises ValueError naming a file that is missing or changed."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for file, digest in manifest["sha256"].items():
        path = folder / file
        if not path.is_file() or _digest(path) != digest:
            raise ValueError(f"{path} is missing or not what was written")
    weights = load_file(str(folder / WEIGHTS)) if WEIGHTS in manifest["sha256"] else {}
    return weights, torch.load(folder / STATE, weights_only=False), manifest


def _swap(part: Path, folder: Path) -> None:
    """Renames `part` to `folder`; what `folder` held is back in its place if that fails."""
    earlier = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        shutil.rmtree(earlier, ignore_errors=True)
        os.replace(folder, earlier)
    try:
        os.replace(part, folder)
    except OSError:
        if earlier.exists():
            os.replace(earlier, folder)
        raise
    _flush(folder.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
