"""Scorers as the driver of a run calls them."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.judging import Judges
from executor.limits import refuse
from executor.run import execute
from lab.dataflow import conforms
from lab.errors import InputError
from lab.scenario import Scenario
from lab.wiring import build
from tests.executor.judge import Judge
from tests.executor.judged import Make, judged_by

REFERENCE = {"pool": "all", "threads": 1, "replicas": 2, "dtype": "int8", "max_batch_samples": 4, "max_wait": "20 ms"}


def remote(url: str | None) -> dict[str, Any]:
    service = {"latency": 0.01, "concurrency": 2, "retries": 1, "timeout": 20.0, "url": url}
    return {"kind": "remote", "max_batch_samples": 2, "remote": service}


@pytest.mark.parametrize(
    ("changes", "streamed"),
    [({}, []), ({"schedule": {"scoring": "sample"}}, ["reward", "reference"])],
)
def test_engines_hand_samples_to_those_who_take_them_one_by_one(
    scenario: Make, changes: dict[str, Any], streamed: list[str]
) -> None:
    dataflow = build(scenario("quickstart", **changes))
    team = {"reward": ["a", "b"], "reference": ["c"]}
    judges = Judges(dataflow, team, head=False)
    assert judges.sinks == [actor for stage in streamed for actor in team[stage]]


def test_a_head_is_handed_nothing_by_engines(scenario: Make) -> None:
    like = {"models": {"reward": {"like": "reference", "dtype": "float32"}}}
    chosen = judged_by(scenario, {"kind": "model", "shares_trunk": True}, schedule={"scoring": "sample"}, **like)
    judges = Judges(build(chosen), {"reward": ["head"], "reference": ["trunk"]}, head=True)
    assert judges.sinks == ["trunk"]


def test_scorers_wait_for_what_hands_samples_on_to_them(scenario: Make) -> None:
    judges = Judges(build(scenario("quickstart", schedule={"scoring": "sample"})), {"reward": ["a"]}, head=False)

    async def waited() -> None:
        later = asyncio.create_task(judges.sources_ended("reward", 1))
        judges.ended("rollout", 0)
        await judges.sources_ended("reward", 0)
        await asyncio.sleep(0)
        assert not later.done()
        judges.ended("rollout", 1)
        await later
        await judges.sources_ended("reward", 1)

    asyncio.run(waited())
    assert judges._ended._awaited == {}, "the driver remembers no step that has ended"


@pytest.mark.parametrize(
    ("reward", "key"),
    [
        (remote(None), "place.reward.score.remote.url"),
        ({"kind": "function", "function": "no_module_of_this_name:f"}, "place.reward.score.function"),
        ({"kind": "function", "function": "contains"}, "place.reward.score.function"),
        ({"kind": "function", "function": "length", "arguments": {"aim": 3}}, "place.reward.score.function"),
    ],
)
def test_rewards_that_cannot_be_had_are_refused_by_key(scenario: Make, reward: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as caught:
        refuse(judged_by(scenario, reward))
    assert caught.value.key == key and caught.value.remedy


def rewarded(number: int, body: dict[str, Any]) -> tuple[int, bytes]:
    """The share of even tokens, until step 2."""
    if body["step"] == 2:
        return 403, b"no more rewards today"
    rewards = [float(np.mean([token % 2 == 0 for token in row["response"]])) for row in body["samples"]]
    return 200, json.dumps({"rewards": [{"even": reward, "offset": 0.5} for reward in rewards]}).encode()


@pytest.mark.real
@pytest.mark.full
def test_samples_are_scored_beside_the_engine_until_the_service_gives_up(
    local_ray: None, scenario: Callable[..., Scenario], tmp_path: Path
) -> None:
    with Judge(rewarded) as judge:
        chosen = judged_by(
            scenario,
            remote(judge.url),
            place={"reference.score": REFERENCE},
            schedule={"scoring": "sample"},
            num_steps=3,
        )
        timeline = execute(chosen, tmp_path)
    assert timeline.header.status == "failed"
    assert timeline.header.error.startswith(
        f"RewardFailed: {judge.url} answered with status 403: no more rewards today"
    )
    assert conforms(build(chosen), timeline) == []
    assert timeline.header.samples["trained"] == 64 and [row["step"] for row in timeline.header.learning] == [0, 1]
    stages = {span.span_id: span for span in timeline.stages()}
    for step in (0, 1):
        rollout, reward = stages[f"rollout/{step}/actor.generate[0]"], stages[f"reward/{step}/reward.score[0]"]
        assert rollout.start_s < reward.start_s < rollout.end_s < reward.end_s
        assert (reward.attrs["samples"], reward.attrs["ahead"], reward.tokens) == (32, 32, rollout.tokens)
        assert reward.attrs["calls"] == reward.attrs["batches"] >= 16 and reward.attrs["retries"] == 0
        references = [stages[f"reference/{step}/reference.score[{i}]"] for i in (0, 1)]
        assert sum(span.tokens for span in references) == rollout.tokens
        assert [span.attrs["ahead"] for span in references] == [16, 16]
    sent = [row for body in judge.sent if body["step"] == 0 for row in body["samples"]]
    expected = np.mean([0.5 + np.mean([token % 2 == 0 for token in row["response"]]) for row in sent])
    assert len(sent) == 32 and timeline.header.learning[0]["reward"] == pytest.approx(expected)
