"""The scoring service as a queue: known results of queueing theory, and conservation under any rule."""

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from lab.policies.scoring import Batching
from simulator.services import Service


class Timed:
    """A server that needs a given time for every sample, one after the other."""

    def __init__(self, env: simpy.Environment, seconds: Sequence[float]) -> None:
        self.env, self.seconds = env, seconds
        self.began: list[tuple[float, list[int]]] = []

    def score(self, samples: list[int], lengths: list[int]):
        self.began.append((self.env.now, samples))
        yield self.env.timeout(sum(self.seconds[i] for i in samples))


class Played:
    """A service that samples reach at given times; its servers need the given seconds for each."""

    def __init__(
        self,
        arrivals: Sequence[float],
        seconds: Sequence[float],
        num_servers: int,
        rule: Batching | None = None,
        lengths: Sequence[int] | None = None,
        close: bool = True,
    ) -> None:
        env = simpy.Environment()
        self.server = Timed(env, seconds)
        self.ends: dict[int, float] = {}
        sizes = lengths or [1] * len(arrivals)
        service = Service(
            env, [self.server] * num_servers, rule or Batching(max_samples=1), lambda found: [sizes[i] for i in found]
        )
        service.on_scored(lambda samples: self.ends.update(dict.fromkeys(samples, env.now)))
        self.drained_s = math.inf

        def arrive():
            for sample, at in enumerate(arrivals):
                yield env.timeout(at - env.now)
                service.submit([sample])
            if close:
                service.close()
                yield service.drained
                self.drained_s = env.now

        env.process(arrive())
        env.run()
        self.service = service
        self.begins = {sample: at for at, samples in self.server.began for sample in samples}
        self.batches = [samples for _, samples in self.server.began]


def poisson(rate: float, number: int, seed: int) -> list[float]:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, number)).tolist()


def waits(arrivals: Sequence[float], seconds: Sequence[float], num_servers: int) -> list[float]:
    """First come, first served: Kiefer and Wolfowitz's recursion over the times at which servers are free."""
    free, found = [0.0] * num_servers, []
    for at, need in zip(arrivals, seconds, strict=True):
        start = max(at, heapq.heappop(free))
        heapq.heappush(free, start + need)
        found.append(start - at)
    return found


def erlang_c(servers: int, load: float) -> float:
    """Chance that a customer of M/M/c waits; load in Erlangs."""
    top = load**servers / math.factorial(servers) * servers / (servers - load)
    return top / (sum(load**k / math.factorial(k) for k in range(servers)) + top)


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 5)), min_size=1, max_size=40), st.integers(1, 4))
def test_every_wait_is_that_of_the_recursion(given_: list[tuple[float, float]], servers: int) -> None:
    arrivals = np.cumsum([gap for gap, _ in given_]).tolist()
    seconds = [need for _, need in given_]
    played = Played(arrivals, seconds, servers)
    got = [played.begins[i] - arrivals[i] for i in range(len(arrivals))]
    assert got == pytest.approx(waits(arrivals, seconds, servers), abs=1e-9)


def mean_wait(arrivals: Sequence[float], seconds: Sequence[float], servers: int) -> tuple[float, float]:
    """Mean time before service, and the error of that mean from the means of twenty stretches."""
    played = Played(arrivals, seconds, servers)
    each = np.array([played.begins[i] - at for i, at in enumerate(arrivals)])
    means = each[: len(each) // 20 * 20].reshape(20, -1).mean(axis=1)
    return float(each.mean()), float(means.std(ddof=1) / math.sqrt(20))


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (2, 1.0), (4, 2.8)])
def test_mean_wait_of_m_m_c_is_erlangs(servers: int, load: float) -> None:
    """Poisson arrivals at rate `load`, exponential service of mean 1: W = C / (c - load)."""
    number = 20_000
    seconds = np.random.default_rng(100 + servers).exponential(1.0, number).tolist()
    mean, error = mean_wait(poisson(load, number, seed=servers), seconds, servers)
    expected = erlang_c(servers, load) / (servers - load)
    assert abs(mean - expected) < 3 * error < 0.3 * expected


def test_mean_wait_of_m_d_1_is_half_that_of_m_m_1() -> None:
    """Pollaczek–Khinchine: rho s / (2 (1 - rho))."""
    number, rho = 20_000, 0.5
    mean, error = mean_wait(poisson(rho, number, seed=5), [1.0] * number, 1)
    expected = rho / (2 * (1 - rho))
    assert abs(mean - expected) < 3 * error < 0.15 * expected


def test_littles_law() -> None:
    """Mean number inside = arrival rate × mean time inside: both are the same area, counted by event and by sample."""
    arrivals, seconds = poisson(1.5, 3000, seed=9), np.random.default_rng(9).exponential(1.0, 3000).tolist()
    played = Played(arrivals, seconds, 2)
    events = sorted([(at, 1) for at in arrivals] + [(end, -1) for end in played.ends.values()])
    inside = np.cumsum([change for _, change in events])
    area = sum(inside[i] * (after[0] - before[0]) for i, (before, after) in enumerate(pairwise(events)))
    assert area == pytest.approx(sum(played.ends[i] - at for i, at in enumerate(arrivals)))
    assert played.drained_s == max(played.ends.values()) and played.service.num_inside == 0


batching = st.builds(
    Batching, max_samples=st.integers(1, 5), max_tokens=st.one_of(st.none(), st.integers(5, 60)),
    max_wait_s=st.sampled_from([0.0, 0.5, 3.0]),
)  # fmt: skip
samples = st.lists(st.tuples(st.floats(0, 2), st.floats(0.01, 2), st.integers(1, 20)), min_size=1, max_size=30)


@given(samples, batching, st.integers(1, 3))
def test_every_sample_is_scored_once_in_order_within_the_limits(
    given_: list[tuple[float, float, int]], rule: Batching, servers: int
) -> None:
    arrivals = np.cumsum([gap for gap, _, _ in given_]).tolist()
    lengths = [size for _, _, size in given_]
    played = Played(arrivals, [need for _, need, _ in given_], servers, rule, lengths)
    assert [sample for batch in played.batches for sample in batch] == list(range(len(given_)))
    assert played.ends.keys() == set(range(len(given_)))
    for batch in played.batches:
        assert len(batch) <= rule.max_samples
        padded = len(batch) * max(lengths[i] for i in batch)
        assert len(batch) == 1 or rule.max_tokens is None or padded <= rule.max_tokens


@given(samples, st.integers(1, 5), st.sampled_from([0.3, 1.0, 4.0]))
def test_with_a_free_server_nobody_waits_longer_than_the_limit_and_no_batch_leaves_early(
    given_: list[tuple[float, float, int]], size: int, max_wait: float
) -> None:
    arrivals = np.cumsum([gap for gap, _, _ in given_]).tolist()
    rule = Batching(max_samples=size, max_wait_s=max_wait)
    played = Played(arrivals, [need for _, need, _ in given_], len(given_), rule, close=False)
    for at, batch in played.server.began:
        assert all(at - arrivals[i] <= max_wait * (1 + 1e-9) for i in batch)
        if len(batch) < size:
            assert at == pytest.approx(arrivals[batch[0]] + max_wait)


def test_a_service_that_is_closed_does_not_wait_for_more() -> None:
    played = Played([0.0, 0.1], [1.0, 1.0], 1, Batching(max_samples=8, max_wait_s=100.0))
    assert played.batches == [[0, 1]] and played.drained_s == pytest.approx(2.1)


def test_longer_waits_make_fewer_batches() -> None:
    arrivals = poisson(4.0, 400, seed=3)
    numbers = [
        len(Played(arrivals, [0.01] * 400, 400, Batching(max_samples=16, max_wait_s=wait)).batches)
        for wait in (0.0, 0.5, 2.0)
    ]
    assert numbers == sorted(numbers, reverse=True) and numbers[0] == 400 > 3 * numbers[-1]


def test_servers_come_and_go() -> None:
    """Two servers halve the work of one; one that leaves ends its batch first."""
    env = simpy.Environment()
    server, ends = Timed(env, [1.0] * 8), []
    service = Service(env, [server] * 2, Batching(max_samples=1), lambda found: [1] * len(found))
    service.on_scored(lambda samples: ends.append(env.now))
    service.scale(1)
    service.submit(range(8))

    def scale():
        yield env.timeout(2.5)
        service.scale(2)
        yield env.timeout(1.2)
        service.scale(1)

    env.process(scale())
    env.run()
    assert ends == [1.0, 2.0, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0]


def test_scores_that_are_known_need_no_server_and_come_at_once() -> None:
    env = simpy.Environment()
    server, told = Timed(env, [1.0] * 6), []
    service = Service(
        env,
        [server],
        Batching(max_samples=1),
        lambda found: [1] * len(found),
        lambda found: [i % 2 == 0 for i in found],
    )
    service.on_scored(lambda samples: told.append((env.now, samples)))
    service.submit(range(6))
    assert not told
    service.close()
    env.run()
    assert told == [(0.0, [0, 2, 4]), (1.0, [1]), (2.0, [3]), (3.0, [5])] and service.num_hits == 3
