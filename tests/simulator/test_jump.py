"""Jumps equal single steps: same decisions, same times; and compiled code is the plain code."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from profiles.interpolate import iteration_seconds
from profiles.iteration import EngineTable
from simulator.engine import Requests, Settings, build
from simulator.jump import decoding_seconds, later, steps_until
from simulator.playing import play
from simulator.replay import Replayed, replay
from tests.engines import CONSTANT, assert_same, load, loads, plain, settings, tables


def played(table: EngineTable, chosen: Settings, requests: Requests, longest_jump: int) -> Replayed:
    """As `replay` does, with jumps of at most this length."""
    times, totals = np.full((len(requests), 3), np.nan), np.zeros(4, dtype=np.int64)
    play(build(chosen, requests), table.packed(), requests.arrivals(), times, totals, longest_jump)
    return Replayed(
        admitted_s=times[:, 0], first_token_s=times[:, 1], last_token_s=times[:, 2], iterations=int(totals[0]),
        preemptions=int(totals[1]), recomputed_tokens=int(totals[2]), hit_tokens=int(totals[3]),
    )  # fmt: skip


@given(tables(), settings(), loads())
@effort(max_examples=300)
def test_a_burst_is_the_same_in_jumps_and_in_steps(table: EngineTable, chosen: Settings, requests: Requests) -> None:
    assert_same(replay(table, chosen, requests), replay(table, chosen, requests, exact=True))


@given(tables(), settings(), loads(spread_s=0.5))
@effort(max_examples=300)
def test_arrivals_come_between_in_jumps_as_in_steps(table: EngineTable, chosen: Settings, requests: Requests) -> None:
    assert_same(replay(table, chosen, requests), replay(table, chosen, requests, exact=True))


@given(tables(), settings(), loads(spread_s=0.2), st.integers(2, 9))
def test_the_length_of_jumps_does_not_matter(
    table: EngineTable, chosen: Settings, requests: Requests, longest: int
) -> None:
    assert_same(replay(table, chosen, requests), played(table, chosen, requests, longest))


@given(tables(), settings(), loads(spread_s=0.1), st.booleans())
@effort(max_examples=40)
def test_compiled_and_plain_play_the_same(
    table: EngineTable, chosen: Settings, requests: Requests, exact: bool
) -> None:
    """Plain Python refuses an index beyond an array, where compiled code would read what lies there."""
    compiled = replay(table, chosen, requests, exact=exact)
    with plain():
        python = played(table, chosen, requests, 1 if exact else 1 << 60)
    assert_same(compiled, python)


def test_what_is_drawn_is_under_pressure() -> None:
    """The laws above would be hollow without preemptions, hits, and jumps that an arrival ends."""
    preempted, hits, caught = 0, 0, 0

    @given(settings(), loads(spread_s=0.5))
    @effort(max_examples=100, database=None)
    def count(chosen: Settings, requests: Requests) -> None:
        nonlocal preempted, hits, caught
        found = replay(CONSTANT, chosen, requests)
        preempted += found.preemptions > 0
        hits += found.hit_tokens > 0
        running = (requests.arrivals() < found.last_token_s[:, None]) & (
            found.admitted_s[:, None] < requests.arrivals()
        )
        caught += bool(running.any())

    count()
    assert preempted >= 5 and hits >= 10 and caught >= 30


def decoding(sequences: int, contexts: list[int]) -> np.ndarray:
    total = float(sum(contexts))
    return np.array(
        [sequences, sequences, 0, 0, sequences, total, max(contexts), total + sequences, total + sequences,
         min(contexts)], dtype=float,
    )  # fmt: skip


@given(tables(), st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 80))
def test_many_iterations_take_the_sum_of_each(table: EngineTable, contexts: list[int], steps: int) -> None:
    packed, now = table.packed(), decoding(len(contexts), contexts)
    each = [iteration_seconds(packed, later(now, step)) for step in range(steps)]
    assert decoding_seconds(packed, now, steps) == pytest.approx(sum(each), rel=1e-12)


@given(tables(), st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 80), st.floats(0, 1))
def test_the_steps_until_a_time_are_the_first_that_reach_it(
    table: EngineTable, contexts: list[int], steps: int, share: float
) -> None:
    packed, now = table.packed(), decoding(len(contexts), contexts)
    until = share * 1.1 * decoding_seconds(packed, now, steps)
    number = steps_until(packed, now, steps, until)
    assert 1 <= number <= steps
    assert number == steps or decoding_seconds(packed, now, number) >= until * (1 - 1e-12)
    assert number == 1 or decoding_seconds(packed, now, number - 1) < until * (1 + 1e-12)


@pytest.mark.parametrize("lagging", [False, True])
def test_late_in_a_long_replay_the_two_still_agree(lagging: bool) -> None:
    """Sums of a million iterations, added in another order: within 1e-9, where 1e-5 would do."""
    chosen = Settings(max_num_seqs=8, max_num_batched_tokens=512, num_blocks=40_000, async_scheduling=lagging)
    random = np.random.default_rng(1)
    size = 400
    requests = load(
        random.integers(1, 400, size).tolist(), random.integers(1, 9000, size).tolist(),
        arrival_s=np.sort(random.uniform(0, 100, size)).tolist(),
    )  # fmt: skip
    table = EngineTable(step_s=1e-3, context_read_s=1.7e-9, prefill_step_s=1e-4)
    fast, exact = replay(table, chosen, requests), replay(table, chosen, requests, exact=True)
    assert fast.iterations > 200_000
    assert_same(fast, exact, rel=1e-9)
