"""The block pool against a model of a few lines, and compiled against plain."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import blocks
from simulator.blocks import (
    CONTENT,
    NEXT,
    PREVIOUS,
    REFERENCES,
    Blocks,
    forget,
    fresh,
    give_back,
    remember,
    share,
    take,
)
from tests.engines import plain

NUM_BLOCKS, NUM_CONTENTS = 9, 5


@dataclass
class Model:
    """What a pool is: a queue of free blocks, who holds what, and the blocks of every content, the first cached first."""

    free: OrderedDict[int, None] = field(default_factory=lambda: OrderedDict.fromkeys(range(1, NUM_BLOCKS)))
    references: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(1, NUM_BLOCKS), 0))
    cached: dict[int, list[int]] = field(default_factory=lambda: {content: [] for content in range(NUM_CONTENTS)})

    def content(self, block: int) -> int:
        return next((content for content, found in self.cached.items() if block in found), -1)

    def forget(self, block: int) -> None:
        for found in self.cached.values():
            if block in found:
                found.remove(block)

    def take(self) -> int:
        block, _ = self.free.popitem(last=False)
        self.forget(block)
        self.references[block] = 1
        return block

    def share(self, block: int) -> None:
        self.free.pop(block, None)
        self.references[block] += 1

    def give_back(self, held: list[int], unknown_first: bool) -> None:
        first = []
        for block in reversed(held):
            self.references[block] -= 1
            if self.references[block]:
                continue
            if unknown_first and self.content(block) < 0:
                first.append(block)
            else:
                self.free[block] = None
        for block in reversed(first):
            self.free[block] = None
            self.free.move_to_end(block, last=False)


def queue(pool: Blocks) -> Iterator[int]:
    """The free queue from its head, with the way back checked."""
    end = len(pool.block) - 1
    before, index = end, int(pool.block[end, NEXT])
    while index != end:
        assert pool.block[index, PREVIOUS] == before
        yield index
        before, index = index, int(pool.block[index, NEXT])
    assert pool.block[end, PREVIOUS] == before


def assert_equal(pool: Blocks, model: Model) -> None:
    assert list(queue(pool)) == list(model.free)
    assert pool.free[0] == len(model.free)
    assert pool.block[1:NUM_BLOCKS, REFERENCES].tolist() == list(model.references.values())
    assert pool.block[1:NUM_BLOCKS, CONTENT].tolist() == [model.content(block) for block in range(1, NUM_BLOCKS)]
    assert pool.holder.tolist() == [found[0] if found else -1 for found in model.cached.values()]
    held = sum(count > 0 for count in model.references.values())
    assert pool.free[0] + held == NUM_BLOCKS - 1, "a block was lost or made"


Operation = tuple[str, int, int]
operations = st.lists(
    st.tuples(st.sampled_from(["begin", "grow", "grow", "publish", "publish", "find", "end", "forget"]),
              st.integers(0, 7), st.integers(0, NUM_CONTENTS - 1)),
    max_size=60,
)  # fmt: skip


def play(pool: Blocks, steps: list[Operation], model: Model, unknown_first: bool) -> Iterator[None]:
    """Sequences come, take, share and publish blocks and go, on both sides; after each operation it yields."""
    sequences: list[list[int]] = []
    for name, number, content in steps:
        chosen = sequences[number % len(sequences)] if sequences else []
        if name == "begin":
            sequences.append([])
        elif name == "grow" and sequences and model.free:
            block = blocks.take(pool)
            assert block == model.take()
            chosen.append(int(block))
        elif name == "publish" and chosen and model.content(chosen[-1]) < 0:
            blocks.remember(pool, chosen[-1], content)
            model.cached[content].append(chosen[-1])
        elif name == "find" and sequences and model.cached[content] and model.cached[content][0] not in chosen:
            found = int(pool.holder[content])
            blocks.share(pool, found)
            model.share(found)
            chosen.append(found)
        elif name == "end" and sequences:
            blocks.give_back(pool, np.array([*chosen, 0], dtype=np.int32), len(chosen), unknown_first)
            model.give_back(chosen, unknown_first)
            sequences.remove(chosen)
        elif name == "forget":
            blocks.forget(pool, number + 1)
            model.forget(number + 1)
        yield


@given(operations, st.booleans())
def test_the_pool_does_what_the_model_does(steps: list[Operation], unknown_first: bool) -> None:
    pool, model = fresh(NUM_BLOCKS, NUM_CONTENTS), Model()
    for _ in play(pool, steps, model, unknown_first):
        assert_equal(pool, model)


@given(operations, st.booleans())
def test_compiled_and_plain_leave_the_same_arrays(steps: list[Operation], unknown_first: bool) -> None:
    compiled = fresh(NUM_BLOCKS, NUM_CONTENTS)
    for _ in play(compiled, steps, Model(), unknown_first):
        pass
    with plain():
        python = fresh(NUM_BLOCKS, NUM_CONTENTS)
        for _ in play(python, steps, Model(), unknown_first):
            pass
    for one, other in zip(compiled, python, strict=True):
        np.testing.assert_array_equal(one, other)


def held(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_blocks_are_evicted_in_the_order_they_were_freed_the_end_of_a_sequence_first() -> None:
    pool = fresh(7, 6)
    one, two = [take(pool) for _ in range(3)], [take(pool) for _ in range(3)]
    for content, index in enumerate(one + two):
        remember(pool, index, content)
    give_back(pool, held(*two), 3, True)
    give_back(pool, held(*one), 3, True)
    assert [take(pool) for _ in range(6)] == two[::-1] + one[::-1]
    assert pool.holder.tolist() == [-1] * 6


@pytest.mark.parametrize(("unknown_first", "order"), [(True, [3, 4, 5, 6, 2, 1]), (False, [4, 5, 6, 3, 2, 1])])
def test_unknown_blocks_go_to_the_head_or_to_the_tail(unknown_first: bool, order: list[int]) -> None:
    pool = fresh(7, 2)
    one = [take(pool) for _ in range(3)]
    for content in (0, 1):
        remember(pool, one[content], content)
    give_back(pool, held(*one), 3, unknown_first)
    assert list(queue(pool)) == order


def test_of_twins_the_one_cached_first_is_found_until_it_is_evicted() -> None:
    pool = fresh(4, 1)
    first, second, third = (take(pool) for _ in range(3))
    for index in (second, first, third):
        remember(pool, index, 0)
    assert pool.holder[0] == second
    forget(pool, first)
    assert pool.holder[0] == second, "the one in the middle was not the one found"
    forget(pool, second)
    assert pool.holder[0] == third
    forget(pool, third)
    assert pool.holder[0] == -1


def test_a_shared_block_stays_until_its_last_holder_goes() -> None:
    pool = fresh(3, 1)
    index = take(pool)
    remember(pool, index, 0)
    share(pool, index)
    give_back(pool, held(index), 1, True)
    assert pool.free[0] == 1 and index not in list(queue(pool))
    give_back(pool, held(index), 1, True)
    assert pool.free[0] == 2 and pool.holder[0] == index, "free, and still to be found"
    share(pool, index)
    assert pool.free[0] == 1
