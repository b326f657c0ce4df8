"""The KV cache of one engine: blocks, the queue of free ones, and which of them hold a known prefix.

The rules are those of vLLM V1's block pool (v1/core/block_pool.py): block 0 is nobody's; a free block keeps its
content until it is handed out again; blocks are handed out from the head of the queue; a prefix is found block by
block from the start; equal content may stand in several blocks, and the one cached first is found.

All functions are compiled; they take `Blocks`, a view on arrays that `fresh` makes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.compiled import compiled

Ints = NDArray[np.int64]

REFERENCES, CONTENT, NEXT, PREVIOUS, TWIN = range(5)
"""columns of `Blocks.block`: how many hold it, what it holds (-1: nothing known), neighbours in the free queue, the
next block with the same content"""


class Blocks(NamedTuple):
    """The state of a KV cache."""

    block: NDArray[np.int32]
    """(num_blocks + 1, 5); the last row is head and tail of the free queue"""
    holder: NDArray[np.int32]
    """(contents,) first block that holds a content, or -1"""
    free: Ints
    """(1,) number of free blocks"""


def fresh(num_blocks: int, num_contents: int) -> Blocks:
    """An empty cache of `num_blocks` blocks, of which one stays unused, for contents 0 … num_contents - 1."""
    block = np.full((num_blocks + 1, 5), -1, dtype=np.int32)
    block[:, REFERENCES] = 0
    order = np.arange(1, num_blocks + 1)  # the unused block 0 stays outside the queue
    block[order, PREVIOUS] = np.roll(order, 1)
    block[order, NEXT] = np.roll(order, -1)
    return Blocks(
        block=block, holder=np.full(max(num_contents, 1), -1, dtype=np.int32), free=np.array([num_blocks - 1])
    )


@compiled
def link(block: NDArray[np.int32], before: int, index: int, after: int) -> None:
    """Puts a block between two of the free queue."""
    block[before, NEXT] = index
    block[index, PREVIOUS] = before
    block[index, NEXT] = after
    block[after, PREVIOUS] = index


@compiled
def unlink(block: NDArray[np.int32], index: int) -> None:
    """Takes a block out of the free queue."""
    block[block[index, PREVIOUS], NEXT] = block[index, NEXT]
    block[block[index, NEXT], PREVIOUS] = block[index, PREVIOUS]


@compiled
def forget(blocks: Blocks, index: int) -> None:
    """The block's content is found no more."""
    content = blocks.block[index, CONTENT]
    if content < 0:
        return
    if blocks.holder[content] == index:
        blocks.holder[content] = blocks.block[index, TWIN]
    else:
        other = blocks.holder[content]
        while blocks.block[other, TWIN] != index:
            other = blocks.block[other, TWIN]
        blocks.block[other, TWIN] = blocks.block[index, TWIN]
    blocks.block[index, CONTENT] = -1
    blocks.block[index, TWIN] = -1


@compiled
def take(blocks: Blocks) -> int:
    """The block at the head of the free queue; what it held is forgotten. There must be one."""
    block, end = blocks.block, len(blocks.block) - 1
    index = int(block[end, NEXT])
    unlink(block, index)
    forget(blocks, index)
    block[index, REFERENCES] = 1
    blocks.free[0] -= 1
    return index


@compiled
def share(blocks: Blocks, index: int) -> None:
    """One more sequence holds a block that holds what it needs."""
    if blocks.block[index, REFERENCES] == 0:
        unlink(blocks.block, index)
        blocks.free[0] -= 1
    blocks.block[index, REFERENCES] += 1


@compiled
def remember(blocks: Blocks, index: int, content: int) -> None:
    """The block is full, and can be found by its content."""
    blocks.block[index, CONTENT] = content
    blocks.block[index, TWIN] = -1
    other = blocks.holder[content]
    if other < 0:
        blocks.holder[content] = index
        return
    while blocks.block[other, TWIN] >= 0:
        other = blocks.block[other, TWIN]
    blocks.block[other, TWIN] = index


@compiled
def give_back(blocks: Blocks, held: NDArray[np.int32], count: int, unknown_first: bool) -> None:
    """A sequence gives its first `count` blocks back, the last one first.

    What becomes free goes to the tail of the queue, so that the head of a sequence survives longest. With
    `unknown_first` (vLLM 0.32; not 0.19) blocks whose content can never be found again go to the head instead.
    """
    block, end = blocks.block, len(blocks.block) - 1
    head = end
    for position in range(count - 1, -1, -1):
        index = held[position]
        block[index, REFERENCES] -= 1
        if block[index, REFERENCES] > 0:
            continue
        blocks.free[0] += 1
        if unknown_first and block[index, CONTENT] < 0:
            link(block, head, index, block[head, NEXT])
            head = index
        else:
            link(block, block[end, PREVIOUS], index, end)
