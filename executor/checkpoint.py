"""Checkpoints: one folder a step with the parts of all ranks of all roles, complete or absent, every file with a hash.

    checkpoints/step-000010/
      manifest.json          what the folder is, the parts it has, SHA-256 and bytes of every file; written last
      driver.json            what the driver has decided by, and what it had not yet written elsewhere
      actor-0/               part of a rank: `executor.shard` writes it, `part.json` last
      actor-1/ critic-0/ …

Ranks write into `.step-000010.part-N` beside it, which `commit` renames once all of them have. Files and folders are
flushed to disk before a name says that they are complete. Nothing here needs torch: the driver uses it too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 2
MANIFEST, DRIVER, PART = "manifest.json", "driver.json", "part.json"
AGREE = ("format", "step", "digest", "attempt")
"""what all parts of a checkpoint have to say alike"""
_COMPLETE = re.compile(r"step-(\d{6,})")
_UNFINISHED = re.compile(r"\.step-\d{6,}\.(part-\d+|old|gone)")


class Damaged(ValueError):
    """A checkpoint that is not what was written; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Whose part of a checkpoint."""

    role: str
    rank: int
    world: int
    """ranks of the role"""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.rank}"


def folder_of(root: Path, step: int) -> Path:
    """Of the complete checkpoint after a step; `root` is the run's `checkpoints`."""
    return root / f"step-{step:06d}"


def staging(root: Path, step: int, attempt: int) -> Path:
    """Where ranks write what is to become it. A run that was resumed is another attempt: it writes beside."""
    return root / f".step-{step:06d}.part-{attempt}"


def seal(folder: Path, about: dict[str, Any]) -> float:
    """Ends a rank's part: hashes and flushes its files, says so in `part.json`. Returns their bytes.

    `about`: role, rank, world, step, digest of the scenario, attempt, and `start_s` of the write, on the machine's
    monotonic clock, as `end_s` is that is added.
    """
    files = _listing(folder)
    for file in files:
        flush(folder / file)
    flush(folder)
    write_whole(folder / PART, _json(about | {"format": FORMAT, "files": files, "end_s": time.monotonic()}))
    return float(sum(entry["bytes"] for entry in files.values()))


def sealed(folder: Path, rank: Rank) -> dict[str, Any] | None:
    """What a rank says of its part; None while it is still writing."""
    path = folder / rank.name / PART
    found: dict[str, Any] | None = json.loads(path.read_bytes()) if path.exists() else None
    return found


def commit(root: Path, step: int, attempt: int, ranks: Iterable[Rank], driver: dict[str, Any]) -> float:
    """Makes the parts that all ranks have sealed the checkpoint of the step; returns its bytes.

    Raises Damaged where a part is missing, or is of another step, scenario, attempt or number of ranks.
    """
    part, parts = staging(root, step, attempt), dict[str, dict[str, Any]]()
    expected: dict[str, Any] = {"step": step, "attempt": attempt}
    for rank in ranks:
        parts[rank.name] = about = _fitting(sealed(part, rank), part, rank, expected)
        expected["digest"] = about["digest"]
    write_whole(part / DRIVER, _json(driver))
    files = {f"{name}/{file}": entry for name, about in parts.items() for file, entry in about["files"].items()}
    files |= {f"{name}/{PART}": _entry(part / name / PART) for name in parts}
    files[DRIVER] = _entry(part / DRIVER)
    shared = {key: next(iter(parts.values()))[key] for key in AGREE}
    owners = {name: {key: about[key] for key in ("role", "rank", "world")} for name, about in parts.items()}
    manifest = shared | {"parts": owners, "files": files}
    write_whole(part / MANIFEST, _json(manifest | {"sha256": _own_hash(manifest)}))
    flush(part)
    _rename(part, folder_of(root, step))
    return float(sum(entry["bytes"] for entry in files.values()))


def verify(folder: Path, ranks: Iterable[Rank]) -> dict[str, Any]:
    """The manifest of a checkpoint all of whose files are what was written.

    Raises Damaged naming the first file that is missing or changed, and the first part that is of another step, scenario
    or number of ranks than the manifest says, or that no rank has.
    """
    manifest = read_json(folder / MANIFEST)
    if manifest.pop("sha256", None) != _own_hash(manifest):
        raise Damaged(f"{folder / MANIFEST} is not what was written")
    if manifest.get("format") != FORMAT:
        raise Damaged(f"{folder / MANIFEST} has format {manifest.get('format')}, not {FORMAT}")
    _check(manifest["files"], folder)
    for rank in ranks:
        about = _fitting(sealed(folder, rank), folder, rank, {key: manifest[key] for key in AGREE})
        missing = [file for file in about["files"] if f"{rank.name}/{file}" not in manifest["files"]]
        if missing:
            raise Damaged(f"{folder / rank.name / missing[0]} is not in the manifest")
    return manifest


def verify_part(folder: Path, rank: Rank) -> float:
    """Bytes of a rank's part, all of whose files are what was written. Raises Damaged naming the first that is not."""
    about = _fitting(sealed(folder, rank), folder, rank, {})
    _check({f"{rank.name}/{file}": entry for file, entry in about["files"].items()}, folder)
    return float(sum(entry["bytes"] for entry in about["files"].values()))


def _check(files: dict[str, dict[str, Any]], folder: Path) -> None:
    for file, entry in files.items():
        path = folder / file
        if not path.is_file():
            raise Damaged(f"{path} is missing")
        if _entry(path) != entry:
            raise Damaged(f"{path} is not what was written")


def _fitting(about: dict[str, Any] | None, folder: Path, rank: Rank, expected: dict[str, Any]) -> dict[str, Any]:
    """The part of a rank. Raises Damaged where it is of something else."""
    path = folder / rank.name / PART
    if about is None:
        raise Damaged(f"{path} is missing: no part of rank {rank.rank} of {rank.world} of {rank.role}")
    for key, value in (expected | {"role": rank.role, "rank": rank.rank, "world": rank.world}).items():
        if about.get(key) != value:
            raise Damaged(f"{path} is of {key} {about.get(key)}, not {value}")
    return about


def steps(root: Path) -> list[int]:
    """Steps whose checkpoints have their name, in order."""
    found = [_COMPLETE.fullmatch(path.name) for path in root.iterdir()] if root.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


def remove(root: Path, step: int) -> None:
    """Deletes a checkpoint: first it loses its name, so that no half of one is ever taken for a whole."""
    gone = root / f".step-{step:06d}.gone"
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(folder_of(root, step), gone)
    shutil.rmtree(gone)


def tidy(root: Path) -> None:
    """Brings a folder in order that a killed run left: a checkpoint set aside comes back where its successor did not get
    its name, everything unfinished goes."""
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if not _UNFINISHED.fullmatch(path.name):
            continue
        whole = root / path.name.removeprefix(".").removesuffix(".old")
        if path.suffix == ".old" and not whole.exists():
            os.replace(path, whole)
        else:  # a rank that outlived its driver by a moment may still be writing there; it is nothing to us
            shutil.rmtree(path, ignore_errors=True)


def set_aside(root: Path, step: int) -> Path:
    """Renames a checkpoint that cannot be used, so that the step may be saved again; nothing is deleted."""
    folder, number = folder_of(root, step), 1
    while (target := root / f"damaged-{folder.name}-{number}").exists():
        number += 1
    os.replace(folder, target)
    return target


def read_json(path: Path) -> dict[str, Any]:
    """Raises Damaged where there is no such file or it is no JSON."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise Damaged(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise Damaged(f"{path} holds no JSON object")
    return found


def _rename(part: Path, folder: Path) -> None:
    """`part` becomes `folder`; what that held is back in its place if it fails."""
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
    flush(folder.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def write_whole(path: Path, content: bytes) -> None:
    """A file that is there with all of its content, on disk, or not at all."""
    part = path.with_name(f".{path.name}")
    part.write_bytes(content)
    flush(part)
    os.replace(part, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Has the system write a file or a folder's names to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _listing(folder: Path) -> dict[str, dict[str, Any]]:
    return {str(path.relative_to(folder)): _entry(path) for path in sorted(_files(folder))}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path.name != PART)


def _entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


def _own_hash(manifest: dict[str, Any]) -> str:
    """Of all else that a manifest says."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False).encode()
