"""Which Ray node stands for which machine, and what is said where one is missing."""

from collections.abc import Callable
from typing import Any

import pytest

from executor import gang
from executor.gang import LABEL, RayNode
from lab.errors import InputError
from lab.scenario import Scenario

Make = Callable[..., Scenario]


def node(name: str, cpus: float, label: str | None = None, *, here: bool = False) -> RayNode:
    return RayNode(node_id=name, address=f"10.0.0.{name}", cpus=cpus, labels={LABEL: label} if label else {}, here=here)


def machine(name: str, devices: int) -> dict[str, Any]:
    return {"name": name, "count": 1, "device": "cpu-core", "devices": devices, "intra": "shared-memory"}


@pytest.fixture
def apart(scenario: Make) -> Scenario:
    """Engines on one machine, everything else on another."""
    return scenario(
        "quickstart",
        cluster={"sites": [{"nodes": [machine("serve", 1), machine("train", 2)]}]},
        pools={"all": "train[0:2]", "serve": "serve[0]"},
        sharing={"all": {"how": "resident"}, "serve": {"how": "exclusive"}},
        place={"actor.generate": [{"pool": "serve"}]},
    )


def test_this_machine_is_the_node_that_the_driver_is_on(scenario: Make) -> None:
    plan = gang.mapped(scenario("quickstart"), [node("1", 64), node("2", 2, here=True)])
    assert {machine: found.node_id for machine, found in plan.items()} == {"local/0": "2"}


def test_labels_keep_roles_apart(apart: Scenario) -> None:
    plan = gang.mapped(apart, [node("1", 64, "serve"), node("2", 64, "train")])
    assert {machine: found.node_id for machine, found in plan.items()} == {"serve/0": "1", "train/0": "2"}


def test_without_labels_the_larger_machine_gets_the_larger_node(apart: Scenario) -> None:
    plan = gang.mapped(apart, [node("1", 1), node("2", 2)])
    assert {machine: found.node_id for machine, found in plan.items()} == {"serve/0": "1", "train/0": "2"}


def test_too_few_cpus_name_who_needs_them_and_what_each_node_has(apart: Scenario) -> None:
    with pytest.raises(InputError) as caught:
        gang.mapped(apart, [node("1", 8, "serve"), node("2", 1, "train")])
    said = caught.value.problem
    assert caught.value.key == "pools"
    assert "actor.train[0]" in said and "need 2 CPUs on machine train/0" in said
    assert "10.0.0.1 (lab.node=serve) has 8 CPUs; 10.0.0.2 (lab.node=train) has 1 CPUs" in said


def test_a_label_that_nobody_has_is_named(apart: Scenario) -> None:
    with pytest.raises(InputError, match=r"no Ray node that is left has lab\.node=train") as caught:
        gang.mapped(apart, [node("1", 8, "serve"), node("2", 8, "trian")])
    assert caught.value.remedy == "start one with `ray start --labels lab.node=train`"


def test_a_machine_too_few_is_named(apart: Scenario) -> None:
    with pytest.raises(InputError, match="no Ray node is left for it"):
        gang.mapped(apart, [node("1", 8)])


def test_who_is_busy_is_told_by_node(apart: Scenario) -> None:
    plan = {"serve/0": node("1", 4), "train/0": node("2", 4)}
    said = gang.busy(apart, plan, {"1": 0.5, "2": 4.0}).problem
    assert said == "actor.generate[0] need 1 CPUs, and of the 4 of 10.0.0.1 0.5 are free"
