"""Copies of an engine that wait for each other in every iteration."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.load import load as scenario
from profiles.cost import CostModel
from profiles.iteration import EngineTable
from profiles.profile import datasheet
from simulator.engine import Requests, Settings
from simulator.lockstep import LockStep, start_engine
from simulator.rollout import Engine, Piece
from tests.engines import CONSTANT, STEP_S, load, loads, of_step, settings, tables

COPIES = st.integers(2, 4)


def copies(
    table: EngineTable, chosen: Settings, requests: Requests, number: int, max_jump: int = 1 << 60
) -> list[Piece]:
    engine = LockStep(chosen, table, requests, number, max_jump)
    engine.arrive(range(len(requests)))
    return list(engine.pieces())


def alone(table: EngineTable, chosen: Settings, requests: Requests) -> list[Piece]:
    engine = Engine(chosen, table, requests)
    engine.arrive(range(len(requests)))
    return list(engine.pieces())


def part(requests: Requests, copy: int, number: int) -> Requests:
    contents = None if requests.contents is None else requests.contents[copy::number]
    return Requests(prompt=requests.prompt[copy::number], response=requests.response[copy::number], contents=contents)


def seconds(pieces: list[Piece]) -> float:
    return sum(piece.seconds for piece in pieces)


def totals(pieces: list[Piece]) -> list[int]:
    """Iterations, tokens computed, preemptions, tokens computed again and found."""
    return [
        sum(piece.iterations for piece in pieces), sum(piece.iterations * piece.tokens for piece in pieces),
        *(sum(getattr(p, name) for p in pieces) for name in ("preempted", "recomputed_tokens", "cached_tokens")),
    ]  # fmt: skip


@given(tables(), settings(async_scheduling=False), loads())
def test_one_copy_is_an_engine(table: EngineTable, chosen: Settings, requests: Requests) -> None:
    one, engine = copies(table, chosen, requests, 1), alone(table, chosen, requests)
    assert seconds(one) == pytest.approx(seconds(engine), rel=1e-9)
    assert totals(one) == totals(engine)


@given(tables(), settings(async_scheduling=False), loads(), COPIES)
def test_copies_take_at_least_as_long_as_the_slowest_alone(
    table: EngineTable, chosen: Settings, requests: Requests, number: int
) -> None:
    """Costs never fall with tokens or sequences, so padding to the fullest copy never helps."""
    shares = [alone(table, chosen, part(requests, copy, number)) for copy in range(number)]
    together = copies(table, chosen, requests, number)
    assert seconds(together) >= max(seconds(share) for share in shares) * (1 - 1e-9)
    assert totals(together)[1:] == np.sum([totals(share) for share in shares], axis=0).tolist()[1:]
    assert totals(together)[0] >= max(totals(share)[0] for share in shares)


@given(tables(), settings(), loads(), COPIES)
def test_jumps_and_single_steps_give_the_same(
    table: EngineTable, chosen: Settings, requests: Requests, number: int
) -> None:
    fast, exact = (copies(table, chosen, requests, number, longest) for longest in (1 << 60, 1))
    assert seconds(fast) == pytest.approx(seconds(exact), rel=1e-9)
    assert totals(fast) == totals(exact) and len(fast) <= len(exact)
    assert [sorted(ended) for ended in _ends(fast)] == [sorted(ended) for ended in _ends(exact)]


def _ends(pieces: list[Piece]) -> list[tuple[int, ...]]:
    return [piece.ended for piece in pieces if piece.ended]


@given(settings(), loads(), COPIES)
def test_every_request_ends_once(chosen: Settings, requests: Requests, number: int) -> None:
    pieces = copies(CONSTANT, chosen, requests, number)
    assert sorted(index for piece in pieces for index in piece.ended) == list(range(len(requests)))


@given(tables(), settings(async_scheduling=False), loads(), COPIES)
def test_copies_with_the_same_requests_take_as_long_as_one(
    table: EngineTable, chosen: Settings, requests: Requests, number: int
) -> None:
    several = Requests(
        prompt=requests.prompt.repeat(number), response=requests.response.repeat(number),
        contents=[found for found in requests.contents or [] for _ in range(number)],
    )  # fmt: skip
    one, many = alone(table, chosen, requests), copies(table, chosen, several, number)
    assert seconds(many) == pytest.approx(seconds(one), rel=1e-9)
    assert totals(many)[1:] == [number * total for total in totals(one)[1:]]


def test_uneven_copies_wait_for_the_longest() -> None:
    """Responses of 3 and 30 tokens, one on each copy: 30 iterations; on one engine with both: 30 as well."""
    chosen = Settings(max_num_seqs=4, max_num_batched_tokens=64, num_blocks=99)
    pieces = copies(CONSTANT, chosen, load([8, 8], [3, 30]), 2)
    assert seconds(pieces) == pytest.approx(30 * STEP_S) and totals(pieces)[0] == 30
    assert _ends(pieces) == [(0,), (1,)]


def test_all_copies_are_as_full_as_the_fullest_and_wait_for_the_slowest_attention() -> None:
    """Four short sequences on one copy, a long one on the other: the tokens of the first, the context of the second."""
    table = EngineTable(
        token_grid=np.array([0.0, 100.0]), token_seconds=np.array([0.0, 0.1]), sequence_s=1e-4, context_read_s=1e-6
    )
    requests = load([4, 400, 4, 1, 4, 1, 4, 1], [2, 2, 2, 1, 2, 1, 2, 1])
    chosen = Settings(max_num_seqs=4, max_num_batched_tokens=1024, num_blocks=99)
    prefill, decode = copies(table, chosen, requests, 2)
    assert prefill.seconds == pytest.approx(0.403 + 4e-4 + 403e-6)
    assert decode.seconds == pytest.approx(0.004 + 4e-4 + 401e-6)


def test_a_copy_that_overtakes_another_ends_no_straight_line_early_or_late() -> None:
    """Eight sequences read 8 tokens more in each iteration and pass the one long sequence of the other copy half way."""
    table = EngineTable(step_s=1e-4, context_read_s=1e-6)
    requests = load([8, 400] + [8, 1] * 7, [100, 100] + [100, 1] * 7)
    chosen = Settings(max_num_seqs=8, max_num_batched_tokens=1024, num_blocks=999)
    fast, exact = (copies(table, chosen, requests, 2, longest) for longest in (1 << 60, 1))
    read = [max(8 * (8 + step), 400 + step) for step in range(1, 100)]
    assert seconds(exact) == pytest.approx(100 * 1e-4 + 1e-6 * (407 + sum(read)))
    assert seconds(fast) == pytest.approx(seconds(exact), rel=1e-9) and len(fast) < 20


def test_a_scenario_starts_copies_where_its_placement_asks_for_them() -> None:
    big = scenario("scenarios/ppo-7b-16gpu.yaml")
    data = big.model_dump(mode="json", by_alias=True)
    spread = {"pool": "rollout", "engines": 1, "data_parallel": 2, "expert_parallel": 2}
    moe = big.replace({
        "place": data["place"] | {"actor.generate": [spread]},
        "models": data["models"] | {"actor": {"arch": "qwen3-30b-a3b"}},
    })  # fmt: skip
    kinds = []
    for chosen in (big, moe):
        worker = chosen.team("actor", "generate")[0]
        table = CostModel(chosen, {"a100-80g-sxm": datasheet("a100-80g-sxm")}).engine_table(worker)
        kinds.append(type(start_engine(chosen, worker, table, of_step(chosen, 0, [0, 1]))))
    assert kinds == [Engine, LockStep]


@given(loads(), settings(async_scheduling=False), tables(), COPIES, st.floats(0.001, 0.3))
def test_looking_ahead_and_stopping_in_time_change_nothing(
    requests: Requests, chosen: Settings, table: EngineTable, number: int, until: float
) -> None:
    free, stopping = (LockStep(chosen, table, None, number) for _ in range(2))
    for engine in (free, stopping):
        engine.add(requests)
    whole, cut = list(free.pieces()), list[Piece]()
    while stopping.busy:
        iterations, seconds = stopping.ahead(until)
        cut.append(stopping.turn(until))
        if iterations:
            assert (iterations, pytest.approx(seconds)) == (cut[-1].iterations, cut[-1].seconds)
            assert iterations == 1 or seconds * (iterations - 1) / iterations < until * 2
    assert sum(piece.seconds for piece in cut) == pytest.approx(sum(piece.seconds for piece in whole), rel=1e-9)
    assert sorted(i for piece in cut for i in piece.ended) == list(range(len(requests)))
    assert sum(piece.iterations for piece in cut) == sum(piece.iterations for piece in whole)


@given(loads(), settings(), COPIES, st.integers(0, 6), st.integers(0, 30))
def test_copies_take_more_requests_and_let_them_go(
    requests: Requests, chosen: Settings, number: int, turns: int, taken: int
) -> None:
    half = len(requests) // 2
    parts = [
        Requests(prompt=requests.prompt[part], response=requests.response[part])
        for part in (slice(0, half), slice(half, None))
    ]
    engine, done = LockStep(chosen, CONSTANT, parts[0], number), list[int]()
    engine.arrive(range(half))
    for _ in range(turns):
        done += engine.turn().ended if engine.busy else ()
    assert engine.add(parts[1]) == range(half, len(requests))
    waiting = engine.num_waiting
    gone = engine.withdraw(taken)
    assert len(gone) <= min(taken, waiting) and engine.num_waiting == waiting - len(gone)
    running = [request for request, _, _ in engine.running()][:3]
    engine.abort(running)
    assert not {*running} & {request for request, _, _ in engine.running()}
    done += [i for piece in engine.pieces() for i in piece.ended]
    assert sorted([*done, *gone, *running]) == list(range(len(requests)))
    assert engine.free_blocks == number * (chosen.num_blocks - 1) and not engine.num_running
