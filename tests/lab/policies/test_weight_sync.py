import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.policies.weight_sync import (
    TOPOLOGIES,
    Running,
    Seen,
    Sync,
    WeightsReady,
    barrier,
    due,
    in_flight,
    next_look,
    tree,
    wanted,
)

running = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 4000)), max_size=9).map(
    lambda pairs: [Running(sample=i, prompt_tokens=p, response_tokens=r) for i, (p, r) in enumerate(pairs)]
)


@pytest.mark.parametrize("name", TOPOLOGIES)
@given(st.integers(0, 1100))
def test_everybody_is_reached_once_by_somebody_who_has_the_weights(name: str, num: int) -> None:
    holders = {0}
    for sends in TOPOLOGIES[name](num):
        assert {sender for sender, _ in sends} <= holders
        assert not holders & {receiver for _, receiver in sends}
        holders |= {receiver for _, receiver in sends}
    assert holders == set(range(num + 1))
    assert sum(map(len, TOPOLOGIES[name](num))) == num


@given(st.integers(0, 1100))
def test_a_tree_takes_log2_rounds_and_nobody_sends_twice_in_one(num: int) -> None:
    rounds = tree(num)
    assert len(rounds) == math.ceil(math.log2(num + 1))
    assert all(len({sender for sender, _ in sends}) == len(sends) for sends in rounds)


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
