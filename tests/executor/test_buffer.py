"""The buffer's actor, in this process: what engines give it comes out in the order asked for, whole or not at all."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.buffer import Buffer
from executor.experience import Samples
from executor.packing import pack
from lab.experience import Experience


def made(numbers: list[int]) -> Samples:
    """Samples whose tokens are their numbers, as many as their numbers say."""
    return Samples(
        step=-1, policy_version=0, prompts=np.asarray(numbers), num_prompt_tokens=np.ones(len(numbers), np.int64),
        tokens=[np.full(2 + number % 3, number) for number in numbers],
        logprobs=[np.full(1 + number % 3, -number, np.float32) for number in numbers],
        columns={"versions": np.asarray(numbers) // 4, "token_versions": [np.full(1 + n % 3, n) for n in numbers]},
    )  # fmt: skip


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 6))
def test_a_batch_is_what_was_asked_for_in_that_order(seed: int, number: int, parts: int) -> None:
    random = np.random.default_rng(seed)
    numbers = random.permutation(number).tolist()
    wanted = random.permutation(number)[: random.integers(1, number + 1)].tolist()

    async def play() -> tuple[Samples, list[int]]:
        buffer = Buffer()
        for part in np.array_split(numbers, parts):
            if len(part):
                await buffer.put(part.tolist(), made(part.tolist()))
        batch, taken = await buffer.take(7, 3, wanted, {"counts": np.ones(len(wanted))})
        assert taken == wanted
        return batch, await buffer.news()

    batch, told = asyncio.run(play())
    assert told == numbers
    assert (batch.step, batch.policy_version) == (7, 3)
    assert batch.prompts.tolist() == wanted
    assert [row.tolist() for row in batch.tokens] == [[n] * (2 + n % 3) for n in wanted]
    assert batch.columns["versions"].tolist() == [n // 4 for n in wanted]
    assert [row[0] for row in batch.columns["token_versions"]] == wanted


def play(*calls: tuple[str, Any]) -> list[Any]:
    """What calls of one buffer, one after the other, return."""

    async def run() -> list[Any]:
        buffer = Buffer()
        return [await getattr(buffer, name)(*arguments) for name, arguments in calls]

    return asyncio.run(run())


def test_a_batch_has_no_holes() -> None:
    with pytest.raises(KeyError, match=r"batch 0 has no samples \[3\]"):
        play(("put", ([1, 2], made([1, 2]))), ("take", (0, 0, [1, 3])))
    with pytest.raises(KeyError, match="has no samples"):
        play(("put", ([1], made([1]))), ("drop", ([1],)), ("take", (0, 0, [1])))


def test_a_sample_is_whole_with_all_its_scores_whichever_come_first() -> None:
    async def run() -> tuple[list[list[int]], Samples]:
        buffer, told = Buffer(("reward", "reference")), []
        await buffer.scored("reward", [1], {"rewards": np.array([0.5])})
        await buffer.put([1, 2], made([1, 2]))
        logprobs = [np.full(2, -1.0, np.float32), np.full(3, -2.0, np.float32)]
        await buffer.scored("reference", [1, 2], {"reference_logprobs": logprobs})
        told.append(await buffer.news())
        await buffer.scored("reward", [2], {"rewards": np.array([0.25])})
        told.append(await buffer.news())
        return told, (await buffer.take(0, 0, [2, 1]))[0]

    told, batch = asyncio.run(run())
    assert told == [[1], [2]]
    assert batch.columns["rewards"].tolist() == [0.25, 0.5]
    assert [row.tolist() for row in batch.columns["reference_logprobs"]] == [[-2.0] * 3, [-1.0] * 2]


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4"])
def test_a_message_is_unpacked_to_what_was_put_into_it(compression: str) -> None:
    numbers = [4, 2, 9]
    packed = pack(made(numbers).with_columns(numbers=np.asarray(numbers)), Experience.model_validate({
        "transport": "object_store", "compression": compression,
    }))  # fmt: skip

    async def run() -> tuple[list[int], Samples]:
        buffer = Buffer()
        await buffer.deliver(np.frombuffer(packed.data, dtype=np.uint8))
        return await buffer.news(), (await buffer.take(1, 0, [9, 4]))[0]

    told, batch = asyncio.run(run())
    assert told == numbers
    assert batch.prompts.tolist() == [9, 4]
    assert set(batch.columns) == {"versions", "token_versions"}


def test_a_page_is_there_until_the_update_has_ended() -> None:
    put = ("put", ([1, 2], made([1, 2])))
    *_, again = play(put, ("take", (0, 0, [2])), ("again", (0,)))
    assert again.prompts.tolist() == [2]
    with pytest.raises(KeyError):
        play(put, ("take", (0, 0, [2])), ("release", (0,)), ("again", (0,)))
    with pytest.raises(KeyError, match="has no samples"):
        play(put, ("take", (0, 0, [2])), ("take", (1, 0, [2])))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 20))
@settings(deadline=None, max_examples=20)
def test_news_wait_for_as_many_as_are_wanted_but_not_for_ever(parts: list[int], wanted: int) -> None:
    """Who is told of fewer than wanted has waited; who is told of as many has not waited for the rest."""

    async def run() -> tuple[list[int], float, int]:
        buffer, first = Buffer(), 0
        asking = asyncio.create_task(buffer.news(wanted))
        began = asyncio.get_running_loop().time()
        for size in parts:
            await asyncio.sleep(0)
            await buffer.put(list(range(first, first + size)), made(list(range(first, first + size))))
            first += size
        told = await asking
        return told, asyncio.get_running_loop().time() - began, first

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("executor.buffer.LINGER_S", 0.02)
        told, took_s, number = asyncio.run(run())
    assert told == list(range(number))[: len(told)]
    assert len(told) >= min(wanted, number)
    assert number >= wanted or took_s >= 0.019
