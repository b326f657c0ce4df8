"""Faults in a scenario: what can be hit, and what is refused with the key to change."""

from typing import Any

import pytest
from pydantic import ValidationError

from lab.coherence import Incoherent
from lab.load import load
from lab.scenario import Scenario
from lab.targets import hit, rolls_back, taken, targets

BIG = load("scenarios/ppo-7b-16gpu.yaml")
LOST = {"kind": "trainer_lost", "at": "100 s", "target": "actor.train[0]"}


def scenario(*faults: dict[str, Any], checkpoint: dict[str, Any] | None = None) -> Scenario:
    return BIG.replace({"faults": faults, "checkpoint": checkpoint or {"every_steps": 2}})


def refusal(*faults: dict[str, Any], **changes: Any) -> Incoherent:
    with pytest.raises(ValidationError) as caught:
        scenario(*faults, **changes)
    error = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(error, Incoherent)
    return error


@pytest.mark.parametrize(
    ("fault", "key", "told"),
    [
        (LOST | {"target": "actor.train[7]"}, "faults[0].target", "actor.train[2]"),
        (LOST | {"target": "actor.generate[0]"}, "faults[0].target", "critic.train[0]"),
        ({"kind": "node_lost", "at": 5, "target": "train/3"}, "faults[0].target", "serve/0"),
        ({"kind": "worker_lost", "at": 5, "target": "actor.generate[2]"}, "faults[0].target", "actor.generate[1]"),
        ({"kind": "link_degraded", "at": 5, "target": "wan a>b"}, "faults[0].target", "device train[0]"),
        ({"kind": "preempted", "at": 5, "target": "train/0"}, "faults[0].duration", "10 min"),
        (
            {"kind": "worker_lost", "at": 5, "target": "actor.generate[0]", "recovery": "redundant",
             "spare": "actor.generate[0]"}, "faults[0].spare", "actor.generate[1]",
        ),
        (
            {"kind": "worker_lost", "at": 5, "target": "actor.generate[0]", "recovery": "redundant",
             "spare": "actor.train[0]"}, "faults[0].spare", "actor.generate[1]",
        ),
    ],
)  # fmt: skip
def test_what_cannot_happen_is_refused_with_what_can(fault: dict[str, Any], key: str, told: str) -> None:
    error = refusal(fault)
    assert error.key == key and told in error.remedy


def test_a_trainer_is_not_lost_without_a_checkpoint_to_restart_from() -> None:
    assert refusal(LOST, checkpoint={"every_steps": None}).key == "checkpoint.every_steps"
    nothing = {"every_steps": 1, "keep": {"latest": 0, "best": 3, "recovery": False}}
    assert refusal(LOST, checkpoint=nothing).key == "checkpoint.keep.recovery"
    assert scenario(LOST, checkpoint={"every_steps": 1, "keep": {"latest": 0}}).faults[0].way_back


@pytest.mark.parametrize(
    ("fault", "key"),
    [
        (LOST | {"mtbf": "1 h"}, "at"),
        ({"kind": "trainer_lost", "target": "actor.train[0]"}, "at"),
        (LOST | {"recovery": "reassign"}, "recovery"),
        (LOST | {"target": None}, "target"),
        (LOST | {"spare": "actor.generate[1]"}, "spare"),
        ({"kind": "worker_lost", "mtbf": "1 h", "recovery": "redundant", "spare": "actor.generate[1]"}, "target"),
        ({"kind": "straggler", "at": 1, "target": "actor.train[0]", "factor": 0}, "factor"),
    ],
)
def test_an_entry_that_contradicts_itself_names_its_part(fault: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        scenario(fault)
    assert caught.value.errors()[0]["ctx"]["error"].path == (key,)


def test_a_chance_that_names_nothing_is_that_of_everyone() -> None:
    chosen = scenario({"kind": "trainer_lost", "mtbf": "10 h"}, {"kind": "node_lost", "mtbf": "10 h"})
    assert hit(chosen, chosen.faults[0]) == (*tuple(f"actor.train[{i}]" for i in range(3)), "critic.train[0]")
    assert hit(chosen, chosen.faults[1]) == ("serve/0", "train/0", "train/1")
    assert set(taken(chosen, "train/1")) == {"actor.train[2]", "critic.train[0]"}
    assert [rolls_back(chosen, "node_lost", machine) for machine in ("serve/0", "train/0")] == [False, True]
    assert {"spine a", "port train/2", "host serve[3]"} < set(targets(chosen, "link_degraded"))
