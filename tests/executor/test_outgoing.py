"""An engine's process hands its samples over: all after the rollout, or as they end; only those that are wanted."""

from collections.abc import Callable

import numpy as np
import pytest

from executor import outgoing
from executor.inbox import Inbox
from executor.outgoing import Address, wanted
from executor.rollout import RolloutWorker
from lab.experience import Experience
from lab.scenario import Scenario
from tests.executor.judged import samples

Make = Callable[..., Scenario]
PER_PROMPT = 4


def connected(scenario: Make, **said: object) -> tuple[RolloutWorker, Inbox]:
    """An engine's process, in which no engine is loaded, and where its samples go."""
    chosen, inbox = scenario("quickstart"), Inbox(num_tried=PER_PROMPT)
    worker = RolloutWorker(chosen.team("actor", "generate")[0], 0, chosen)
    port = inbox.listen("127.0.0.1")
    to = Address(inbox=None, host="127.0.0.1", port=port, mark="lab-outgoing")
    outgoing.connect(worker, Experience(**said), to)  # type: ignore[arg-type]
    return worker, inbox


@pytest.mark.parametrize("transport", ["rpc", "shared_memory"])
def test_a_step_is_sent_after_its_rollout(scenario: Make, transport: str) -> None:
    worker, inbox = connected(scenario, transport=transport, compression="zstd", batch_samples=5)
    rows = samples(12, per_prompt=PER_PROMPT)
    assert worker.outgoing is not None
    worker.outgoing.begin(rows.step)
    assert not worker.outgoing.streams(rows.step)
    worker.outgoing.made(rows.step, rows)
    info = outgoing.send(worker, rows.step)
    [whole] = [span for span in info["spans"] if not span.op]
    [sent] = [span for span in info["spans"] if span.op]
    assert (whole.stage, sent.op, whole.attrs["samples"]) == ("transfer", "send", 12)
    assert sent.attrs["messages"] == 3 and sent.bytes == pytest.approx(whole.attrs["ratio"] * sent.attrs["raw_bytes"])
    found = inbox.collect(rows.step, 12)
    assert all(np.array_equal(a, b) for a, b in zip(found.tokens, rows.tokens, strict=True))


def test_with_prefetch_what_has_ended_is_there_before_the_stage(scenario: Make) -> None:
    worker, inbox = connected(scenario, prefetch=True, batch_samples=4)
    rows = samples(8, per_prompt=PER_PROMPT)
    assert worker.outgoing is not None
    worker.outgoing.begin(rows.step)
    for row in range(6):
        worker.outgoing.ended(rows.step, rows.take([row]))
    worker.outgoing.made(rows.step, rows.take(range(6)))
    info = outgoing.send(worker, rows.step)
    [sent] = [span for span in info["spans"] if span.op]
    assert sent.attrs["messages"] == 2  # a whole one, and the rest
    assert len(inbox.collect(rows.step, 6)) == 6


def test_what_the_step_has_no_use_for_stays(scenario: Make) -> None:
    worker, inbox = connected(scenario)
    rows = samples(12, per_prompt=PER_PROMPT)
    kept = [place for place in range(12) if place // PER_PROMPT != 1]
    assert worker.outgoing is not None
    worker.outgoing._num_tried = PER_PROMPT
    worker.outgoing.made(rows.step, rows.take(range(4)))
    worker.outgoing.made(rows.step, rows.take(range(4, 12)))
    outgoing.send(worker, rows.step, kept)
    found = inbox.collect(rows.step, 8)
    assert np.unique(found.prompts).tolist() == [0, 2]
    assert wanted(rows, range(12), PER_PROMPT) is rows
