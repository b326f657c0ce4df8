import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.policies.staleness import WEIGHTS, Batch, Staleness, Tally, batch, deadlock, lag, may_issue, weights


@dataclass
class Run:
    """A trainer and producers whose samples overtake each other at random."""

    rule: Staleness
    rng: random.Random
    num_buffer: int
    unit: int = 0
    running: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    issued: int = 0
    gone: int = 0

    def issue(self) -> None:
        version = self.unit // self.rule.units_per_version
        room = self.num_buffer - len(self.running) - len(self.ready)
        allowed = may_issue(self.rule, version, self.issued - self.gone, self.unit)
        num = min(allowed, room, self.rng.randint(0, 6))
        self.running += [version] * num
        self.issued += num

    def arrive(self) -> None:
        for _ in range(self.rng.randint(0, 4)):
            if self.running:
                self.ready.append(self.running.pop(self.rng.randrange(len(self.running))))

    def train(self) -> None:
        versions, said = decided(self.rule, self.unit, self.ready, self.running)
        if said.start:
            assert sum(said.take) == self.rule.samples_per_unit
            self.lags += lag(self.rule, self.unit, np.repeat(versions, said.take)).tolist()
            self.unit += 1
        for version, taken in zip(versions, said.take or [0] * len(versions), strict=True):
            self.leave(self.ready, version, taken)
        for version, dropped, stopped in zip(versions, said.drop, said.interrupt, strict=True):
            self.leave(self.ready, version, dropped)
            self.leave(self.running, version, stopped)
            self.gone += dropped + stopped

    @staticmethod
    def leave(samples: list[int], version: int, number: int) -> None:
        for _ in range(number):
            samples.remove(version)


def decided(rule: Staleness, now: int, ready: list[int], running: list[int]) -> tuple[list[int], Batch]:
    """The rule's answer to samples of these versions; its numbers go with the versions returned."""
    versions = sorted({*ready, *running})
    return versions, batch(
        rule,
        Tally(
            now=now,
            versions=versions,
            ready=[ready.count(version) for version in versions],
            in_flight=[running.count(version) for version in versions],
        ),
    )


@st.composite
def rules(draw: st.DrawFn) -> Staleness:
    unit = draw(st.sampled_from(["versions", "steps", "batches", "extra_samples"]))
    every = draw(st.integers(1, 4)) if unit in ("steps", "batches") else 1
    bound = draw(st.floats(0, 3)) if unit == "extra_samples" else every - 1 + draw(st.integers(0, 3))
    return Staleness(
        unit=unit,
        bound=bound,
        at_bound=draw(st.sampled_from(["block", "drop", "down_weight", "interrupt"])),
        samples_per_unit=draw(st.integers(1, 6)),
        units_per_version=every,
    )


def played(rule: Staleness, seed: int, num_buffer: int = 60, num_rounds: int = 150) -> Run:
    run = Run(rule=rule, rng=random.Random(seed), num_buffer=num_buffer)
    for _ in range(num_rounds):
        run.rng.choice([run.issue, run.arrive, run.train])()
    return run


@given(rules(), st.integers(0, 10**6))
def test_no_lag_is_above_the_bound_but_under_down_weight(rule: Staleness, seed: int) -> None:
    run = played(rule, seed)
    assert all(age >= 0 for age in run.lags)
    if rule.at_bound != "down_weight":
        assert max(run.lags, default=0) <= rule.largest_lag


@given(rules(), st.integers(0, 10**6))
def test_the_trainer_always_goes_on_in_the_end(rule: Staleness, seed: int) -> None:
    run = played(rule, seed, num_rounds=60)
    before = run.unit
    for _ in range(150):
        run.issue(), run.arrive(), run.train()
    assert run.unit >= before + 3


@given(rules(), st.integers(0, 10**6))
def test_block_wastes_nothing(rule: Staleness, seed: int) -> None:
    assert played(replace(rule, at_bound="block"), seed).gone == 0


def test_down_weight_trains_beyond_the_bound_and_drop_throws_away() -> None:
    rule = Staleness(bound=0, at_bound="down_weight", samples_per_unit=2)
    assert max(played(rule, 0).lags) > 0 and played(rule, 0).gone == 0
    assert played(replace(rule, at_bound="drop"), 0).gone > 0


def test_the_trainer_waits_for_a_sample_that_would_come_too_late() -> None:
    rule = Staleness(bound=1, samples_per_unit=1)
    late = (1, [1, 1], [0])
    assert decided(rule, *late)[1].why == "would_break_bound"
    assert decided(replace(rule, at_bound="drop"), *late)[1].take == (0, 1)
    assert decided(replace(rule, at_bound="interrupt"), *late)[1].interrupt == (1, 0)
    assert decided(rule, 1, [1, 0], [])[1].take == (1, 0)
    assert decided(rule, 1, [1], [1])[1].take == (1,)


def test_what_may_be_issued_is_what_the_bound_can_train() -> None:
    assert may_issue(Staleness(bound=0, samples_per_unit=8), 0, 0, 0) == 8
    assert may_issue(Staleness(bound=2, samples_per_unit=8), 3, 40, 3) == 8
    assert may_issue(Staleness(bound=0.5, unit="extra_samples", samples_per_unit=8), 0, 8, 0) == 4
    assert may_issue(Staleness(bound=3, unit="batches", samples_per_unit=2, units_per_version=4), 1, 8, 4) == 8


def test_nothing_is_issued_that_would_only_be_thrown_away() -> None:
    for at_bound in ("drop", "interrupt"):
        rule = Staleness(bound=1, at_bound=at_bound)
        assert may_issue(rule, 2, 0, 3) > 10**9 and may_issue(rule, 2, 0, 4) == 0
    assert may_issue(Staleness(bound=1, at_bound="down_weight"), 2, 0, 9) > 10**9


def test_a_bound_below_the_batches_of_a_version_is_refused() -> None:
    rule = Staleness(bound=2, unit="batches", units_per_version=4)
    assert deadlock(rule) is not None and deadlock(replace(rule, bound=3)) is None
    assert played(rule, 0, num_rounds=600).unit < 4
    assert deadlock(replace(rule, at_bound="down_weight")) is None


@pytest.mark.parametrize("name", WEIGHTS)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=9))
def test_weights_are_one_up_to_the_bound_and_then_fall(name: str, lags: list[int]) -> None:
    rule = Staleness(bound=2, at_bound="down_weight", weight=name)
    found = weights(rule, sorted(lags))
    assert (np.diff(found) <= 0).all() and (found > 0).all()
    assert ((found == 1) == (np.array(sorted(lags)) <= 2)).all()
    assert (weights(replace(rule, at_bound="drop"), lags) == 1).all()
