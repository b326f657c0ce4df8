"""Samples as the tensors of one forward and backward pass: padded rows, or laid end to end.

What belongs to response tokens is flat, [R], one sample after the other, so an objective sees neither padding nor packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.attention import Rows, rows_of
from executor.experience import Samples
from executor.scoring import pad


class Microbatch:
    """Some samples of a step; n of them, with R response tokens in all.

    The network reads `ids` [B, T], padded on the right, or [1, tokens] where they are `packed`; `places` and `lasts` are
    indices into its B · T flattened positions. A response token is predicted at the position before it.
    """

    def __init__(self, samples: Samples, group: Sequence[int], weight: float = 1.0, *, pack: str = "padded") -> None:
        """`weight` 0: a pass that only keeps the ranks in step. `pack`: as `update.pack`."""
        self.group, self.weight, self.pack = list(group), weight, pack
        self.lengths = np.array([len(samples.tokens[i]) for i in group])
        self._prompts = np.array([int(samples.num_prompt_tokens[i]) for i in group])
        self._temperatures = np.asarray(samples.temperatures, dtype=np.float32)[self.group]
        rows = [samples.tokens[i] for i in group]
        if pack == "padded":
            self.ids = torch.from_numpy(pad(rows)[0])
            self._first = np.arange(len(rows)) * self.ids.shape[1]
            self._follows = self._first + self._prompts
        else:
            self._first, self._follows, parts = _laid(rows, self._prompts, shares=pack == "shared")
            self.ids = torch.from_numpy(np.concatenate(parts)[None])

    def __len__(self) -> int:
        return len(self.group)

    @property
    def num_tokens(self) -> int:
        """Of the samples, without padding."""
        return int(self.lengths.sum())

    @cached_property
    def _responses(self) -> NDArray[np.int64]:
        """Response tokens of each sample, [n]."""
        return self.lengths - self._prompts

    @cached_property
    def positions(self) -> Tensor | None:
        """Of each token in its sample, [1, tokens]; None where every row is one sample from its beginning."""
        if self.pack == "padded":
            return None
        found = np.empty(self.ids.shape[1], dtype=np.int64)
        for places in self._tokens:
            found[places] = np.arange(len(places))
        return torch.from_numpy(found[None])

    @cached_property
    def _tokens(self) -> list[NDArray[np.int64]]:
        """Where the tokens of each sample lie that is laid end to end with others."""
        parts = zip(self._first, self._prompts, self._follows, self._responses, strict=True)
        return [np.r_[first : first + prompt, follows : follows + rest] for first, prompt, follows, rest in parts]

    @cached_property
    def rows(self) -> Rows | None:
        """Where samples lie that are laid end to end."""
        return None if self.pack == "padded" else rows_of(self._tokens)

    @cached_property
    def places(self) -> Tensor:
        """Where each response token is predicted, [R]."""
        before = np.repeat(self._follows - 1, self._responses) + _ranges(self._responses)
        said = self._responses > 0
        before[(np.cumsum(self._responses) - self._responses)[said]] = (self._first + self._prompts - 1)[said]
        return torch.from_numpy(before)

    @cached_property
    def targets(self) -> Tensor:
        """The response tokens, [R]."""
        return self.ids.view(-1)[torch.from_numpy(np.repeat(self._follows, self._responses) + _ranges(self._responses))]

    @cached_property
    def lasts(self) -> Tensor:
        """Where each sample's last token is read, [n]."""
        return torch.from_numpy(self._follows + self._responses - 1)

    @cached_property
    def owner(self) -> Tensor:
        """The sample, 0 to n - 1, of each response token, [R]."""
        return torch.from_numpy(np.repeat(np.arange(len(self)), self._responses))

    @cached_property
    def response(self) -> Tensor:
        """A mask of what counts: all of it, [R] ones."""
        return torch.ones(int(self._responses.sum()))

    @cached_property
    def temperatures(self) -> Tensor | None:
        """At which each response token's log-prob is read, [R]; None where all are 1."""
        if (self._temperatures == 1.0).all():
            return None
        return torch.from_numpy(np.repeat(self._temperatures, self._responses))

    def column(self, rows: Sequence[Any]) -> Tensor:
        """A column of all samples, a number per response token, as [R]."""
        return torch.from_numpy(np.concatenate([np.asarray(rows[i], dtype=np.float32) for i in self.group]))

    def numbers(self, values: Any) -> Tensor:
        """One number of each sample, from all samples' [N], as [n]."""
        return torch.from_numpy(np.asarray(values, dtype=np.float32)[self.group])

    def sums(self, values: Tensor) -> Tensor:
        """Of each sample over its response tokens, from [R] to [n]."""
        return values.new_zeros(len(self)).index_add(0, self.owner, values)

    def gather(self, values: Tensor) -> dict[int, Any]:
        """From [R], or [n], back to one array per sample, by sample."""
        found = values.detach().numpy()
        sizes = self._responses if len(found) == self._responses.sum() else np.ones(len(self), dtype=np.int64)
        parts = np.split(found, np.cumsum(sizes)[:-1])
        return {i: part.copy() for i, part in zip(self.group, parts, strict=True)}


def _laid(
    rows: Sequence[NDArray[np.int64]], prompts: NDArray[np.int64], shares: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[NDArray[np.int64]]]:
    """Where the prompt of each sample begins and where its response does, and what is laid end to end.

    Where samples share, a prompt is laid once, before the first of its samples.
    """
    known: dict[bytes, int] = {}
    first, follows, parts, end = [], [], [], 0
    for row, prompt in zip(rows, prompts, strict=True):
        key = row[:prompt].tobytes()
        read = known.get(key) if shares else None
        parts.append(row if read is None else row[prompt:])
        first.append(end if read is None else read)
        follows.append(end + prompt if read is None else end)
        known[key] = first[-1]
        end += len(parts[-1])
    return np.array(first), np.array(follows), parts


def _ranges(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, … of each size, one after the other."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
