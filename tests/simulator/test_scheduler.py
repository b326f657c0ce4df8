"""The scheduler's decisions, call by call, as laws: limits, conservation of blocks and tokens, order, preemption."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from simulator.blocks import REFERENCES
from simulator.engine import Requests, Settings, TooSmall, build
from simulator.replay import Traced, trace
from simulator.scheduler import (
    DONE,
    FLYING,
    GENERATED,
    GONE,
    HELD,
    PLANNED,
    ROW,
    RUNNING,
    SLOTS,
    State,
    schedule,
    update,
    wait,
)
from tests.engines import BLOCK, LONGEST, load, loads, settings


def calls(state: State, lagging: bool, arrivals: list[int]) -> Iterator[State]:
    """The state after every call of the scheduler, until all have ended."""
    left, arrived, call = len(arrivals), 0, 0
    while left:
        while arrived < len(arrivals) and arrivals[arrived] <= call:
            wait(state, arrived)
            arrived += 1
        schedule(state)
        yield state
        if lagging:
            update(state, state.flight, state.count[FLYING])
            state.flight[:], state.count[FLYING] = state.plan, state.count[PLANNED]
        else:
            update(state, state.plan, state.count[PLANNED])
        left -= int(state.count[DONE])
        call += 1
        assert call < 20_000, "requests starve"


def gaps(number: int, seed: int, most: int) -> list[int]:
    """Rising numbers of calls, at which requests arrive."""
    return [int(call) for call in np.cumsum(np.random.default_rng(seed).integers(0, most + 1, number))]


@given(settings(), loads(), st.integers(0, 99), st.integers(0, 4))
def test_limits_hold_and_blocks_are_conserved_at_every_call(
    chosen: Settings, requests: Requests, seed: int, gap: int
) -> None:
    state = build(chosen, requests)
    for now in calls(state, chosen.async_scheduling, gaps(len(requests), seed, gap)):
        planned = now.plan[: now.count[PLANNED]]
        assert planned[:, 1].sum() <= chosen.max_num_batched_tokens
        assert now.count[RUNNING] <= chosen.max_num_seqs and len(set(planned[:, 0])) == len(planned)
        assert np.all(planned[:, 1] > 0)
        assert now.request[:, HELD].sum() == now.request[now.request[:, ROW] >= 0, HELD].sum()
        if not chosen.prefix_caching:  # blocks have no names then
            assert now.blocks.free[0] == chosen.num_blocks - 1 - now.request[:, HELD].sum() >= 0
            continue
        held = [now.table[row[ROW], : row[HELD]] for row in now.request if row[ROW] >= 0]
        users = Counter(np.concatenate(held).tolist()) if held else Counter[int]()
        counted = {i: int(n) for i, n in enumerate(now.blocks.block[:-1, REFERENCES]) if n}
        assert users == counted, "blocks know how many hold them"
        assert 0 not in users and now.blocks.free[0] == chosen.num_blocks - 1 - len(users)
    assert np.all(state.request[:, ROW] == GONE) and np.all(state.request[:, GENERATED] == requests.response)
    assert state.blocks.free[0] == chosen.num_blocks - 1
    assert state.count[SLOTS] == len(state.slots) and state.count[RUNNING] == 0


@given(settings(), loads(), st.integers(0, 99), st.integers(0, 4))
@effort(max_examples=200)
def test_every_token_is_computed_once_but_for_hits_and_preemptions(
    chosen: Settings, requests: Requests, seed: int, gap: int
) -> None:
    """Chunks of a request follow each other without gap; a (re)start begins at a block boundary, with what was found."""
    at = dict[int, int]()  # running requests: tokens computed so far
    for call in trace(chosen, requests, gaps(len(requests), seed, gap)):
        for index in call.preempted:
            del at[index]
        for index, tokens, before in call.scheduled:
            if index not in at:
                assert before % BLOCK == 0 and (chosen.prefix_caching or before == 0)
                assert before < requests.prompt[index] + requests.response[index] - 1 or before == 0
            else:
                assert before == at[index]
            at[index] = before + tokens
        for index in call.finished:
            length = int(requests.prompt[index] + requests.response[index])
            assert at.pop(index, length - 1) == length - 1, "all but the last token was computed"
    assert not at


@given(settings(prefix_caching=True), loads())
def test_counted_blocks_and_named_ones_run_out_at_the_same_call(chosen: Settings, requests: Requests) -> None:
    """Without a cache blocks are only counted; where nothing is shared or found again, that changes no decision."""
    alone = Requests(prompt=requests.prompt, response=requests.response)
    named, counted = (
        trace(replace(chosen, prefix_caching=caching), alone, [0] * len(alone)) for caching in (True, False)
    )
    first = next((i for i, call in enumerate(named) if call.preempted), len(named) - 1)
    assert named[: first + 1] == counted[: first + 1]


@given(settings(), loads())
def test_each_request_ends_once(chosen: Settings, requests: Requests) -> None:
    ended = [index for call in trace(chosen, requests, [0] * len(requests)) for index in call.finished]
    assert sorted(ended) == list(range(len(requests)))


@given(settings(async_scheduling=False), loads())
def test_first_come_first_served(chosen: Settings, requests: Requests) -> None:
    """Nobody overtakes: a request starts before all that came later, and the last one running is preempted first."""
    order, running = list[int](), list[int]()
    for call in trace(chosen, requests, [0] * len(requests)):
        for index in call.preempted:
            assert index == running.pop()
        for index, _, _ in call.scheduled:
            if index not in running:
                assert not call.preempted, "nobody joins while somebody has to give way"
                running.append(index)
            if index not in order:
                order.append(index)
        assert running == sorted(running)
        running = [index for index in running if index not in call.finished]
    assert order == list(range(len(requests)))


def test_what_is_drawn_has_preemptions_while_others_wait() -> None:
    """The laws above would be hollow without them."""
    calls_with = 0

    @given(settings(), loads())
    def count(chosen: Settings, requests: Requests) -> None:
        nonlocal calls_with
        found = trace(chosen, requests, [0] * len(requests))
        calls_with += any(call.preempted and call.waiting > len(call.preempted) for call in found)

    count()
    assert calls_with >= 5


def test_who_was_preempted_comes_back_before_those_who_never_ran() -> None:
    """Two fit, the third waits for a seat; the second is preempted, and joins again as soon as the first has ended."""
    work = load([16, 16, 4], [9, 9, 9])
    found = trace(small(max_num_seqs=2), work, [0, 0, 0])
    assert [call.preempted for call in found if call.preempted] == [[1]]
    assert starts(found, 1)[1][0] <= starts(found, 2)[0][0]
    after = found[starts(found, 1)[1][0]]
    assert after.scheduled[0][0] == 1


def test_nobody_joins_in_the_iteration_of_a_preemption() -> None:
    """The first chunk of who was preempted would fit the blocks that are left, one iteration early."""
    chosen = small(max_num_batched_tokens=10, prefix_caching=False, reserve_full_isl=False)
    found = trace(chosen, load([16, 16], [9, 9]), [0, 0])
    number = next(number for number, call in enumerate(found) if call.preempted)
    assert [index for index, _, _ in found[number].scheduled] == [0] and found[number].blocks < 10
    assert starts(found, 1)[1][0] == number + 1


@given(settings(reserve_full_isl=False), st.integers(1, 60))
def test_a_long_prompt_is_computed_in_chunks_of_the_token_budget(chosen: Settings, prompt: int) -> None:
    found = trace(chosen, load([prompt], [1]), [0])
    budget = chosen.max_num_batched_tokens
    chunks = [call.scheduled[0][1] for call in found if call.scheduled]
    assert chunks == [budget] * (prompt // budget) + [prompt % budget] * (prompt % budget > 0)


def small(**changed: object) -> Settings:
    chosen: dict[str, object] = {
        "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 11, "block_tokens": BLOCK,
    }  # fmt: skip
    return Settings(**(chosen | changed))  # type: ignore[arg-type]


def starts(found: list[Traced], request: int) -> list[tuple[int, int, int]]:
    """(call, tokens, computed before) wherever a request joins."""
    joins, running = [], False
    for number, call in enumerate(found):
        running = running and request not in call.preempted
        for index, tokens, before in call.scheduled:
            if index == request and not running:
                joins.append((number, tokens, before))
                running = True
    return joins


@pytest.mark.parametrize(("caching", "before"), [(True, 16), (False, 0)])
def test_a_preempted_request_resumes_on_its_own_blocks(caching: bool, before: int) -> None:
    """Two of 16 + 9 tokens share 10 blocks of 4: with 20 tokens computed each they are full, and the second gives way.

    Its 5 blocks are free then, the last one first in the queue. The first needs one more, so that 4 are left to be found.
    """
    found = trace(small(prefix_caching=caching), load([16, 16], [9, 9]), [0, 0])
    assert [call.preempted for call in found if call.preempted] == [[1]]
    joins = starts(found, 1)
    assert joins[0] == (0, 16, 0)
    again, tokens, known = joins[1]
    assert 1 not in {index for index, _, _ in found[again - 1].scheduled}
    assert known == before and known + tokens == 20 + 1


def test_samples_of_a_prompt_share_its_full_blocks_and_compute_at_least_one_token() -> None:
    for prompt in range(1, 30):
        found = trace(small(num_blocks=99), load([prompt] * 4, [5] * 4, [0] * 4), [0] * 4)
        shared = (prompt - 1) // BLOCK * BLOCK
        assert found[0].scheduled == [(0, prompt, 0)] + [(i, prompt - shared, shared) for i in (1, 2, 3)]
        assert found[0].blocks == shared // BLOCK + 4 * (-(-prompt // BLOCK) - shared // BLOCK)


@given(settings(batching="static", async_scheduling=False), loads(), st.integers(0, 99), st.integers(0, 4))
def test_a_static_batch_ends_before_the_next_begins(chosen: Settings, requests: Requests, seed: int, gap: int) -> None:
    """Once budget was left over, a batch is full: nobody joins it, not even who was preempted, until all of it is gone."""
    batch, ended = set[int](), set[int]()
    closed = False
    for call in trace(chosen, requests, gaps(len(requests), seed, gap)):
        if batch == ended:
            batch, ended, closed = set(), set(), False
        joining = {index for index, _, _ in call.scheduled} - batch
        assert not (joining and closed)
        batch |= joining
        budget_left = sum(tokens for _, tokens, _ in call.scheduled) < chosen.max_num_batched_tokens
        closed = closed or (budget_left and not call.preempted)
        ended |= set(call.finished) | set(call.preempted)


def test_continuous_batching_fills_a_slot_at_once_and_static_waits() -> None:
    work = load([4] * 3, [2, 9, 2])
    joined = {
        how: starts(trace(small(max_num_seqs=2, batching=how), work, [0] * 3), 2)[0][0]
        for how in ("continuous", "static")
    }
    assert joined == {"continuous": 2, "static": 9}


@given(settings(contiguous_tokens=LONGEST, prefix_caching=False), loads())
def test_contiguous_sequences_hold_the_longest_from_the_start(chosen: Settings, requests: Requests) -> None:
    each = -(-LONGEST // BLOCK)
    for call in trace(chosen, requests, [0] * len(requests)):
        assert call.blocks == call.running * each and not call.preempted
        assert call.running <= (chosen.num_blocks - 1) // each


def test_a_watermark_keeps_blocks_free_beside_running_requests_only() -> None:
    work = load([8] * 5, [1] * 5)
    first = {
        share: len(trace(small(max_num_seqs=9, num_blocks=11, watermark=share), work, [0] * 5)[0].scheduled)
        for share in (0.0, 0.2, 0.3, 0.9)
    }
    assert first == {0.0: 5, 0.2: 4, 0.3: 3, 0.9: 1}, "10 free blocks, two for each, 0, 2, 3 and 9 kept"


@pytest.mark.parametrize(("reserve", "joined"), [(True, 1), (False, 2)])
def test_room_for_the_whole_prompt_or_only_for_its_first_chunk(reserve: bool, joined: int) -> None:
    """10 blocks: the first takes 5; of the second's 24 tokens 6 blocks are lacking, of its first chunk of 12 none."""
    found = trace(small(max_num_batched_tokens=32, reserve_full_isl=reserve), load([20, 24], [4, 4]), [0, 0])
    assert found[0].running == joined


def test_looking_ahead_sees_arrivals_and_free_slots_one_iteration_late() -> None:
    """Calls of the scheduler; the call k + 1 comes before the results of call k with asynchronous scheduling."""
    work = load([4, 4, 4], [3, 9, 3])
    for lagging, slot in ((False, 3), (True, 4)):
        found = trace(small(max_num_seqs=2, async_scheduling=lagging), work, [0, 0, 0])
        assert starts(found, 2)[0][0] == slot
        ends = next(number for number, call in enumerate(found) if 2 in call.finished)
        assert ends == slot + 2 + lagging


def test_looking_ahead_computes_the_same_tokens() -> None:
    """The last token is known to be the last: no iteration is planned beyond it."""
    work = load([5, 9, 13], [4, 8, 1])
    one, two = (trace(small(num_blocks=99, async_scheduling=lag), work, [0] * 3) for lag in (False, True))
    count = [Counter[int](), Counter[int]()]
    for total, found in zip(count, (one, two), strict=True):
        for call in found:
            for index, tokens, _ in call.scheduled:
                total[index] += tokens
    assert count[0] == count[1] == {0: 8, 1: 16, 2: 13}


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    assert trace(small(num_blocks=12), load([30], [11]), [0])
    with pytest.raises(TooSmall, match="41 tokens does not fit 10"):
        trace(small(num_blocks=11), load([30], [11]), [0])


@pytest.mark.parametrize(
    ("requests", "changed"),
    [
        (load([0], [1]), {}), (load([1], [0]), {}), (load([5, 5], [1, 1], arrival_s=[1.0, 0.5]), {}),
        (load([5], [1], arrival_s=[float("nan")]), {}), (load([5], [4]), {"contiguous_tokens": 8}),
    ],
    ids=["no prompt", "no response", "arrivals that fall", "no arrival", "longer than what is reserved"],
)  # fmt: skip
def test_requests_that_are_none_are_refused(requests: Requests, changed: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"at least one token|never fall|contiguous KV reserves 8 tokens"):
        build(small(**changed), requests)


@pytest.mark.parametrize(
    "changed", [{"max_num_seqs": 0}, {"max_num_batched_tokens": 0}, {"num_blocks": 1}, {"block_tokens": 0},
                {"batching": "dynamic"}], ids=str,
)  # fmt: skip
def test_settings_of_no_engine_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"at least one sequence|continuous or static"):
        small(**changed)
