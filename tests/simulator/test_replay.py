"""Replays against closed forms: one request, equal ones, the M/D/1 queue, Little's law."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.iteration import EngineTable, Iteration
from simulator.engine import Requests, Settings
from simulator.replay import replay
from simulator.rollout import Engine
from simulator.scheduler import RUNNING, WAITING
from tests.engines import CONSTANT, STEP_S, load, loads, settings, tables


def ample(**changed: object) -> Settings:
    chosen: dict[str, object] = {
        "max_num_seqs": 256, "max_num_batched_tokens": 8192, "num_blocks": 100_000, "block_tokens": 4,
        "prefix_caching": False,
    }  # fmt: skip
    return Settings(**(chosen | changed))  # type: ignore[arg-type]


@given(tables(), st.integers(1, 60), st.integers(1, 50), st.floats(0, 9), st.booleans())
def test_one_request_alone_takes_its_prefill_and_its_decodes(
    table: EngineTable, prompt: int, response: int, arrival: float, lagging: bool
) -> None:
    """Nothing to wait for: looking ahead neither helps nor hurts."""
    found = replay(table, ample(async_scheduling=lagging), load([prompt], [response], arrival_s=[arrival]))
    pairs = prompt * (prompt + 1) / 2
    first = Iteration(tokens=prompt, sequences=1, prefill_tokens=prompt, token_context=pairs, context_read=prompt)
    if prompt == 1:
        first = Iteration(tokens=1, sequences=1, decodes=1, token_context=1, context_read=1)
    seconds = [table.seconds(first)]
    for context in range(prompt, prompt + response - 1):
        seconds.append(table.seconds(Iteration(
            tokens=1, sequences=1, decodes=1, context_sum=context, context_max=context, context_min=context,
            token_context=context + 1, context_read=context + 1,
        )))  # fmt: skip
    assert found.admitted_s[0] == arrival
    assert found.first_token_s[0] == pytest.approx(arrival + seconds[0])
    assert found.last_token_s[0] == pytest.approx(arrival + sum(seconds))
    assert found.iterations == response and found.makespan_s == found.last_token_s[0]
    tpot = found.tpot_s(np.array([response]))[0]
    assert np.isnan(tpot) if response == 1 else tpot == pytest.approx(np.mean(seconds[1:]))


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 30), st.booleans())
def test_equal_requests_take_one_prefill_and_the_rest_in_step(
    number: int, prompt: int, response: int, lagging: bool
) -> None:
    """Cost a + b·(context read), summed by hand over a full batch."""
    table = EngineTable(step_s=2e-3, context_read_s=3e-7)
    found = replay(table, ample(async_scheduling=lagging), load([prompt] * number, [response] * number))
    read = number * (response * prompt + response * (response - 1) / 2)
    assert found.makespan_s == pytest.approx(2e-3 * response + 3e-7 * read)
    assert found.iterations == response and found.preemptions == 0
    assert np.ptp(found.last_token_s) == 0 == np.ptp(found.first_token_s)


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 20))
def test_more_equal_requests_than_fit_come_in_waves(number: int, batch: int, response: int) -> None:
    found = replay(CONSTANT, ample(max_num_seqs=batch), load([5] * number, [response] * number))
    waves = -(-number // batch)
    assert found.makespan_s == pytest.approx(waves * response * STEP_S)
    np.testing.assert_allclose(found.admitted_s, np.arange(number) // batch * response * STEP_S, atol=1e-9)


@given(tables(), settings(), loads(spread_s=0.3))
def test_every_request_is_served_in_order(table: EngineTable, chosen: Settings, requests: Requests) -> None:
    found = replay(table, chosen, requests)
    assert np.all(found.admitted_s >= requests.arrivals())
    assert np.all(found.first_token_s >= found.admitted_s) and np.all(found.last_token_s >= found.first_token_s)
    assert np.all((found.last_token_s == found.first_token_s) == (requests.response == 1))
    if not chosen.async_scheduling:  # with it, those that still have tokens under way are passed over
        assert np.all(np.diff(found.admitted_s) >= 0)


@given(tables(), settings(), loads(spread_s=0.3))
def test_a_slower_machine_is_slower_by_as_much(table: EngineTable, chosen: Settings, requests: Requests) -> None:
    """Twice the costs and twice the gaps: twice the times, and the same decisions."""
    doubled = EngineTable(**{
        name: value * 2 if name.endswith(("seconds", "_s")) else value for name, value in vars(table).items()
    })  # fmt: skip
    later = Requests(
        prompt=requests.prompt, response=requests.response, arrival_s=2 * requests.arrivals(),
        contents=requests.contents,
    )  # fmt: skip
    one, two = replay(table, chosen, requests), replay(doubled, chosen, later)
    np.testing.assert_allclose(two.last_token_s, 2 * one.last_token_s, rtol=1e-12)
    assert (one.iterations, one.preemptions, one.hit_tokens) == (two.iterations, two.preemptions, two.hit_tokens)


def poisson(rate: float, number: int, seed: int) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, number))


@pytest.mark.parametrize("load_factor", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("lagging", [False, True])
def test_one_sequence_at_a_time_is_the_m_d_1_queue(load_factor: float, lagging: bool) -> None:
    """Every wait as Lindley's recursion says, W' = max(0, W + s − gap); their mean as Pollaczek and Khinchine do.

    The mean of n waits that depend on each other is judged by their own scatter: means of 40 stretches, each much
    longer than the queue remembers, and 4 standard errors of them (one in 16 000 for a normal mean).
    """
    service, number = 8 * STEP_S, 40_000
    arrivals = poisson(load_factor / service, number, seed=3)
    chosen = ample(max_num_seqs=1, async_scheduling=lagging)
    found = replay(CONSTANT, chosen, load([5] * number, [8] * number, arrival_s=arrivals.tolist()))
    waits, wait = found.admitted_s - arrivals, 0.0
    expected = [0.0]
    for before, now in pairwise(arrivals):
        wait = max(0.0, wait + service - (now - before))
        expected.append(wait)
    np.testing.assert_allclose(waits, expected, atol=1e-6)
    theory = load_factor * service / (2 * (1 - load_factor))
    stretches = waits.reshape(40, -1).mean(axis=1)
    error = stretches.std(ddof=1) / np.sqrt(len(stretches))
    assert error < 0.1 * theory, "too few requests to tell"
    assert waits.mean() == pytest.approx(theory, abs=4 * error)


@given(tables(), settings(async_scheduling=False), loads(spread_s=0.5))
def test_littles_law(table: EngineTable, chosen: Settings, requests: Requests) -> None:
    """The area under the number of requests inside, piece by piece, is the sum of the times that each spends there.

    The number is what the engine itself holds; whoever arrives within a piece has waited for it to end.
    """
    engine, arrivals = Engine(chosen, table, requests), requests.arrivals()
    now = area = 0.0
    waiting = list(range(len(requests)))
    while waiting or engine.busy:
        if not engine.busy:
            now = max(now, float(arrivals[waiting[0]]))
        arrived = [index for index in waiting if arrivals[index] <= now]
        waiting = waiting[len(arrived) :]
        engine.arrive(arrived)
        area += sum(now - arrivals[index] for index in arrived)
        inside = int(engine.state.count[RUNNING] + engine.state.count[WAITING])
        seconds = engine.turn(until_s=arrivals[waiting[0]] - now if waiting else np.inf).seconds
        area, now = area + inside * seconds, now + seconds
    found = replay(table, chosen, requests)
    assert area == pytest.approx(float((found.last_token_s - arrivals).sum()))


def test_without_requests_nothing_happens() -> None:
    found = replay(CONSTANT, ample(), load([], []))
    assert found.makespan_s == 0.0 and found.iterations == 0
