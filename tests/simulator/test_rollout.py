"""Engines of scenarios, piece by piece: pieces are iterations, conserve tokens, stop in time and can be interrupted."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.load import load as scenario
from profiles.iteration import EngineTable
from simulator.engine import Requests, Settings, TooSmall
from simulator.replay import replay
from simulator.rollout import Engine, Piece
from simulator.scheduler import GENERATED
from tests.engines import BLOCK, CONSTANT, STEP_S, load, loads, of_step, settings, tables

Each = tuple[int, int, int, float, float, int, int]
AMPLE = 100_000


def started(requests: Requests, table: EngineTable = CONSTANT, max_jump: int = 1 << 60, **changed: object) -> Engine:
    """An engine where all requests wait."""
    chosen: dict[str, object] = {
        "max_num_seqs": 256, "max_num_batched_tokens": 8192, "num_blocks": AMPLE, "block_tokens": BLOCK,
    }  # fmt: skip
    return waiting(Settings(**(chosen | changed)), table, requests, max_jump)  # type: ignore[arg-type]


def waiting(chosen: Settings, table: EngineTable, requests: Requests, max_jump: int = 1 << 60) -> Engine:
    engine = Engine(chosen, table, requests, max_jump)
    engine.arrive(range(len(requests)))
    return engine


def iterations(pieces: Sequence[Piece]) -> Iterator[Each]:
    """Every iteration on its own; within a piece the context grows by the same amount in each."""
    for piece in pieces:
        for i in range(piece.iterations):
            share = i / max(piece.iterations - 1, 1)
            first, last = piece.first, piece.last
            pairs = [(first.token_context, last.token_context), (first.context_read, last.context_read)]
            grown = [round(begin + share * (end - begin)) for begin, end in pairs]
            counts = (piece.sequences, piece.tokens, piece.prefill_tokens)
            yield *counts, grown[0], grown[1], piece.preempted, piece.recomputed_tokens


@given(loads(), settings(), tables())
def test_jumps_and_single_steps_give_the_same_iterations(
    requests: Requests, chosen: Settings, table: EngineTable
) -> None:
    fast, exact = (list(waiting(chosen, table, requests, longest).pieces()) for longest in (1 << 60, 1))
    assert list(iterations(fast)) == list(iterations(exact))
    assert sum(piece.seconds for piece in fast) == pytest.approx(sum(piece.seconds for piece in exact), rel=1e-9)
    assert sum(piece.cached_tokens for piece in fast) == sum(piece.cached_tokens for piece in exact)
    assert [index for piece in fast for index in piece.ended] == [index for piece in exact for index in piece.ended]


@given(loads(), settings(), st.integers(2, 9))
def test_the_length_of_jumps_does_not_matter(requests: Requests, chosen: Settings, longest: int) -> None:
    free, capped = waiting(chosen, CONSTANT, requests), waiting(chosen, CONSTANT, requests, longest)
    assert list(iterations(list(free.pieces()))) == list(iterations(list(capped.pieces())))


@given(loads(), settings())
def test_every_block_comes_back_and_limits_hold_throughout(requests: Requests, chosen: Settings) -> None:
    engine = waiting(chosen, CONSTANT, requests)
    for piece in engine.pieces():
        assert 0 <= engine.free_blocks <= chosen.num_blocks - 1
        assert engine.num_running <= chosen.max_num_seqs
        assert piece.sequences <= piece.tokens <= chosen.max_num_batched_tokens
        assert piece.sequences > 0 or piece.preempted or chosen.async_scheduling
        assert piece.op == ("prefill" if piece.prefill_tokens else "decode")
    assert engine.free_blocks == chosen.num_blocks - 1 and not engine.num_running and not engine.busy


@given(loads(), settings(), tables())
def test_pieces_are_the_replay(requests: Requests, chosen: Settings, table: EngineTable) -> None:
    pieces, found = list(waiting(chosen, table, requests).pieces()), replay(table, chosen, requests)
    assert sum(piece.seconds for piece in pieces) == pytest.approx(found.makespan_s, rel=1e-12)
    assert sum(piece.iterations for piece in pieces) == found.iterations
    assert sum(piece.preempted for piece in pieces) == found.preemptions
    assert sorted(index for piece in pieces for index in piece.ended) == list(range(len(requests)))


@given(loads(), settings(async_scheduling=False))
def test_tokens_are_conserved(requests: Requests, chosen: Settings) -> None:
    """Each request computes its prompt and all but its last token once, less what was cached, and again what was lost."""
    pieces = list(waiting(chosen, CONSTANT, requests).pieces())
    computed = sum(piece.iterations * piece.tokens for piece in pieces)
    again, cached = (sum(getattr(piece, name) for piece in pieces) for name in ("recomputed_tokens", "cached_tokens"))
    once = int((requests.prompt + requests.response - 1).sum())
    if not chosen.prefix_caching:
        assert computed - again == once and cached == 0
    elif not any(piece.preempted for piece in pieces):
        assert computed == once - cached and again == 0
    else:
        assert computed - again <= once - cached


@given(loads())
def test_one_sequence_at_a_time_is_serial(requests: Requests) -> None:
    pieces = list(started(requests, max_num_seqs=1, prefix_caching=False).pieces())
    assert sum(piece.iterations for piece in pieces) == requests.response.sum()
    assert {piece.sequences for piece in pieces} == {1}


@given(st.integers(1, 50), st.integers(2, 60), st.integers(1, 30))
def test_equal_lengths_take_one_prefill_and_the_rest_in_step(number: int, prompt: int, response: int) -> None:
    pieces = list(started(load([prompt] * number, [response] * number)).pieces())
    steps = list(iterations(pieces))
    assert len(steps) == response and len(pieces) == min(response, 2)
    assert steps[0][1:5] == (number * prompt, number * prompt, number * prompt * (prompt + 1) // 2, number * prompt)
    assert [step[4] for step in steps[1:]] == [number * (prompt + i) for i in range(1, response)]


def test_the_number_of_pieces_grows_with_events_not_with_tokens() -> None:
    def pieces(response: int, lagging: bool = False) -> int:
        load_ = load([8] * 64, [response * (1 + i % 4) for i in range(64)])
        return sum(1 for _ in started(load_, num_blocks=10**6, async_scheduling=lagging).pieces())

    assert pieces(20_000) == pieces(20) <= 10
    assert pieces(20_000, lagging=True) == pieces(20, lagging=True) <= 20


@given(st.floats(0.0, 60 * STEP_S), st.booleans())
def test_a_turn_ends_at_the_first_iteration_after_its_time(until: float, lagging: bool) -> None:
    chosen = Settings(max_num_seqs=3, max_num_batched_tokens=64, num_blocks=99, async_scheduling=lagging)
    engine = Engine(chosen, CONSTANT, load([8] * 3, [50] * 3))
    engine.arrive([0, 1])
    engine.turn()
    if lagging:  # the first decode is planned before the prefill's results are in
        engine.turn()
    before = float(engine._clock[0])
    piece = engine.turn(until_s=until)
    assert piece.iterations >= 1 and piece.sequences == 2
    # iterations end at whole multiples of STEP_S; with a lag, the one under way was planned before
    whole = min(max(int(np.ceil(until / STEP_S - 1e-9)), 1), 49 - lagging)
    assert piece.iterations == whole
    assert engine._clock[0] - before == pytest.approx(whole * STEP_S)


def test_who_arrives_in_time_joins_the_next_iteration() -> None:
    engine = Engine(
        Settings(max_num_seqs=4, max_num_batched_tokens=64, num_blocks=99), CONSTANT, load([8] * 2, [50] * 2)
    )
    engine.arrive([0])
    engine.turn()
    assert engine.turn(until_s=3.5 * STEP_S).iterations == 4
    engine.arrive([1])
    assert engine.turn().sequences == 2


@given(loads(), settings(async_scheduling=False), st.integers(1, 20), st.booleans())
def test_interrupted_requests_complete_with_the_same_lengths(
    requests: Requests, chosen: Settings, turns: int, forget: bool
) -> None:
    engine, done = waiting(chosen, CONSTANT, requests), list[int]()
    for _ in range(turns):
        if engine.busy:
            done += engine.turn().ended
    made, running = engine.state.request[:, GENERATED].copy(), engine.num_running
    assert engine.interrupt(forget) == running
    assert engine.num_running == 0 and engine.free_blocks == chosen.num_blocks - 1
    assert not forget or np.all(engine.state.blocks.holder == -1)
    np.testing.assert_array_equal(engine.state.request[:, GENERATED], made)
    done += [index for piece in engine.pieces() for index in piece.ended]
    assert sorted(done) == list(range(len(requests)))
    np.testing.assert_array_equal(engine.state.request[:, GENERATED], requests.response)


@pytest.mark.parametrize(("forget", "computed"), [(True, 16 + 9), (False, 1)])
def test_what_the_cache_forgets_is_computed_again(forget: bool, computed: int) -> None:
    engine = started(load([16], [20]))
    engine.turn()
    engine.steps(8)
    engine.interrupt(forget)
    piece = engine.turn()
    assert (piece.tokens, piece.recomputed_tokens) == (computed, computed - 1)


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    assert list(started(load([30], [11]), num_blocks=12).pieces())
    with pytest.raises(TooSmall, match="41 tokens does not fit 10"):
        started(load([30], [11]), num_blocks=11)


def test_samples_of_a_scenario_have_its_lengths_and_share_prompts() -> None:
    chosen = scenario("scenarios/quickstart.yaml")
    work, prompts = chosen.workload, [1, 3]
    requests = of_step(chosen, 2, prompts)
    np.testing.assert_array_equal(
        requests.response, work.response_lengths(chosen.seed, 2)[prompts].ravel(),
    )  # fmt: skip
    np.testing.assert_array_equal(
        requests.prompt, work.prompt_lengths(chosen.seed, 2)[prompts].repeat(work.samples_per_prompt)
    )
    assert requests.contents is not None
    of_prompts = [
        set(map(tuple, requests.contents[i * work.samples_per_prompt :][: work.samples_per_prompt])) for i in (0, 1)
    ]
    assert [len(found) for found in of_prompts] == [1, 1]
    one, two = (set(found.pop()) for found in of_prompts)
    assert not one & two
