import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lab.policies.stealing import Queues, Room, Steal, settled, startable, steals


@st.composite
def queues(draw: st.DrawFn) -> Queues:
    size = draw(st.integers(1, 7))

    def column(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=size, max_size=size))

    return Queues(
        queued=np.array(column(st.integers(0, 30))),
        free_slots=np.array(column(st.integers(0, 4))),
        speed=np.array(column(st.integers(1, 4)), float),
        least=draw(st.integers(1, 3)),
    )


def after(queued: np.ndarray, moves: list[Steal]) -> np.ndarray:
    """The queues once the moves are made."""
    left = queued.copy()
    for move in moves:
        left[move.victim] -= move.num
        left[move.thief] += move.num
    return left


@given(queues())
def test_stealing_conserves_work(seen: Queues) -> None:
    left = after(seen.queued, steals(seen))
    assert left.sum() == seen.queued.sum() and (left >= 0).all()


@given(queues())
def test_only_idle_engines_take_and_only_what_waits(seen: Queues) -> None:
    for move in steals(seen):
        assert seen.queued[move.thief] == 0 and seen.free_slots[move.thief] > 0
        assert move.num >= seen.least and move.num <= seen.queued[move.victim] and move.thief != move.victim


@given(queues())
def test_the_longest_queue_never_grows(seen: Queues) -> None:
    def longest(queued: np.ndarray) -> float:
        beyond = np.maximum(queued - seen.free_slots, 0)
        return float((beyond / seen.speed).max())

    assert longest(after(seen.queued, steals(seen))) <= longest(seen.queued)


@given(queues())
def test_nobody_stays_idle_while_work_waits_elsewhere(seen: Queues) -> None:
    moves = steals(Queues(queued=seen.queued, free_slots=seen.free_slots, speed=seen.speed))
    left = after(seen.queued, moves)
    idle = (left == 0) & (seen.free_slots > 0)
    assert not idle.any() or not (left > seen.free_slots).any()


def test_a_twice_as_fast_thief_takes_two_thirds() -> None:
    seen = Queues(queued=np.array([0, 30]), free_slots=np.array([40, 0]), speed=np.array([2.0, 1.0]))
    assert [(move.thief, move.victim, move.num) for move in steals(seen)] == [(0, 1, 20)]


@given(queues())
def test_nothing_moves_any_more_where_all_that_waits_can_start(found: Queues) -> None:
    if settled(found):
        assert steals(found) == []


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.floats(0, 100), st.floats(0.5, 9))
def test_who_waits_beside_who_runs_has_found_no_room(
    num_running: int, num_queued: int, free_slots: int, free_blocks: float, mean_blocks: float
) -> None:
    room = Room(
        num_running=num_running, num_queued=num_queued, free_slots=free_slots, free_blocks=free_blocks,
        mean_blocks=mean_blocks,
    )  # fmt: skip
    number = startable(room)
    assert 0 <= number <= free_slots and number * mean_blocks <= free_blocks + 1e-9
    assert number == 0 if num_running and num_queued else number >= min(free_slots, free_blocks // mean_blocks)
