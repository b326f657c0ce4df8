"""Samples in a file: arrays in safetensors, the rest as JSON beside them; read back as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from executor.checkpoint import flush
from executor.experience import Samples

ARRAYS = ("prompts", "num_prompt_tokens", "indices", "temperatures", "seeds")
RAGGED = ("tokens", "logprobs")


def name(step: int) -> str:
    """Of the file with the samples of a step."""
    return f"samples-{step:06d}.safetensors"


def write(path: Path, samples: Samples) -> None:
    """One array for each column; of one with an array for each sample their values one after the other, and lengths."""
    arrays: dict[str, Any] = {key: np.ascontiguousarray(getattr(samples, key)) for key in ARRAYS}
    for key, column in [*((key, getattr(samples, key)) for key in RAGGED), *samples.columns.items()]:
        if isinstance(column, list):
            arrays[f"{key}/values"] = np.concatenate([np.asarray(row) for row in column])
            arrays[f"{key}/lengths"] = np.asarray([len(row) for row in column], dtype=np.int64)
        else:
            arrays[key] = np.ascontiguousarray(column)
    about = {"step": samples.step, "policy_version": samples.policy_version, "columns": list(samples.columns)}
    save_file(arrays, str(path), metadata={"samples": json.dumps(about)})
    flush(path)


def read(path: Path) -> Samples:
    """The samples that `write` was given."""
    with safe_open(str(path), framework="np") as file:
        about = json.loads(file.metadata()["samples"])
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    fields = {key: _column(arrays, key) for key in (*ARRAYS, *RAGGED)}
    columns = {key: _column(arrays, key) for key in about["columns"]}
    return Samples(step=about["step"], policy_version=about["policy_version"], columns=columns, **fields)


def _column(arrays: dict[str, Any], key: str) -> Any:
    if key in arrays:
        return arrays[key]
    return np.split(arrays[f"{key}/values"], np.cumsum(arrays[f"{key}/lengths"])[:-1])
