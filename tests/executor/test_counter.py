"""Scoring without end: every sample once, every pass in the span of one step, and errors where the step ends."""

import threading
from typing import Any

import numpy as np
import pytest

from executor.counter import Counter
from executor.experience import Samples
from executor.recorder import Recorder
from executor.rewards import Columns
from lab.accounts import SAMPLE_WAIT
from lab.policies.scoring import Batching


def made(numbers: list[int]) -> Samples:
    return Samples(
        step=-1, policy_version=0, prompts=np.asarray(numbers), num_prompt_tokens=np.ones(len(numbers), np.int64),
        tokens=[np.full(3, number) for number in numbers], logprobs=[np.zeros(2, np.float32) for _ in numbers],
    )  # fmt: skip


class Found:
    """What a counter told, and how to wait for it."""

    def __init__(self) -> None:
        self.rewards: dict[int, float] = {}
        self.batches: list[int] = []
        self._changed = threading.Condition()

    def score(self, samples: Samples, notes: dict[str, Any]) -> Columns:
        notes["samples"] = len(samples)
        return {"rewards": samples.prompts * 2.0}

    def told(self, numbers: list[int], columns: Columns) -> None:
        with self._changed:
            assert not self.rewards.keys() & set(numbers), "once"
            self.rewards |= dict(zip(numbers, columns["rewards"].tolist(), strict=True))
            self.batches.append(len(numbers))
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.rewards) == number, 10)


@pytest.mark.parametrize("servers", [1, 3])
def test_every_sample_is_scored_once_in_batches_that_fit(servers: int) -> None:
    found, recorder = Found(), Recorder("reward.score[0]", "all")
    counter = Counter("reward", recorder, Batching(max_samples=4), found.score, found.told, servers)
    counter.begin(0, 0)
    counter.submit(list(range(10)), made(list(range(10))))
    found.wait(10)
    [span] = [span for span in counter.hand_on(1, 0) if not span.op]
    assert (span.span_id, span.attrs["samples"], span.attrs["batches"]) == ("reward/0/reward.score[0]", 10, 3)
    assert found.rewards == {number: 2.0 * number for number in range(10)}
    assert max(found.batches) <= 4
    counter.submit([20, 21], made([20, 21]))
    found.wait(12)
    spans = counter.hand_on(2, 0, last=True)
    assert [(span.step, span.attrs["samples"]) for span in spans if not span.op] == [(1, 2)]
    assert all(span.op == SAMPLE_WAIT for span in spans if span.op)
    stages = sorted(span.end_s for span in spans if not span.op)
    assert all(span.end_s <= stages[-1] for span in spans)


def test_a_step_without_samples_is_one_too() -> None:
    found = Found()
    counter = Counter("reward", Recorder("reward.score[0]", "all"), Batching(max_samples=4), found.score, found.told)
    counter.begin(3, 1)
    spans = counter.hand_on(4, 1, last=True)
    assert [(span.step, span.policy_version) for span in spans if not span.op] == [(3, 1)]


def test_what_fails_is_told_when_the_step_ends() -> None:
    def broken(samples: Samples, notes: dict[str, Any]) -> Columns:
        raise ValueError("no such score")

    counter = Counter("reward", Recorder("w", "all"), Batching(max_samples=4), broken, Found().told)
    counter.begin(0, 0)
    counter.submit([1], made([1]))
    with pytest.raises(ValueError, match="no such score"):
        counter.hand_on(1, 0)
