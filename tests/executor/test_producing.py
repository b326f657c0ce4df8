"""The thread that drives an engine, in this process: what it is given comes back or leaves, and groups leave together."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from executor.buffer import Buffer
from executor.producing import Event
from executor.rollout import RolloutWorker
from lab.scenario import Scenario

Make = Callable[..., Scenario]


class Here:
    """A buffer that is called as an actor is, and does at once what it is told."""

    def __init__(self) -> None:
        self.buffer = Buffer()
        self.calls: list[list[int]] = []
        self.put = self

    def remote(self, numbers: list[int], samples: Any) -> None:
        self.calls.append(numbers)
        asyncio.run(self.buffer.put(numbers, samples))


@pytest.fixture
def made(scenario: Make) -> Iterator[tuple[RolloutWorker, Here]]:
    engine = [{"pool": "serve", "engines": 1, "threads": 1, "backend": "transformers"}]
    chosen = scenario("async-tiny", place={"actor.generate": engine}, rollout={"max_num_seqs": 16})
    worker, here = RolloutWorker(chosen.team("actor", "generate")[0], 0, chosen), Here()
    worker.ready()
    worker.begin(0, here)
    yield worker, here
    worker.finish()


def told(worker: RolloutWorker, *kinds: str) -> list[Event]:
    """Everything up to the first event of such a kind."""
    found: list[Event] = []
    while not any(kind in kinds for kind, _ in found):
        new = worker.news()
        assert new, "it has something to tell"
        found += new
    return found


def test_groups_come_back_whole_and_under_their_numbers(made: tuple[RolloutWorker, Here]) -> None:
    worker, here = made
    worker.give(list(range(100, 112)), [2] * 12, list(range(12)))
    events: list[Event] = []
    while len(back := [what for kind, what in events if kind == "back"]) < 12:
        events += worker.news()
    lengths = worker.scenario.workload.response_lengths(worker.scenario.seed, 2)
    assert {number: response for number, _, response, _ in back} == {
        100 + i: int(lengths[i // 4, i % 4]) for i in range(12)
    }
    assert {version for *_, version in back} == {0}
    assert sorted(sorted(call) for call in here.calls) == [
        [100, 101, 102, 103],
        [104, 105, 106, 107],
        [108, 109, 110, 111],
    ]
    batch, _ = asyncio.run(here.buffer.take(0, 0, [105, 100]))
    assert batch.prompts.tolist() == [2 * 16 + 1, 2 * 16]
    assert batch.indices.tolist() == [1, 0]
    worker.finish()
    spans = [span for kind, what in told(worker, "over") if kind == "spans" for span in what]
    [rollout] = [span for span in spans if not span.op]
    assert (rollout.span_id, rollout.attrs["issued"], rollout.attrs["samples"]) == (
        "rollout/0/actor.generate[0]",
        12,
        12,
    )
    assert rollout.attrs["response_tokens"] == int(lengths[:3].sum())
    assert all(rollout.start_s <= span.start_s <= span.end_s <= rollout.end_s for span in spans)


def test_what_is_stopped_says_how_far_it_was_and_lets_its_group_go(made: tuple[RolloutWorker, Here]) -> None:
    worker, here = made
    worker.give([1, 2, 3, 4, 5, 6, 7, 8], [0] * 8, list(range(8)))
    worker.stop([2, 4, 99])
    [stopped] = [what for kind, what in told(worker, "stopped") if kind == "stopped"]
    assert stopped.keys() == {2, 4}
    found: list[int] = [number for call in here.calls for number in call]
    while len(found) < 6:
        worker.news()
        found = [number for call in here.calls for number in call]
    assert sorted(found) == [1, 3, 5, 6, 7, 8]


def test_whoever_hears_that_it_has_turned_to_another_buffer_knows_what_went_to_the_first(
    made: tuple[RolloutWorker, Here],
) -> None:
    worker, first = made
    other, events = Here(), list[Event]()
    worker.give(list(range(32)), [0] * 32, list(range(32)))
    while not first.calls:
        events += worker.news()
    worker.deliver_to(other)
    while len([0 for kind, _ in events if kind == "back"]) < 32:
        events += worker.news()
    turned = [kind for kind, _ in events].index("turned")
    before, after = ({what[0] for kind, what in part if kind == "back"} for part in (events[:turned], events[turned:]))
    there, here = ({number for call in buffer.calls for number in call} for buffer in (first, other))
    assert there and here and not there & here and there | here == set(range(32))
    assert there <= before and after <= here
