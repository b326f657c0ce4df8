import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.policies.weight_sync import (
    Near,
    Running,
    Seen,
    Sync,
    WeightsReady,
    barrier,
    due,
    in_flight,
    nearest,
    next_look,
    payload_bytes,
    wanted,
)

running = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 4000)), max_size=9).map(
    lambda pairs: [Running(sample=i, prompt_tokens=p, response_tokens=r) for i, (p, r) in enumerate(pairs)]
)


class Place(NamedTuple):
    site: str
    machine: str


LEVELS: tuple[Callable[[Place], object], ...] = (lambda p: p, lambda p: p.site, lambda p: None)
places = st.builds(Place, site=st.sampled_from("ab"), machine=st.sampled_from("012"))


def levels(here: Place, have: list[Place], busy: set[int], fetching: list[Place]) -> list[Near]:
    found = []
    for level in LEVELS:
        holders = [i for i, place in enumerate(have) if level(place) == level(here)]
        free = next((i for i in holders if i not in busy), None)
        num_fetching = sum(level(place) == level(here) for place in fetching)
        found.append(Near(num_holders=len(holders), free=free, num_fetching=num_fetching))
    return found


def rounds(start: Place, wanting: list[Place]) -> list[list[tuple[Place, Place]]]:
    """Fetches of equal length until everybody has the weights, from one holder that `start` is."""
    have, done = [start], list[list[tuple[Place, Place]]]()
    while wanting:
        busy, fetching, sends = set[int](), list[Place](), list[tuple[Place, Place]]()
        for one in wanting:
            source = nearest(levels(one, have, busy, fetching))
            if source is not None:
                busy.add(source)
                fetching.append(one)
                sends.append((have[source], one))
        assert sends, "somebody is always served"
        wanting = list(wanting)
        for _, one in sends:
            wanting.remove(one)
            have.append(one)
        done.append(sends)
    return done


@given(places, st.lists(places, max_size=40))
def test_everybody_gets_the_weights_and_each_machine_and_site_from_outside_once(
    start: Place, wanting: list[Place]
) -> None:
    sends = [pair for each in rounds(start, wanting) for pair in each]
    assert Counter(to for _, to in sends) == Counter(wanting)
    abroad = [to.site for source, to in sends if source.site != to.site]
    assert set(Counter(abroad).values()) <= {1} and start.site not in abroad
    outside = [to for source, to in sends if source != to]
    assert set(Counter(outside).values()) <= {1} and start not in outside


@given(st.integers(0, 600))
def test_on_one_machine_the_holders_double(num: int) -> None:
    here = Place(site="a", machine="0")
    assert len(rounds(here, [here] * num)) == math.ceil(math.log2(num + 1))


@given(st.integers(1, 10**9), st.sampled_from([2.0, 4.0]), st.floats(0.001, 1.0))
def test_what_is_sent_of_the_parameters(parameters: int, width: float, share: float) -> None:
    full = payload_bytes(parameters, width, "full")
    assert full == parameters * width
    assert payload_bytes(parameters, width, "int8") < 0.52 * full
    delta = payload_bytes(parameters, width, "delta", share)
    assert parameters * share * width <= delta <= parameters * (share * width + 0.125)
    assert delta <= payload_bytes(parameters, width, "delta", min(1.0, 2 * share)) * (1 + 1e-12)


@given(st.sampled_from(["push", "event", "pull"]), st.sampled_from(["drain", "interrupt", "mix"]), st.integers(0, 3))
def test_only_newer_weights_are_loaded_and_draining_comes_first(trigger: str, what: str, num: int) -> None:
    rule = Sync(trigger=trigger, every_s=10, in_flight=what)  # type: ignore[arg-type]
    old = Seen(held_version=3, published_version=3, since_pull_s=10, num_running=num)
    new = Seen(held_version=3, published_version=4, since_pull_s=10, num_running=num)
    assert due(rule, old) == ("look" if trigger == "pull" else "none")
    assert due(rule, new) == ("drain" if what == "drain" and num else "load")


def test_an_engine_that_pulls_sees_nothing_between_two_looks() -> None:
    rule = Sync(trigger="pull", every_s=10)
    assert due(rule, Seen(held_version=0, published_version=5, since_pull_s=9.9)) == "none"
    assert due(rule, Seen(held_version=0, published_version=5, since_pull_s=10)) == "load"


@given(st.floats(0.1, 100), st.floats(0, 1e4), st.integers(0, 7))
def test_looks_are_a_period_apart_and_spread(every: float, last: float, index: int) -> None:
    first = next_look(every, last, index, 8)
    assert last < first <= last + every * (1 + 1e-6)
    assert next_look(every, first, index, 8) == pytest.approx(first + every)
    assert math.isclose((first - every * index / 8) / every, round((first - every * index / 8) / every), abs_tol=1e-6)


def test_an_event_that_was_overtaken_is_no_news() -> None:
    event = WeightsReady(version=4, place="store/4", digest="ab")
    assert wanted(event, 3) and not wanted(event, 4) and not wanted(event, 5)


@given(running)
def test_every_running_sample_is_waited_for_aborted_or_carried(samples: list[Running]) -> None:
    everyone = tuple(one.sample for one in samples)
    drain, interrupt, mix, kept = (
        in_flight(Sync(in_flight="drain"), samples),
        in_flight(Sync(in_flight="interrupt"), samples),
        in_flight(Sync(in_flight="mix"), samples),
        in_flight(Sync(in_flight="mix", kv="keep"), samples),
    )
    assert drain.wait_for == interrupt.abort == mix.carry == kept.carry == everyone
    assert drain.wasted_tokens == drain.recomputed_tokens == mix.wasted_tokens == kept.recomputed_tokens == 0
    assert interrupt.wasted_tokens == sum(one.response_tokens for one in samples)
    assert mix.recomputed_tokens == sum(one.prompt_tokens + one.response_tokens for one in samples)


@given(st.lists(st.booleans(), max_size=9), st.floats(0, 100))
def test_a_barrier_names_the_absentees(here: list[bool], waited: float) -> None:
    names = [f"engine[{i}]" for i in range(len(here))]
    said = barrier(names, {name for name, there in zip(names, here, strict=True) if there}, waited, 60)
    assert said.absent == tuple(name for name, there in zip(names, here, strict=True) if not there)
    assert said.passed == all(here) and said.timed_out == (not all(here) and waited >= 60)
