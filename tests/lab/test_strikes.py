"""When faults strike: stated and drawn times, in order, the same for the same seed."""

from itertools import islice

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.load import load
from lab.scenario import Scenario
from lab.strikes import hangs, missed, strikes
from lab.targets import covering

BIG = load("scenarios/ppo-7b-16gpu.yaml")
DRAWN = {"kind": "scorer_lost", "mtbf": 50.0}
STATED = {"kind": "worker_lost", "at": 70.0, "target": "actor.generate[1]"}


def scenario(*faults: dict[str, object], seed: int = 0) -> Scenario:
    return BIG.replace({"faults": faults, "seed": seed, "checkpoint": {"every_steps": 1}})


@given(st.integers(0, 2**31))
@settings(max_examples=20)
def test_strikes_come_in_order_and_again_for_the_same_seed(seed: int) -> None:
    found = list(islice(strikes(scenario(DRAWN, STATED, seed=seed)), 60))
    times = [strike.at for strike in found]
    assert times == sorted(times)
    assert found == list(islice(strikes(scenario(DRAWN, STATED, seed=seed)), 60))
    assert [(strike.at, strike.target) for strike in found if strike.entry == 1] == [(70.0, "actor.generate[1]")]
    assert {strike.target for strike in found if strike.entry == 0} == {"reference.score[0]", "reward.score[0]"}


def test_drawn_strikes_have_their_mean_time() -> None:
    """Of one target: 4000 gaps of a Poisson process; the mean's standard error is 1.6 %."""
    only = [strike.at for strike in islice(strikes(scenario(DRAWN | {"target": "reward.score[0]"})), 4000)]
    assert abs(np.diff(only).mean() / 50.0 - 1) < 0.06


def test_half_of_the_processes_hang() -> None:
    drawn = [hangs(BIG, 0, number) for number in range(2000)]
    assert drawn == [hangs(BIG, 0, number) for number in range(2000)]
    assert 900 < sum(drawn) < 1100


def test_what_covers_a_worker() -> None:
    slow = {"kind": "straggler", "at": 1.0, "target": "actor.generate[1]"}
    chosen = scenario(DRAWN, STATED, slow)
    kinds = {name: [fault.kind for fault in covering(chosen, name)] for name in chosen.workers}
    assert kinds.pop("actor.generate[1]") == ["worker_lost"]
    assert kinds.pop("reference.score[0]") == kinds.pop("reward.score[0]") == ["scorer_lost"]
    assert not any(kinds.values())


def test_what_a_short_run_misses() -> None:
    assert [strike.entry for strike in missed(scenario(DRAWN, STATED), 69.0)] == [1]
    assert missed(scenario(DRAWN, STATED), 71.0) == []
