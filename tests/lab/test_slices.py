"""Turns on a pool: who is loaded together, what is switched between, and what is refused."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from lab.load import load
from lab.scenario import Scenario
from lab.slices import turns
from lab.wiring import build

TINY = load("scenarios/ppo-tiny.yaml").model_dump(mode="json", by_alias=True)
PHASES = [["actor.generate"], ["reference.score", "critic.train", "actor.train"]]
Turns = list[tuple[str, tuple[str, ...]]]


def sliced(mode: str = "synchronous", **sharing: Any) -> Scenario:
    """The tiny PPO scenario with its one pool in time slices."""
    said = {"all": {"how": "time_sliced", "switch": "offload"} | sharing}
    return Scenario.model_validate_json(json.dumps(TINY | {"sharing": said, "schedule": {"mode": mode}}))


def of(scenario: Scenario) -> Turns:
    nodes = [node for node in build(scenario).nodes.values() if node.stage != "switch"]
    return [(turn.slice, turn.stages) for turn in turns(scenario, "all", nodes)]


def test_alone_each_model_takes_its_turn_as_often_as_its_stages_are_apart() -> None:
    assert of(sliced()) == [
        ("actor.generate", ("rollout",)),
        ("reference.score", ("reference",)),
        ("critic.train", ("value", "advantage", "update_critic")),
        ("actor.train", ("update_actor", "weight_sync", "checkpoint")),
    ]


def test_two_phases_have_two_switches_and_the_second_leads_into_the_next_step() -> None:
    flow = build(sliced(slices=PHASES))
    switches = [name for name, node in flow.nodes.items() if node.stage == "switch"]
    assert switches == ["switch:all:0", "switch:all:1"]
    assert ("switch:all:0", 1) in flow.requirements("reference", 1)
    assert ("switch:all:1", 0) in flow.requirements("rollout", 1)
    assert ("weight_sync", 1) in flow.requirements("switch:all:1", 1)
    first = flow.nodes["switch:all:0"]
    assert {name.split("[")[0] for name in first.leaves} == {"actor.generate"}
    assert {name.split("[")[0] for name in set(first.workers) - set(first.leaves)} == set(PHASES[1])


def test_engines_alone_move_where_the_others_stay_loaded() -> None:
    flow = build(sliced(switch="sleep"))
    moved = {name.split("[")[0] for node in flow.nodes.values() if node.stage == "switch" for name in node.workers}
    assert moved == {"actor.generate"}
    assert ("reference", 0) in flow.requirements("value", 0), "the devices are free only when the turn before has ended"


def test_the_devices_of_a_pool_are_dealt_anew_in_every_slice() -> None:
    scenario = sliced(slices=PHASES)
    assert scenario.workers["actor.generate[0]"].devices == scenario.workers["reference.score[0]"].devices


def test_a_turn_lasts_until_what_its_workers_do_on_the_host_has_ended() -> None:
    sent = TINY | {"experience": {"transport": "rpc"}}
    said = {"all": {"how": "time_sliced", "switch": "offload", "slices": PHASES}}
    scenario = Scenario.model_validate_json(json.dumps(sent | {"sharing": said, "schedule": {"mode": "synchronous"}}))
    assert of(scenario)[0] == ("actor.generate", ("rollout", "transfer"))
    assert ("transfer", 0) in build(scenario).requirements("switch:all:0", 0)


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ({"slices": [["actor.generate"], ["critic.train", "actor.train"]]}, "reference.score is on this pool"),
        ({"slices": [*PHASES, ["reward.score"]]}, "no model is placed on this pool as reward.score"),
        ({"slices": [[work for phase in PHASES for work in phase]]}, "in one slice"),
        ({"switch": None}, "`switch` is needed"),
        ({"how": "resident"}, "`switch` is needed"),
        ({"slices": [*PHASES, ["actor.generate"]]}, "in one slice only"),
        ({"switch": "sleep", "slices": [["actor.generate", "actor.train"], PHASES[1][:2]]}, "only engines can sleep"),
        ({"mode": "one_step_off"}, "cannot run beside them"),
        ({"switch": "reload"}, "has the old weights"),
    ],
)
def test_what_contradicts_itself_is_refused(said: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        sliced(**said)
