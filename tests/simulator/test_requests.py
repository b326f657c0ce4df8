"""Requests that come to an engine in mid-run and leave it: nothing else changes, and everything is given back."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.iteration import EngineTable
from simulator import rollout
from simulator.blocks import CONTENT, REFERENCES
from simulator.engine import Requests, Settings, TooSmall
from simulator.replay import replay
from simulator.rollout import Engine
from simulator.scheduler import HELD, ROW
from tests.engines import BLOCK, CONSTANT, load, loads, plain, settings, tables

Ends = list[tuple[int, float]]


def part(requests: Requests, start: int, stop: int) -> Requests:
    """Some that follow each other, known only from now on."""
    contents = None if requests.contents is None else requests.contents[start:stop]
    return Requests(prompt=requests.prompt[start:stop], response=requests.response[start:stop], contents=contents)


def by_number(ends: Ends) -> list[float]:
    return [time for _, time in sorted(ends)]


def ended(window: rollout.Window, since: float) -> Ends:
    return list(zip(window.ended.tolist(), (since + window.ended_s).tolist(), strict=True))


def added_at_arrival(engine: Engine, requests: Requests, together: int = 1) -> Ends:
    """Ends of requests that are added when they arrive."""
    now, found = 0.0, Ends()
    for first in range(0, len(requests), together):
        arrival = float(requests.arrivals()[first])
        if arrival > now:
            window = engine.play(arrival - now)
            found += ended(window, now)
            now = max(now + window.seconds, arrival)
        engine.add(part(requests, first, first + together))
    return found + ended(engine.play(), now)


@given(loads(spread_s=0.5), settings(), tables())
def test_who_is_added_is_who_arrives(requests: Requests, chosen: Settings, table: EngineTable) -> None:
    expected = replay(table, chosen, requests)
    found = added_at_arrival(Engine(chosen, table), requests)
    np.testing.assert_allclose(by_number(found), expected.last_token_s, rtol=1e-9)


@given(loads(), settings(), st.integers(1, 5))
def test_rows_of_ended_requests_can_be_given_up(requests: Requests, chosen: Settings, together: int) -> None:
    requests = replace(requests, arrival_s=np.arange(len(requests)) // together * 0.15)
    kept = added_at_arrival(Engine(chosen, CONSTANT), requests, together)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "FEW", 1)
        engine = Engine(chosen, CONSTANT)
        given_up = added_at_arrival(engine, requests, together)
    assert dict(given_up) == pytest.approx(dict(kept))
    assert engine.free_blocks == chosen.num_blocks - 1


@given(loads(), settings(), tables(), st.lists(st.floats(0, 0.3), max_size=6))
def test_windows_are_one_play(requests: Requests, chosen: Settings, table: EngineTable, windows: list[float]) -> None:
    whole, parts = Engine(chosen, table), Engine(chosen, table)
    for engine in (whole, parts):
        engine.add(requests)
    once, now, found, played = whole.play(), 0.0, Ends(), []
    for until in [*windows, np.inf]:
        played.append(parts.play(until))
        found += ended(played[-1], now)
        now += played[-1].seconds
    assert now == pytest.approx(once.seconds, rel=1e-9)
    assert [number for number, _ in found] == once.ended.tolist()
    np.testing.assert_allclose([time for _, time in found], once.ended_s, rtol=1e-9)
    for name in ("iterations", "tokens", "prefill_tokens", "preempted", "recomputed_tokens", "cached_tokens"):
        assert sum(getattr(window, name) for window in played) == getattr(once, name)
    assert sum(window.prefill_s for window in played) == pytest.approx(once.prefill_s, rel=1e-9, abs=1e-12)


@given(loads(), settings(), st.floats(0.001, 0.5))
def test_a_window_stops_at_the_first_boundary_after_its_time(
    requests: Requests, chosen: Settings, until: float
) -> None:
    engine, exact = (Engine(chosen, CONSTANT, max_jump=longest) for longest in (1 << 60, 1))
    for one in (engine, exact):
        one.add(requests)
    boundaries = [0.0]
    while exact.busy:
        boundaries.append(boundaries[-1] + exact.turn().seconds)
    first = next((time for time in boundaries if time >= until - 1e-12), boundaries[-1])
    assert engine.play(until).seconds == pytest.approx(first, abs=1e-9)


@given(loads(), settings(), tables(), st.floats(0, 0.3), st.floats(0, 0.3))
def test_what_was_taken_back_never_happened(
    requests: Requests, chosen: Settings, table: EngineTable, before: float, ahead: float
) -> None:
    straight, back = Engine(chosen, table), Engine(chosen, table)
    for engine in (straight, back):
        engine.add(requests)
        engine.play(before)
    taken = back.snapshot()
    back.play(ahead)
    back.restore(taken)
    one, other = straight.play(), back.play()
    assert one.ended.tolist() == other.ended.tolist() and one.seconds == other.seconds
    assert one.ended_s.tolist() == other.ended_s.tolist()


@given(loads(), settings(), st.floats(0, 0.3), st.integers(0, 99), st.booleans())
def test_those_who_leave_give_everything_back(
    requests: Requests, chosen: Settings, before: float, seed: int, everybody: bool
) -> None:
    engine = Engine(chosen, CONSTANT)
    engine.add(requests)
    done = set(engine.play(before).ended.tolist())
    leaving = [i for i in range(len(requests)) if everybody or np.random.default_rng(seed + i).random() < 0.5]
    engine.abort(leaving)
    assert not set(leaving) & ({number for number, _, _ in engine.running()} | set(engine.waiting_requests()))
    assert_counted(engine, chosen)
    if everybody:
        assert engine.free_blocks == chosen.num_blocks - 1 and not engine.num_running and not engine.num_waiting
    stayed = set(engine.play().ended.tolist())
    assert stayed == set(range(len(requests))) - done - set(leaving)
    assert engine.free_blocks == chosen.num_blocks - 1


def assert_counted(engine: Engine, chosen: Settings) -> None:
    """Blocks know how many hold them."""
    state = engine.state
    held = [state.table[row[ROW], : row[HELD]] for row in state.request if row[ROW] >= 0]
    users = Counter(np.concatenate(held).tolist()) if held else Counter[int]()
    if chosen.prefix_caching:
        assert users == {i: int(n) for i, n in enumerate(state.blocks.block[:-1, REFERENCES]) if n}
        assert engine.free_blocks == chosen.num_blocks - 1 - len(users)


@given(loads(), settings(), st.floats(0, 0.3), st.integers(1, 30))
def test_those_who_would_start_last_can_be_withdrawn(
    requests: Requests, chosen: Settings, before: float, number: int
) -> None:
    engine = Engine(chosen, CONSTANT)
    engine.add(requests)
    done = engine.play(before).ended.tolist()
    queue, running = engine.waiting_requests(), engine.running()
    taken = engine.withdraw(number)
    assert queue == engine.waiting_requests() + taken and len(taken) <= number and engine.running() == running
    assert engine.generated(taken).sum() == 0
    assert sorted([*done, *taken, *engine.play().ended.tolist()]) == list(range(len(requests)))


@given(loads(), settings(), st.floats(0, 0.3))
def test_an_engine_that_stands_still_has_nothing_under_way(requests: Requests, chosen: Settings, before: float) -> None:
    engine = Engine(chosen, CONSTANT)
    engine.add(requests)
    done = [*engine.play(before).ended.tolist(), *engine.land().ended.tolist()]
    made = sum(tokens for _, _, tokens in engine.running())
    running = engine.num_running
    assert engine.land().seconds == 0 and engine.interrupt(forget=True) == running
    assert engine.generated(engine.waiting_requests()).sum() >= made
    done += engine.play().ended.tolist()
    assert sorted(done) == list(range(len(requests)))


def test_numbers_stay_while_rows_move() -> None:
    chosen = Settings(max_num_seqs=4, max_num_batched_tokens=64, num_blocks=99, block_tokens=BLOCK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "FEW", 1)
        engine = Engine(chosen, CONSTANT)
        assert engine.add(load([8] * 3, [2, 2, 9], [0, 0, 0])) == range(3)
        assert engine.play(0.025).ended.tolist() == [0, 1]
        assert engine.add(load([8], [5], [0])) == range(3, 4)
        assert len(engine.state.request) < 4, "two rows are given up"
        assert [(number, prompt) for number, prompt, _ in engine.running()] == [(2, 8)]
        window = engine.play()
    assert window.ended.tolist() == [3, 2] and window.cached_tokens == 4, "the prompt of those who left is still found"
    with pytest.raises(KeyError, match="known"):
        engine.generated([0])


def test_a_snapshot_from_before_an_addition_is_refused() -> None:
    engine = Engine(Settings(max_num_seqs=4, max_num_batched_tokens=64, num_blocks=99), CONSTANT)
    taken = engine.snapshot()
    engine.add(load([8], [5]))
    with pytest.raises(ValueError, match="added since"):
        engine.restore(taken)
    with pytest.raises(TooSmall):
        engine.add(load([1600], [5]))
    assert engine.play().ended.tolist() == [0], "a refused request changes nothing"


@given(loads(), settings(), st.floats(0, 0.3))
def test_compiled_and_plain_windows_agree(requests: Requests, chosen: Settings, before: float) -> None:
    def ends(engine: Engine) -> list[float]:
        engine.add(requests)
        first = engine.play(before)
        engine.abort([0])
        engine.withdraw(1)
        return [*first.ended_s.tolist(), *engine.land().ended.tolist(), *engine.play(at_end=True).ended.tolist()]

    compiled = ends(Engine(chosen, CONSTANT))
    with plain():
        assert ends(Engine(chosen, CONSTANT)) == pytest.approx(compiled)


def test_numbers_of_contents_are_used_again() -> None:
    chosen = Settings(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=40, block_tokens=BLOCK)
    engine = Engine(chosen, CONSTANT)
    for step in range(400):
        engine.add(load([9] * 4, [12] * 4, [step] * 4))
        engine.play()
    assert len(engine.state.request) <= 400 and engine._contents.size < 4 * 40 + 2 * 400
    assert len(engine._contents.places) < 100 and (engine.state.blocks.block[:, CONTENT] < engine._contents.size).all()
