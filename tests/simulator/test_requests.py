"""Requests that come to an engine in mid-run and leave it: nothing else changes, and everything is given back."""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.iteration import EngineTable
from simulator import rollout
from simulator.blocks import CONTENT, REFERENCES
from simulator.engine import Requests, Settings, TooSmall
from simulator.replay import replay
from simulator.requests import rows_of, waiting
from simulator.rollout import Engine, Piece
from simulator.scheduler import GENERATED, HELD, ROW
from tests.engines import BLOCK, CONSTANT, load, loads, plain, settings, tables

Ends = list[tuple[int, float]]


def part(requests: Requests, start: int, stop: int) -> Requests:
    """Some that follow each other, known only from now on."""
    contents = None if requests.contents is None else requests.contents[start:stop]
    return Requests(prompt=requests.prompt[start:stop], response=requests.response[start:stop], contents=contents)


def by_number(ends: Ends) -> list[float]:
    return [time for _, time in sorted(ends)]


class Window(NamedTuple):
    """Pieces that follow each other, to a time or to the end."""

    pieces: list[Piece]
    ends: Ends
    """times from the start of the window"""

    @property
    def seconds(self) -> float:
        return sum(piece.seconds for piece in self.pieces)

    @property
    def ended(self) -> list[int]:
        return [number for number, _ in self.ends]

    def later(self, since: float) -> Ends:
        return [(number, since + time) for number, time in self.ends]

    def total(self, name: str) -> int:
        return sum(int(getattr(piece, name)) for piece in self.pieces)


def played(engine: Engine, until: float = np.inf) -> Window:
    """To the first iteration boundary at or after a time."""
    pieces, ends, now = list[Piece](), Ends(), 0.0
    while engine.busy and now < until - 1e-12 * now:
        pieces.append(engine.turn(until - now))
        now += pieces[-1].seconds
        ends += [(number, now) for number in pieces[-1].ended]
    return Window(pieces, ends)


def added_at_arrival(engine: Engine, requests: Requests, together: int = 1) -> Ends:
    """Ends of requests that are added when they arrive."""
    now, found = 0.0, Ends()
    for first in range(0, len(requests), together):
        arrival = float(requests.arrivals()[first])
        if arrival > now:
            window = played(engine, arrival - now)
            found += window.later(now)
            now = max(now + window.seconds, arrival)
        engine.add(part(requests, first, first + together))
    return found + played(engine).later(now)


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
    once, now, found, cut = played(whole), 0.0, Ends(), list[Window]()
    for until in [*windows, np.inf]:
        cut.append(played(parts, until))
        found += cut[-1].later(now)
        now += cut[-1].seconds
    assert now == pytest.approx(once.seconds, rel=1e-9)
    assert [number for number, _ in found] == once.ended
    np.testing.assert_allclose([time for _, time in found], [time for _, time in once.ends], rtol=1e-9)
    for name in ("iterations", "preempted", "recomputed_tokens", "cached_tokens"):
        assert sum(window.total(name) for window in cut) == once.total(name)


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
    assert played(engine, until).seconds == pytest.approx(first, abs=1e-9)


@given(loads(), settings(), tables(), st.floats(0, 0.3))
def test_looking_ahead_changes_nothing_and_tells_the_truth(
    requests: Requests, chosen: Settings, table: EngineTable, until: float
) -> None:
    straight, looking = Engine(chosen, table), Engine(chosen, table)
    for engine in (straight, looking):
        engine.add(requests)
    while straight.busy:
        iterations, seconds = looking.ahead(until)
        piece, other = straight.turn(until), looking.turn(until)
        assert (piece.ended, piece.seconds, piece.iterations) == (other.ended, other.seconds, other.iterations)
        assert not iterations or (iterations, seconds) == (piece.iterations, pytest.approx(piece.seconds))
    assert not looking.busy


@given(loads(), settings(), st.floats(0, 0.3), st.integers(0, 99), st.booleans())
def test_those_who_leave_give_everything_back(
    requests: Requests, chosen: Settings, before: float, seed: int, everybody: bool
) -> None:
    engine = Engine(chosen, CONSTANT)
    engine.add(requests)
    done = set(played(engine, before).ended)
    leaving = [i for i in range(len(requests)) if everybody or np.random.default_rng(seed + i).random() < 0.5]
    engine.abort(leaving)
    assert not set(leaving) & ({number for number, _, _ in engine.running()} | set(queue_of(engine)))
    assert_counted(engine, chosen)
    if everybody:
        assert engine.free_blocks == chosen.num_blocks - 1 and not engine.num_running and not engine.num_waiting
    stayed = set(played(engine).ended)
    assert stayed == set(range(len(requests))) - done - set(leaving)
    assert engine.free_blocks == chosen.num_blocks - 1


def queue_of(engine: Engine) -> list[int]:
    """Those that wait, from the front."""
    return [int(number) for number in engine._ids[waiting(engine.state)]]


def made_by(engine: Engine, numbers: list[int]) -> int:
    """Tokens that these have."""
    return int(engine.state.request[rows_of(engine._ids, numbers), GENERATED].sum())


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
    done = played(engine, before).ended
    queue, running = queue_of(engine), engine.running()
    taken = engine.withdraw(number)
    assert queue == queue_of(engine) + taken and len(taken) <= number and engine.running() == running
    assert not made_by(engine, taken)
    assert sorted([*done, *taken, *played(engine).ended]) == list(range(len(requests)))


@given(loads(), settings(), st.floats(0, 0.3))
def test_an_engine_that_stands_still_has_nothing_under_way(requests: Requests, chosen: Settings, before: float) -> None:
    engine = Engine(chosen, CONSTANT)
    engine.add(requests)
    done = [*played(engine, before).ended, *engine.land().ended]
    made = sum(tokens for _, _, tokens in engine.running())
    running = engine.num_running
    assert engine.land().seconds == 0 and engine.interrupt(forget=True) == running
    assert made_by(engine, queue_of(engine)) >= made
    done += played(engine).ended
    assert sorted(done) == list(range(len(requests)))


def test_numbers_stay_while_rows_move() -> None:
    chosen = Settings(max_num_seqs=4, max_num_batched_tokens=64, num_blocks=99, block_tokens=BLOCK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "FEW", 1)
        engine = Engine(chosen, CONSTANT)
        assert engine.add(load([8] * 3, [2, 2, 9], [0, 0, 0])) == range(3)
        assert played(engine, 0.025).ended == [0, 1]
        assert engine.add(load([8], [5], [0])) == range(3, 4)
        assert len(engine.state.request) < 4, "two rows are given up"
        assert [(number, prompt) for number, prompt, _ in engine.running()] == [(2, 8)]
        window = played(engine)
    assert window.ended == [3, 2] and window.total("cached_tokens") == 4, "the prompt of those who left is still found"
    with pytest.raises(KeyError, match="known"):
        rows_of(engine._ids, [0])


def test_a_request_that_never_fits_is_refused_and_changes_nothing() -> None:
    engine = Engine(Settings(max_num_seqs=4, max_num_batched_tokens=64, num_blocks=99), CONSTANT)
    engine.add(load([8], [5]))
    with pytest.raises(TooSmall):
        engine.add(load([1600], [5]))
    assert played(engine).ended == [0]


@given(loads(), settings(), st.floats(0, 0.3))
def test_compiled_and_plain_windows_agree(requests: Requests, chosen: Settings, before: float) -> None:
    def ends(engine: Engine) -> list[float]:
        engine.add(requests)
        first = played(engine, before)
        engine.abort([0])
        engine.withdraw(1)
        return [*(time for _, time in first.ends), *engine.land().ended, *played(engine).ended]

    compiled = ends(Engine(chosen, CONSTANT))
    with plain():
        assert ends(Engine(chosen, CONSTANT)) == pytest.approx(compiled)


def test_numbers_of_contents_are_used_again() -> None:
    chosen = Settings(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=40, block_tokens=BLOCK)
    engine = Engine(chosen, CONSTANT)
    for step in range(400):
        engine.add(load([9] * 4, [12] * 4, [step] * 4))
        played(engine)
    assert len(engine.state.request) <= 400 and engine._contents.size < 4 * 40 + 2 * 400
    assert len(engine._contents.places) < 100 and (engine.state.blocks.block[:, CONTENT] < engine._contents.size).all()
