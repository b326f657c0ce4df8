"""Samples between overlapping stages: none is lost, doubled or out of order, and everybody learns of the end."""

import simpy
from hypothesis import given
from hypothesis import strategies as st

from simulator.streams import Stream

puts = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 4)), max_size=20)


@given(puts, st.integers(1, 3), st.floats(0, 2))
def test_every_sample_is_taken_once_in_order(given_: list[tuple[float, int]], readers: int, pause: float) -> None:
    env = simpy.Environment()
    stream, taken, closed = Stream(env), list[int](), list[float]()

    def source():
        number = 0
        for gap, count in given_:
            yield env.timeout(gap)
            stream.put(range(number, number + count))
            number += count
        stream.close()

    def reader():
        while (samples := (yield from stream.take())) is not None:
            taken.extend(samples)
            yield env.timeout(pause)
        closed.append(env.now)

    env.process(source())
    for _ in range(readers):
        env.process(reader())
    env.run()
    assert taken == list(range(sum(count for _, count in given_)))
    assert len(closed) == readers and stream.waiting == 0


def test_what_waits_is_taken_together_and_a_reader_waits_for_the_first() -> None:
    env = simpy.Environment()
    stream, seen = Stream(env), list[tuple[float, list[int] | None]]()

    def reader():
        for _ in range(3):
            samples = yield from stream.take()
            seen.append((env.now, samples))

    def source():
        yield env.timeout(2.0)
        stream.put([1])
        yield env.timeout(1.0)
        stream.put([2])
        stream.put([3, 4])
        stream.close()

    env.process(reader())
    env.process(source())
    env.run()
    assert seen == [(2.0, [1]), (3.0, [2, 3, 4]), (3.0, None)]
