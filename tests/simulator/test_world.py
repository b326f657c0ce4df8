"""Cores shared by several jobs: closed forms of processor sharing, and conservation of work."""

from collections.abc import Sequence

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from lab.load import load
from profiles.cost import CostModel
from profiles.profile import OpProfile, Profile
from simulator.world import Cores

QUICK = load("scenarios/quickstart.yaml")
SCORER = QUICK.team("reference", "score")[0]


def costs(each: float) -> CostModel:
    """Of a machine on which every busy neighbour slows a pass down by the same amount."""
    op = OpProfile(
        coefficients={"each": 1.0}, ranges={}, points=1, residual_median=0, residual_p90=0,
        interference=tuple(1 + each * n for n in range(1, 9)),
    )  # fmt: skip
    return CostModel(QUICK, {"cpu-core": Profile(name="p", device="cpu-core", kind="measured", ops={"logprob": op})})


def ends(jobs: Sequence[tuple[float, float]], num_cores: int, each: float = 0.0, threads: int = 1) -> list[float]:
    """When jobs of (arrival, work) end."""
    env = simpy.Environment()
    cores, found = Cores(env, num_cores, costs(each)), [0.0] * len(jobs)
    worker = SCORER.model_copy(update={"threads": threads})

    def run(i: int, arrival: float, seconds: float):
        yield env.timeout(arrival)
        yield from cores.work(worker, "logprob", seconds)
        found[i] = env.now

    for i, (arrival, seconds) in enumerate(jobs):
        env.process(run(i, arrival, seconds))
    env.run()
    return found


jobs = st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 10)), min_size=1, max_size=8)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=8))
def test_one_core_shared_from_the_start_ends_jobs_at_the_closed_form(works: list[float]) -> None:
    """Egalitarian processor sharing: the k-th shortest of n jobs ends after the shorter ones and (n - k + 1) times its rest."""
    expected, done, before = {}, 0.0, 0.0
    for rank, i in enumerate(sorted(range(len(works)), key=works.__getitem__)):
        done += (works[i] - before) * (len(works) - rank)
        expected[i], before = done, works[i]
    assert ends([(0.0, w) for w in works], 1) == pytest.approx([expected[i] for i in range(len(works))])


@given(jobs)
def test_one_core_is_never_idle_while_there_is_work(jobs: list[tuple[float, float]]) -> None:
    """The busy period of any work-conserving order: Lindley's recursion."""
    clock = 0.0
    for arrival, seconds in sorted(jobs):
        clock = max(clock, arrival) + seconds
    assert max(ends(jobs, 1)) == pytest.approx(clock, rel=1e-6)


@given(jobs)
def test_as_many_cores_as_jobs_leave_everyone_alone(jobs: list[tuple[float, float]]) -> None:
    assert ends(jobs, len(jobs)) == pytest.approx([arrival + seconds for arrival, seconds in jobs])


@given(jobs, st.integers(1, 4))
def test_nobody_is_faster_than_alone_and_all_work_needs_its_core_seconds(
    jobs: list[tuple[float, float]], cores: int
) -> None:
    found = ends(jobs, cores)
    for end, (arrival, seconds) in zip(found, jobs, strict=True):
        assert end >= arrival + seconds - 1e-6
    first = min(arrival for arrival, _ in jobs)
    assert max(found) >= first + sum(seconds for _, seconds in jobs) / cores - 1e-6


@given(jobs, st.integers(1, 3))
def test_one_more_core_delays_nobody(jobs: list[tuple[float, float]], cores: int) -> None:
    assert all(more <= less + 1e-6 for more, less in zip(ends(jobs, cores + 1), ends(jobs, cores), strict=True))


def test_a_busy_neighbour_slows_down_only_while_it_is_there() -> None:
    # Together both run at 1/1.5: the short one ends at 3 with the long one at 2 of 6, which then goes on alone.
    assert ends([(0.0, 2.0), (0.0, 6.0)], 2, each=0.5) == pytest.approx([3.0, 7.0])


def test_threads_claim_cores() -> None:
    # Two jobs of two threads on two cores run at half speed; on four cores at full speed.
    assert ends([(0.0, 1.0), (0.0, 1.0)], 2, threads=2) == pytest.approx([2.0, 2.0])
    assert ends([(0.0, 1.0), (0.0, 1.0)], 4, threads=2) == pytest.approx([1.0, 1.0])


@given(st.floats(0.05, 0.9), st.integers(5, 60))
def test_regular_arrivals_below_full_load_never_wait(load: float, number: int) -> None:
    """D/D/1: each job ends before the next one comes."""
    found = ends([(float(i), load) for i in range(number)], 1)
    assert found == pytest.approx([i + load for i in range(number)], rel=1e-6)


@pytest.mark.parametrize("late", [1e4, 1e6, 1e8])
def test_short_jobs_end_however_late_the_clock(late: float) -> None:
    """At 10⁸ s the clock counts in steps of 15 ns, far more than the rounding that a job's rest is allowed."""
    works = [0.0011 * (1 + 0.01 * i) for i in range(50)]
    found = ends([(late + 0.0007 * i, seconds) for i, seconds in enumerate(works)], 2)
    assert late + sum(works) / 2 - 1e-6 <= max(found) <= late + sum(works) + 1e-6
