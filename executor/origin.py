"""Where the first weights of a role come from."""

from __future__ import annotations

from typing import NamedTuple

from lab.model import ModelSpec
from lab.scenario import Scenario


class Origin(NamedTuple):
    """Enough to build a network; the same in every process."""

    spec: ModelSpec
    seed: int
    weights: str
    """random, or a folder"""


def origin(scenario: Scenario, role: str) -> Origin:
    """The role's own weights, or through `like` those of another role.

    A role with an `arch` of its own gets a seed of its own: a reward model does not start as a copy of the actor.
    """
    model, root = scenario.model(role), role
    while model.weights == "random" and model.like is not None:
        root = model.like
        model = scenario.model(root)
    seeds = {"actor": 0, "critic": 1, "reference": 2, "reward": 3}
    return Origin(scenario.spec(role), scenario.seed + 1_000_003 * seeds[root], model.weights)
