"""The rollout engine as laws: conservation, closed forms, and jumps that equal single steps."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.scenario import Rollout
from simulator.rollout import Engine, Piece, Request, TooSmall

Iteration = tuple[int, int, int, float, float, int, int]
AMPLE = 100_000


def engine(num_blocks: int = AMPLE, max_jump: int = 1 << 60, **settings: int | bool) -> Engine:
    return Engine(
        rollout=Rollout.model_validate({"block_tokens": 4} | settings), num_blocks=num_blocks, max_jump=max_jump
    )


def iterations(pieces: Sequence[Piece]) -> Iterator[Iteration]:
    """Every iteration on its own; within a piece the context grows by the same amount in each."""
    for piece in pieces:
        for i in range(piece.iterations):
            share = i / max(piece.iterations - 1, 1)
            grown = [first + share * (last - first) for first, last in (piece.token_context, piece.context_read)]
            yield (
                piece.sequences,
                piece.tokens,
                piece.prefill_tokens,
                *map(round, grown),
                piece.preempted,
                piece.recomputed_tokens,
            )


def work(prompts: list[tuple[int, list[int]]]) -> list[Request]:
    return [
        Request(group=group, prompt=prompt, response=response)
        for group, (prompt, responses) in enumerate(prompts)
        for response in responses
    ]


requests = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1, max_size=4)), min_size=1, max_size=6
).map(work)
settings = st.fixed_dictionaries(
    {"max_num_seqs": st.integers(1, 12), "max_num_batched_tokens": st.integers(1, 64), "prefix_caching": st.booleans()}
)
scarce = st.integers(20, 60)
"""KV blocks: one sequence of at most 70 tokens fits, all together often do not"""


@given(requests, settings, scarce)
def test_jumps_and_single_steps_give_the_same_iterations(work: list[Request], settings: dict, blocks: int) -> None:
    fast, exact = engine(blocks, **settings), engine(blocks, max_jump=1, **settings)
    assert list(iterations(list(fast.pieces(work)))) == list(iterations(list(exact.pieces(work))))
    assert fast.cached_tokens == exact.cached_tokens


@given(requests, settings, scarce, st.integers(2, 9))
def test_the_length_of_jumps_does_not_matter(work: list[Request], settings: dict, blocks: int, limit: int) -> None:
    free, capped = engine(blocks, **settings), engine(blocks, max_jump=limit, **settings)
    assert list(iterations(list(free.pieces(work)))) == list(iterations(list(capped.pieces(work))))


@given(requests, settings, scarce)
def test_every_block_comes_back_and_limits_hold_throughout(work: list[Request], settings: dict, blocks: int) -> None:
    played = engine(blocks, **settings)
    for piece in played.pieces(work):
        assert 0 <= played.free <= blocks - 1
        assert len(played.running) <= settings["max_num_seqs"]
        assert piece.sequences <= piece.tokens <= settings["max_num_batched_tokens"]
        assert piece.sequences > 0 or piece.preempted
    assert played.free == blocks - 1 and not played.running and not played.waiting


@given(requests, settings, scarce)
def test_tokens_are_conserved(work: list[Request], settings: dict, blocks: int) -> None:
    """Each request computes its prompt and all but its last token once, less what was cached, and again what was lost."""
    played = engine(blocks, **settings)
    pieces = list(played.pieces(work))
    computed = sum(piece.iterations * piece.tokens for piece in pieces)
    again, once = sum(piece.recomputed_tokens for piece in pieces), sum(r.prompt + r.response - 1 for r in work)
    if not settings["prefix_caching"]:
        assert computed - again == once and played.cached_tokens == 0
    elif not any(piece.preempted for piece in pieces):
        assert computed == once - played.cached_tokens and again == 0
    else:
        assert computed - again <= once - played.cached_tokens


def test_the_drawn_loads_do_preempt_and_share_prefixes() -> None:
    """The laws above would be hollow without pressure; these loads have it."""
    load = [Request(group=i // 4, prompt=24, response=20 + i % 5) for i in range(16)]
    played = engine(45, max_num_batched_tokens=64)
    pieces = list(played.pieces(load))
    assert sum(piece.preempted for piece in pieces) > 3 and sum(piece.recomputed_tokens for piece in pieces) > 50
    assert played.cached_tokens > 100


@given(requests)
def test_one_sequence_at_a_time_is_serial(work: list[Request]) -> None:
    pieces = list(engine(max_num_seqs=1, prefix_caching=False).pieces(work))
    assert sum(piece.iterations for piece in pieces) == sum(request.response for request in work)
    assert {piece.sequences for piece in pieces} == {1}


@given(st.integers(1, 50), st.integers(1, 60), st.integers(1, 30))
def test_equal_lengths_without_pressure_take_one_prefill_and_the_rest_in_step(
    n: int, prompt: int, response: int
) -> None:
    load = [Request(group=i, prompt=prompt, response=response) for i in range(n)]
    pieces = list(engine(max_num_batched_tokens=10_000).pieces(load))
    steps = list(iterations(pieces))
    assert len(steps) == response and len(pieces) == (1 if response == 1 else 2)
    assert steps[0][1:5] == (n * prompt, n * prompt, n * prompt * (prompt + 1) // 2, n * prompt)
    assert [step[4] for step in steps[1:]] == [n * (prompt + i) for i in range(1, response)]


@given(st.integers(1, 200), st.integers(1, 64))
def test_a_long_prompt_is_computed_in_chunks_of_the_token_budget(prompt: int, budget: int) -> None:
    pieces = list(engine(max_num_batched_tokens=budget).pieces([Request(group=0, prompt=prompt, response=1)]))
    assert [piece.tokens for piece in pieces] == [budget] * (prompt // budget) + [prompt % budget] * (
        prompt % budget > 0
    )
    assert sum(piece.token_context[0] for piece in pieces) == prompt * (prompt + 1) // 2


@given(st.integers(1, 60), st.integers(2, 8))
def test_samples_of_a_prompt_share_its_full_blocks_and_recompute_at_least_one_token(prompt: int, samples: int) -> None:
    load = [Request(group=0, prompt=prompt, response=5) for _ in range(samples)]
    played = engine()
    first = next(iter(played.pieces(load)))
    assert played.cached_tokens == (samples - 1) * ((prompt - 1) // 4 * 4)
    assert first.tokens == samples * prompt - played.cached_tokens


@given(requests, settings)
def test_with_ample_memory_nothing_is_preempted(work: list[Request], settings: dict) -> None:
    assert not any(piece.preempted for piece in engine(AMPLE, **settings).pieces(work))


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    load = [Request(group=0, prompt=30, response=11)]
    assert list(engine(12).pieces(load))
    with pytest.raises(TooSmall, match="41 tokens does not fit 10"):
        list(engine(11).pieces(load))


def test_the_number_of_pieces_grows_with_events_not_with_tokens() -> None:
    def pieces(response: int) -> int:
        load = [Request(group=i, prompt=8, response=response * (1 + i % 4)) for i in range(64)]
        return sum(1 for _ in engine(AMPLE).pieces(load))

    assert pieces(2000) == pieces(20) <= 10
