"""Attention over samples that are laid end to end: each attends to itself alone, and nothing is paid for the others.

Samples of one prompt may share its tokens: what a causal network makes of a prompt does not depend on what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface

PACKED = "end_to_end"
"""the name of this attention in a configuration"""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Where n samples of a packed pass lie, as rows of the longest one's length L."""

    index: Tensor
    """[n · L] the token at each place of the rows; past a sample's end its last one, which nothing reads"""
    inverse: Tensor
    """[tokens] a place of each token in the rows; of a prompt that samples share, in the first of them"""
    number: int


def rows_of(tokens: Sequence[NDArray[np.int64]]) -> Rows:
    """The rows of samples whose tokens lie at these places of a pass, [length] each."""
    lengths = np.array([len(places) for places in tokens])
    steps = np.minimum(np.arange(lengths.max())[None], lengths[:, None] - 1)
    laid = np.concatenate(tokens)
    index = laid[(np.cumsum(lengths) - lengths)[:, None] + steps]
    inverse = np.empty(int(laid.max()) + 1, dtype=np.int64)
    filled = np.flatnonzero(np.arange(lengths.max())[None] < lengths[:, None])
    inverse[laid[::-1]] = filled[::-1]  # the first of several comes last, and stays
    return Rows(index=torch.from_numpy(index.ravel()), inverse=torch.from_numpy(inverse), number=len(lengths))


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    scaling: float | None = None, rows: Rows | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention of each sample to itself, [1, tokens, heads, width].

    query [1, heads, tokens, width]; key and value may have fewer heads. Without `rows` every row of the batch is one
    sample, [B, heads, T, width].
    """
    parts = [query, key, value] if rows is None else [_apart(part, rows) for part in (query, key, value)]
    grouped = query.shape[1] != key.shape[1]
    found = nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=scaling, enable_gqa=grouped)
    found = found.transpose(1, 2)
    return (found.contiguous() if rows is None else found.flatten(0, 1)[rows.inverse][None]), None


def _apart(part: Tensor, rows: Rows) -> Tensor:
    """[1, heads, tokens, width] -> [n, heads, L, width]."""
    heads, _, width = part.shape[1:]
    return part[0].index_select(1, rows.index).view(heads, rows.number, -1, width).transpose(0, 1)


AttentionInterface.register(PACKED, attend)
