"""Playing a whole engine by counting is the scheduler's play: the same times, or it says that it cannot."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from profiles.iteration import EngineTable
from simulator.counted import NUM_WINDOWS
from simulator.engine import Requests, Settings, TooSmall
from simulator.rollout import Engine
from simulator.whole import Played, Tables, countable, whole
from tests.engines import CONSTANT, STEP_S, load, loads, settings, tables

COUNTABLE = settings().map(lambda drawn: replace(drawn, batching="continuous"))


def counted(chosen: Settings, table: EngineTable, requests: Requests) -> Played | None:
    assert countable(chosen, table)
    contents = requests.contents or [range(i, i) for i in range(len(requests))]
    groups = np.cumsum([i > 0 and contents[i].start != contents[i - 1].start for i in range(len(contents))])
    return whole(chosen, Tables.of(table, chosen.max_num_seqs), requests, groups)


def scheduled(chosen: Settings, table: EngineTable, requests: Requests) -> tuple[Engine, int, int, int, int]:
    """The engine after all its requests, with its preemptions, iterations, tokens, and tokens found in the cache."""
    engine = Engine(chosen, table, requests)
    engine.arrive(range(len(requests)))
    pieces = list(engine.pieces())
    tokens = sum(piece.iterations * piece.tokens for piece in pieces)
    preempted, cached = sum(piece.preempted for piece in pieces), sum(piece.cached_tokens for piece in pieces)
    return engine, preempted, sum(piece.iterations for piece in pieces), tokens, cached


@given(chosen=COUNTABLE, table=tables(), requests=loads())
@examples(max_examples=150)
def test_it_is_what_the_scheduler_plays(chosen: Settings, table: EngineTable, requests: Requests) -> None:
    requests, table = replace(requests, arrival_s=None), replace(table, skews=None)
    if chosen.max_num_seqs > chosen.max_num_batched_tokens or (chosen.prefix_caching and chosen.contiguous_tokens):
        assert not countable(chosen, table)
        return
    engine, preemptions, iterations, tokens, cached = scheduled(chosen, table, requests)
    played = counted(chosen, table, requests)
    assert played is None or not preemptions
    if not chosen.prefix_caching:
        assert (played is None) == (preemptions > 0)
    if played is not None:
        np.testing.assert_allclose(played.ended_s, engine.times[:, 2], rtol=1e-9)
        assert played.iterations == iterations
        assert played.cached_tokens == cached
        assert sum(window.tokens for window in played.windows) == tokens
        assert sum(window.prefill_tokens for window in played.windows) <= requests.prompt.sum()
        ends = [window.end_s for window in played.windows]
        assert ends == sorted(ends) and ends[-1] == pytest.approx(played.ended_s.max())


def test_a_long_history_is_told_in_few_windows_that_cover_it() -> None:
    requests = load([8] * 4000, [1 + i % 37 for i in range(4000)])
    chosen = Settings(max_num_seqs=16, max_num_batched_tokens=64, num_blocks=400, block_tokens=4, prefix_caching=False)
    played = counted(chosen, CONSTANT, requests)
    assert played is not None and NUM_WINDOWS <= len(played.windows) <= 2 * NUM_WINDOWS
    assert played.iterations * STEP_S == pytest.approx(played.windows[-1].end_s)
    assert sum(w.end_s - w.start_s for w in played.windows) == pytest.approx(played.windows[-1].end_s)
    assert sum(w.tokens for w in played.windows) == int((requests.prompt + requests.response - 1).sum())
    assert all(w.sequences <= 16 == w.largest.sequences for w in played.windows[1:-1])


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    chosen = Settings(max_num_seqs=2, max_num_batched_tokens=8, num_blocks=3, block_tokens=4, prefix_caching=False)
    with pytest.raises(TooSmall, match="9 tokens"):
        counted(chosen, CONSTANT, load([4], [5]))


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20))
@examples(max_examples=30)
def test_alone_with_room_for_all_it_takes_the_longest(lengths: list[int]) -> None:
    chosen = Settings(max_num_seqs=32, max_num_batched_tokens=64, num_blocks=999, block_tokens=4, prefix_caching=False)
    played = counted(chosen, CONSTANT, load([1] * len(lengths), lengths))
    assert played is not None
    np.testing.assert_allclose(played.ended_s, np.array(lengths) * STEP_S)


def test_samples_of_one_prompt_hold_its_blocks_together() -> None:
    """Six samples of a prompt of 20 blocks fit where five that share nothing do not."""
    chosen = Settings(max_num_seqs=8, max_num_batched_tokens=400, num_blocks=60, block_tokens=4, prefix_caching=True)
    requests = load([82] * 6, [10] * 6, [0] * 6)
    played = counted(chosen, CONSTANT, requests)
    assert played is not None and played.cached_tokens == 5 * 80
    np.testing.assert_allclose(played.ended_s, 10 * STEP_S)
    apart = counted(replace(chosen, prefix_caching=False), CONSTANT, requests)
    assert apart is not None and apart.ended_s.max() > 20 * STEP_S


def test_a_sample_finds_the_blocks_of_those_before_it_that_have_gone() -> None:
    chosen = Settings(max_num_seqs=1, max_num_batched_tokens=64, num_blocks=60, block_tokens=4, prefix_caching=True)
    requests = load([9, 9, 9], [3, 3, 3], [0, 0, 1])
    played = counted(chosen, CONSTANT, requests)
    assert played is not None and played.cached_tokens == 8
