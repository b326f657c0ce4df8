"""A rank's part of a checkpoint: tensors in safetensors, everything else in JSON; nothing that runs code when it is read.

model.safetensors       rank 0: the weights by Hugging Face's names, as `models.X.weights` takes them
value_head.safetensors  rank 0: of a critic or a reward model
adapters.safetensors    rank 0, in place of both where adapters are trained
optimizer.safetensors   what the optimizer and the random generator of this rank hold in tensors
numbers.json            what they hold in numbers: counts of steps, the schedule of the learning rate
config.json, tokenizer  rank 0: so that `weights: …/actor-0` loads
part.json               who wrote it, and the hash of every file; written last
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from executor.checkpoint import Rank, read_json, seal
from executor.lora import is_adapter

WEIGHTS, HEAD, ADAPTERS = "model.safetensors", "value_head.safetensors", "adapters.safetensors"
TENSORS, NUMBERS = "optimizer.safetensors", "numbers.json"
_TRUNK, _MODEL, _HEAD = "trunk.", "model.", "value_head."


@dataclass(kw_only=True)
class Shard:
    """What a rank needs to go on exactly."""

    weights: dict[str, torch.Tensor] | None
    """whole, on rank 0; None on the others"""
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, Any]
    describe: Callable[[Path], None] | None = field(default=None, compare=False)
    """writes config and tokenizer into a folder"""

    @property
    def num_bytes(self) -> float:
        """Of the tensors."""
        return float(sum(tensor.nbytes for part in (self.weights or {}, self.tensors) for tensor in part.values()))

    def copied(self) -> Shard:
        """The same with memory of its own, so that training may go on beside the write; tensors are copies already."""
        return replace(self, weights=None if self.weights is None else _copied(self.weights))


def write(folder: Path, rank: Rank, shard: Shard, about: dict[str, Any]) -> float:
    """Writes a rank's part into `folder`, the staging folder of a step; returns its bytes.

    `about`: step, digest of the scenario, attempt, as `checkpoint.seal` wants it. Raises OSError.
    """
    own = folder / rank.name
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    if shard.describe is not None:
        shard.describe(own)
    for file, weights in laid_out(shard.weights or {}).items():
        _save(_plain(weights), own / file)
    _save(_plain(shard.tensors), own / TENSORS)
    (own / NUMBERS).write_text(json.dumps(shard.numbers, indent=1))
    return seal(own, about | {"role": rank.role, "rank": rank.rank, "world": rank.world})


def read(folder: Path, rank: Rank) -> Shard:
    """A rank's part of a complete checkpoint, which `checkpoint.verify` has found whole; weights for every rank."""
    own, first = folder / rank.name, folder / f"{rank.role}-0"
    files = {file: load_file(str(first / file)) for file in (WEIGHTS, HEAD, ADAPTERS) if (first / file).exists()}
    weights = named(files)
    return Shard(weights=weights, tensors=load_file(str(own / TENSORS)), numbers=read_json(own / NUMBERS))


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Raises OSError where the disk refuses, which the library calls otherwise."""
    try:
        save_file(tensors, str(path), metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from None


def laid_out(weights: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """By file, the weights under the names that they have there: a critic's trunk is the model of an actor's file."""
    if any(map(is_adapter, weights)):
        return {ADAPTERS: weights}
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights.items():
        head = name.startswith(_HEAD)
        known = name.removeprefix(_HEAD) if head else name
        known = _MODEL + name.removeprefix(_TRUNK) if name.startswith(_TRUNK) else known
        files.setdefault(HEAD if head else WEIGHTS, {})[known] = tensor
    return files


def named(files: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The reverse of `laid_out`."""
    found = dict(files.get(ADAPTERS, {}))
    for name, tensor in files.get(WEIGHTS, {}).items():
        found[_TRUNK + name.removeprefix(_MODEL) if HEAD in files else name] = tensor
    return found | {_HEAD + name: tensor for name, tensor in files.get(HEAD, {}).items()}


def _copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fit for safetensors, which takes no two tensors in the same memory."""
    seen: set[int] = set()
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.detach().contiguous()
        shared = whole.untyped_storage().data_ptr() in seen or whole.untyped_storage().nbytes() > whole.nbytes
        plain[name] = whole.clone() if shared else whole
        seen.add(plain[name].untyped_storage().data_ptr())
    return plain
