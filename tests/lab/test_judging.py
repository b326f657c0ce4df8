"""What may score how: refused before the run, with the key and what would be right."""

from typing import Any

import pytest
from pydantic import ValidationError

from lab.coherence import Incoherent
from lab.judging import one_by_one
from lab.load import load
from lab.scenario import Scenario

BIG = load("scenarios/ppo-7b-16gpu.yaml")


def edited(**changes: Any) -> Scenario:
    data = BIG.model_dump(mode="json", by_alias=True)
    return BIG.replace({key: data[key] | value for key, value in changes.items()})


def placed(role: str, **changes: Any) -> dict[str, Any]:
    place = BIG.model_dump(mode="json", by_alias=True)["place"]
    return {f"{role}.score": place[f"{role}.score"] | changes}


HEAD = placed("reward", shares_trunk=True, pool="reference")
LIKE = {"reward": {"like": "reference"}}


def refused(**changes: Any) -> Incoherent:
    with pytest.raises(ValidationError) as caught:
        edited(**changes)
    found = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(found, Incoherent)
    return found


def test_a_head_is_on_the_devices_of_its_trunk() -> None:
    scenario = edited(place=HEAD, models=LIKE)
    head, trunk = (scenario.team(role, "score")[0] for role in ("reward", "reference"))
    assert head.devices == trunk.devices and not scenario.claims_devices(scenario.scored["reward"])


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"place": placed("reward", shares_trunk=True), "models": LIKE}, "place.reward.score.pool"),
        ({"place": HEAD, "models": {"reward": {"arch": "small-llama"}}}, "models.reward"),
        ({"place": HEAD, "models": {"reward": {"like": "reference", "dtype": "int8"}}}, "models.reward.dtype"),
        ({"place": HEAD, "models": LIKE, "algorithm": {"kl_coef": 0.0}}, "place.reward.score.shares_trunk"),
        ({"place": placed("reference", max_wait=1.0)}, "place.reference.score.max_wait"),
    ],
)
def test_what_cannot_be_names_its_key(changes: dict[str, Any], key: str) -> None:
    assert refused(**changes).key == key


@pytest.mark.parametrize(
    "reward",
    [
        {"kind": "remote"},
        {"remote": {"latency": 1.0}},
        {"kind": "remote", "remote": {"latency": 2.0, "timeout": 1.0}},
        {"kind": "remote", "remote": {"latency": 1.0, "latency_p95": 9.0}},
        {"kind": "remote", "remote": {"latency": 1.0}, "shares_trunk": True},
        {"shares_trunk": True, "cache": {"hit_share": 0.5}},
    ],
)
def test_a_reward_that_says_two_things_is_refused(reward: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        edited(place=placed("reward", **reward))


@pytest.mark.parametrize(
    "reward",
    [
        {"kind": "function", "function": "no_such_name"},
        {"kind": "function"},
        {"arguments": {"target": 3}},
        {"kind": "remote", "remote": {"latency": 1.0, "url": "judge:80/score"}},
        {"kind": "remote", "remote": {"latency": 1.0, "url": "http://judge:eighty/score"}},
    ],
)
def test_a_reward_that_cannot_be_found_is_refused(reward: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        edited(place=placed("reward", **reward))


def test_functions_of_the_library_and_services_are_named() -> None:
    named = edited(place=placed("reward", kind="function", function="length", arguments={"target": 9}))
    assert named.place.reward_score is not None and named.place.reward_score.arguments == {"target": 9}
    remote = {"latency": 1.0, "url": "https://judge.local:8443/score?model=a"}
    assert edited(place=placed("reward", kind="remote", remote=remote)).place.reward_function


def test_trainers_on_cores_take_whole_steps() -> None:
    tiny = load("scenarios/ppo-tiny.yaml").model_dump(mode="json", by_alias=True)["schedule"] | {"scoring": "sample"}
    cores, gpus = load("scenarios/ppo-tiny.yaml").replace({"schedule": tiny}), edited(schedule={"scoring": "sample"})
    stages = ("reward", "reference", "value")
    assert [one_by_one(cores, stage) for stage in stages] == [True, True, False]
    assert [one_by_one(gpus, stage) for stage in stages] == [True, True, True]


def test_engines_and_scorers_in_turns_cannot_overlap() -> None:
    sharing = {"reference": {"how": "time_sliced", "switch": "sleep"}}
    place = placed("reference") | {"actor.generate": [{"pool": "reference"}]}
    assert edited(sharing=sharing, place=place)
    assert refused(sharing=sharing, place=place, schedule={"scoring": "sample"}).key == "schedule.scoring"


def test_trainers_score_one_by_one_where_a_rank_can_make_a_pass_alone() -> None:
    stages = ("reward", "reference", "value")
    assert not any(one_by_one(BIG, stage) for stage in stages)
    scenario = edited(schedule={"scoring": "sample"})
    assert all(one_by_one(scenario, stage) for stage in stages)
    critic = BIG.model_dump(mode="json", by_alias=True)["place"]["critic.train"]
    wide = edited(schedule={"scoring": "sample"}, place={"critic.train": critic | {"zero_stage": 3}})
    assert [one_by_one(wide, stage) for stage in stages] == [True, True, False]
