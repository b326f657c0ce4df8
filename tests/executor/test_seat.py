"""An engine that takes commands while it generates; the engine is real, and in this process."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from executor.experience import Samples
from executor.rollout import RolloutWorker
from executor.seat import Seat
from lab.scenario import Scenario

Make = Callable[..., Scenario]
PROMPTS, TRIED = 4, 2


@pytest.fixture(scope="module")
def worker(scenario: Make) -> Iterator[RolloutWorker]:
    chosen = scenario(
        "quickstart",
        place={"actor.generate": [{"pool": "all", "backend": "transformers"}]},
        workload={"prompts_per_step": PROMPTS, "samples_per_prompt": TRIED},
        rollout={"max_num_seqs": 2, "kv_bytes": "64 MiB"},
        update={"minibatch_samples": PROMPTS * TRIED},
    )
    found = RolloutWorker(chosen.team("actor", "generate")[0], 0, chosen)
    found.load()
    yield found
    found.release()


def begun(worker: RolloutWorker, given: list[int], pool: ThreadPoolExecutor) -> tuple[Seat, Future[Any]]:
    seat = Seat(worker, 0, np.ones((PROMPTS, TRIED)))
    return seat, pool.submit(seat.play, 0, given, {"dispatch": "round_robin"})


def heard(seat: Seat, number: int) -> list[int]:
    """Places of the samples that have ended, once there are so many."""
    ended: list[int] = []
    while len(ended) < number:
        ended += seat.listen().ended
    return ended


def alone(worker: RolloutWorker) -> Samples:
    found, _ = worker.generate(0, 0, range(PROMPTS))
    assert found is not None
    return found


def test_samples_are_those_of_an_engine_that_is_left_alone(worker: RolloutWorker) -> None:
    expected = alone(worker)
    with ThreadPoolExecutor() as pool:
        seat, playing = begun(worker, [], pool)
        seat.give([6, 7, 0, 1])
        seat.give([2, 3, 4, 5])
        assert sorted(heard(seat, 8)) == list(range(8))
        seat.close({"kept_prompts": 4})
        samples, info = playing.result()
    assert all(np.array_equal(a, b) for a, b in zip(samples.tokens, expected.tokens, strict=True))
    assert (samples.prompts.tolist(), samples.indices.tolist()) == (
        expected.prompts.tolist(),
        expected.indices.tolist(),
    )
    [whole] = [span for span in info["spans"] if not span.op]
    assert (whole.attrs["samples"], whole.attrs["kept_prompts"], whole.attrs["dispatch"]) == (8, 4, "round_robin")
    assert whole.attrs["response_tokens"] == sum(map(len, samples.logprobs)) == info["responses"][1].sum()


def test_what_waits_can_be_taken_away_and_what_runs_stays(worker: RolloutWorker) -> None:
    with ThreadPoolExecutor() as pool:
        seat, playing = begun(worker, list(range(8)), pool)
        seat.state()  # after the first pass at the latest
        taken = seat.withdraw(3)
        assert taken == [5, 6, 7]
        assert sorted(heard(seat, 5)) == [0, 1, 2, 3, 4]
        room, busy_s = seat.state()
        assert (room.num_running, room.num_queued, room.free_slots) == (0, 0, 2) and busy_s > 0
        seat.give(taken)
        assert sorted(heard(seat, 3)) == taken
        seat.close({})
        samples, _ = playing.result()
    assert len(samples) == 8


def test_a_dry_engine_says_so(worker: RolloutWorker) -> None:
    with ThreadPoolExecutor() as pool:
        seat, playing = begun(worker, [], pool)
        assert seat.listen().dry
        seat.give([0])
        dry = False
        while not (news := seat.listen()).ended:
            dry |= news.dry
        assert dry or news.dry  # one ran, and two could
        seat.close({})
        playing.result()


def test_what_is_out_when_it_is_closed_is_given_up_and_counted(worker: RolloutWorker) -> None:
    with ThreadPoolExecutor() as pool:
        seat, playing = begun(worker, list(range(8)), pool)
        first = heard(seat, 1)
        seat.close({})
        samples, info = playing.result()
    [whole] = [span for span in info["spans"] if not span.op]
    assert len(samples) == len(set(first) | set(seat._ended))
    assert whole.attrs["aborted"] == 8 - len(samples) > 0
    assert whole.attrs["aborted_tokens"] >= 0 and worker.backend.unfinished == 0
    assert alone(worker).lengths  # the engine is as good as new


def test_who_asks_an_engine_that_is_through_gets_an_answer(worker: RolloutWorker) -> None:
    with ThreadPoolExecutor() as pool:
        seat, playing = begun(worker, [0], pool)
        heard(seat, 1)
        seat.close({})
        playing.result()
    begun_s = time.monotonic()
    seat.give([1])
    assert seat.withdraw(2) == [] and not seat.listen().ended
    assert time.monotonic() - begun_s < 1.0
    assert threading.active_count() < 20


def test_another_version_is_refused(worker: RolloutWorker) -> None:
    with pytest.raises(RuntimeError, match="has policy version 0, step 0 asks for 3"):
        Seat(worker, 0, np.ones((PROMPTS, TRIED))).play(3, [], {})
