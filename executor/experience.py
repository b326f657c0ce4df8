"""The samples of one step as they travel from worker to worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


def _nothing() -> NDArray[Any]:
    return np.empty(0)


def _indices(prompts: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many samples of the same prompt come before each one."""
    return np.asarray([int((prompts[:i] == prompt).sum()) for i, prompt in enumerate(prompts)], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Rows of different lengths laid end to end."""

    flat: NDArray[Any]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, value: Any) -> Any:
        """A list of flat arrays of one dtype as one of these; anything else as it is."""
        if not isinstance(value, list) or not value or not all(isinstance(row, np.ndarray) for row in value):
            return value
        if any(row.ndim != 1 or row.dtype != value[0].dtype for row in value):
            return value
        return cls(flat=np.concatenate(value), ends=np.cumsum([len(row) for row in value]))

    @classmethod
    def rows_of(cls, value: Any) -> Any:
        """What `of` was given."""
        if not isinstance(value, cls):
            return value
        ends = value.ends.tolist()
        return [value.flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """N samples of one step, the samples of a prompt adjacent. Of pairs the chosen one comes first: chosen 2i, rejected
    2i + 1."""

    step: int
    policy_version: int
    """of the actor that generated them"""
    prompts: NDArray[np.int64]
    """index of each sample's prompt within the step, shape [N]"""
    num_prompt_tokens: NDArray[np.int64]
    """shape [N]"""
    tokens: list[NDArray[np.int64]]
    """prompt and response of each sample"""
    logprobs: list[NDArray[np.float32]]
    """log-probability of each response token under the policy that drew it, at the sampling temperature"""
    indices: NDArray[np.int64] = field(default_factory=_nothing)
    """of each sample among those of its prompt, shape [N]"""
    temperatures: NDArray[np.float32] = field(default_factory=_nothing)
    """at which each sample was drawn, and at which its log-probs are read, shape [N]; 1 where nothing is drawn"""
    seeds: NDArray[np.int64] = field(default_factory=_nothing)
    """of each sample's random numbers, shape [N]; -1 where none were drawn"""
    columns: dict[str, Any] = field(default_factory=dict)
    """by name. Arrays [N]: rewards, labels (KTO: 1 desired, 0 not), reward_… (parts of the reward). Lists of one array per
    sample, one number per response token: reference_logprobs, values, advantages, returns, old_logprobs"""

    def __post_init__(self) -> None:
        """What is not given is filled in: samples of a prompt stand in order, drawn at 1 from no seed."""
        given = {
            "indices": lambda: _indices(self.prompts),
            "temperatures": lambda: np.ones(len(self.tokens), dtype=np.float32),
            "seeds": lambda: np.full(len(self.tokens), -1, dtype=np.int64),
        }
        for name, make in given.items():
            if len(getattr(self, name)) != len(self.tokens):
                object.__setattr__(self, name, make())

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: hundreds of small arrays travel as a few large ones."""
        state = {name: Ragged.of(value) for name, value in self.__dict__.items()}
        return state | {"columns": {name: Ragged.of(column) for name, column in self.columns.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        columns = {name: Ragged.rows_of(column) for name, column in state["columns"].items()}
        self.__dict__.update({name: Ragged.rows_of(value) for name, value in state.items()}, columns=columns)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, prompt and response."""
        return [len(tokens) for tokens in self.tokens]

    def with_columns(self, **columns: Any) -> Samples:
        return replace(self, columns=self.columns | columns)

    def take(self, chosen: Sequence[int] | NDArray[np.int64]) -> Samples:
        """Some of the samples, columns too, in the order given."""
        picked = np.asarray(chosen, dtype=np.int64)
        columns = {
            name: [column[i] for i in picked] if isinstance(column, list) else column[picked]
            for name, column in self.columns.items()
        }
        return replace(
            self, prompts=self.prompts[picked], num_prompt_tokens=self.num_prompt_tokens[picked],
            tokens=[self.tokens[i] for i in picked], logprobs=[self.logprobs[i] for i in picked],
            indices=self.indices[picked], temperatures=self.temperatures[picked], seeds=self.seeds[picked],
            columns=columns,
        )  # fmt: skip


def merge(parts: Sequence[Samples]) -> Samples:
    """The samples of several engines as one step's, in the order of prompts; samples of a prompt stay in order."""
    order = np.argsort(np.concatenate([part.prompts for part in parts]), kind="stable")
    return joined(parts).take(order)


def joined(parts: Sequence[Samples]) -> Samples:
    """The samples of several parts one after the other, with the columns that all of them have."""
    shared = [name for name in parts[0].columns if all(name in part.columns for part in parts)]
    return Samples(
        step=parts[0].step, policy_version=min(part.policy_version for part in parts),
        prompts=np.concatenate([part.prompts for part in parts]),
        num_prompt_tokens=np.concatenate([part.num_prompt_tokens for part in parts]),
        tokens=[item for part in parts for item in part.tokens],
        logprobs=[item for part in parts for item in part.logprobs],
        indices=np.concatenate([part.indices for part in parts]),
        temperatures=np.concatenate([part.temperatures for part in parts]),
        seeds=np.concatenate([part.seeds for part in parts]),
        columns={name: _joined([part.columns[name] for part in parts]) for name in shared},
    )  # fmt: skip


def _joined(columns: Sequence[Any]) -> Any:
    if isinstance(columns[0], list):
        return [item for column in columns for item in column]
    return np.concatenate(columns)
