"""Ways of weights that engines which take turns cannot go, refused by name."""

from collections.abc import Callable
from typing import Any

import pytest

from executor.weight_limits import limits
from lab.scenario import Scenario

Make = Callable[..., Scenario]
FETCHES: list[dict[str, Any]] = [{"trigger": "event"}, {"trigger": "pull", "every": 1.0, "transport": "store"}]
PUSHES: list[dict[str, Any]] = [{}, {"payload": "int8"}, {"topology": "tree"}, {"topology": "flat"}]


@pytest.mark.parametrize("sync", FETCHES)
def test_who_is_not_there_cannot_fetch(scenario: Make, sync: dict[str, Any]) -> None:
    assert [key for key, _, _ in limits(scenario("colocated-tiny", weight_sync=sync))] == ["weight_sync.trigger"]
    assert not list(limits(scenario("quickstart", weight_sync=sync)))


@pytest.mark.parametrize("sync", PUSHES)
def test_a_push_reaches_everybody(scenario: Make, sync: dict[str, Any]) -> None:
    assert not list(limits(scenario("colocated-tiny", weight_sync=sync)))
