from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lab.policies.scaling import Depth, Scaling, target


@st.composite
def rules(draw: st.DrawFn) -> Scaling:
    low = draw(st.integers(0, 5))
    return Scaling(num_min=low, num_max=low + draw(st.integers(0, 20)), start_s=draw(st.floats(0, 100)))


depths = st.builds(
    Depth,
    num_queued=st.integers(0, 5000),
    num_running=st.integers(0, 500),
    rate=st.floats(0.01, 50) | st.just(0.0),
    num_ready=st.integers(0, 30),
    num_starting=st.integers(0, 5),
    since_change_s=st.floats(0, 1000),
)


@given(rules(), depths)
def test_the_number_is_within_its_limits(rule: Scaling, depth: Depth) -> None:
    said = target(rule, depth)
    assert rule.num_min <= said.num_workers <= rule.num_max
    assert said.change == said.num_workers - depth.num_workers


@given(rules(), depths)
def test_a_steady_load_makes_at_most_one_change_after_the_limits(rule: Scaling, depth: Depth) -> None:
    numbers = [depth.num_workers]
    for _ in range(5):
        numbers.append(
            target(rule, replace(depth, num_ready=numbers[-1], num_starting=0, since_change_s=1e9)).num_workers
        )
    assert numbers[2:] == [numbers[2]] * 4
    assert sorted(numbers[1:]) in (numbers[1:], numbers[:0:-1])


@given(rules(), depths, st.integers(0, 1000))
def test_more_work_never_means_fewer_workers(rule: Scaling, depth: Depth, more: int) -> None:
    busier = replace(depth, num_queued=depth.num_queued + more)
    assert target(rule, busier).num_workers >= target(rule, depth).num_workers


def test_nobody_is_started_for_work_that_will_be_done_before() -> None:
    rule = Scaling(num_min=1, num_max=9, start_s=30, drain_s=10)
    assert target(rule, Depth(num_queued=25, num_running=0, rate=1, num_ready=1)).why == "not_worth_it"
    said = target(rule, Depth(num_queued=35, num_running=0, rate=1, num_ready=1))
    assert (said.num_workers, said.change, said.why) == (4, 3, "backlog")


def test_workers_that_are_starting_count() -> None:
    rule = Scaling(num_min=1, num_max=9, start_s=30, drain_s=10)
    assert target(rule, Depth(num_queued=35, num_running=0, rate=1, num_ready=1, num_starting=3)).change == 0


def test_stopping_waits_for_the_hold() -> None:
    rule = Scaling(num_min=1, num_max=9, start_s=30)
    idle = Depth(num_queued=0, num_running=0, rate=1, num_ready=5, since_change_s=59)
    assert target(rule, idle).why == "too_soon"
    assert target(rule, replace(idle, since_change_s=60)).change == -4
    assert target(rule, replace(idle, since_change_s=60, num_starting=1)).change == 0
