"""Parallelism that cannot be is refused with the key to change."""

from typing import Any

import pytest
from pydantic import ValidationError

from lab.load import load
from lab.scenario import Scenario

BIG = load("scenarios/ppo-7b-16gpu.yaml").model_dump(mode="json", by_alias=True)
ACTORS = {"pool": "actors", "data_parallel": 1}
ROLLOUT = {"pool": "rollout", "engines": 1}
MOE = {"models": BIG["models"] | {"actor": {"arch": "qwen3-30b-a3b"}}}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tensor": ({"place": {"actor.train": ACTORS | {"tensor_parallel": 3}}}, "3 does not divide the 28 heads"),
    "pipeline": ({"place": {"actor.train": ACTORS | {"pipeline_parallel": 3}}}, "3 does not divide the 28 layers"),
    "copies": ({"place": {"actor.generate": [ROLLOUT | {"data_parallel": 2}]}}, "the model has none"),
    "experts": ({"place": {"actor.train": ACTORS | {"expert_parallel": 2}}}, "no experts"),
    "ranks": (MOE | {"place": {"actor.generate": [ROLLOUT | {"expert_parallel": 2}]}}, "the 1 ranks that may share"),
    "number": (
        MOE | {"place": {"actor.train": ACTORS | {"data_parallel": 6, "expert_parallel": 6}}},
        "6 does not divide 128 experts",
    ),
    "zero": (
        {"place": {"actor.train": ACTORS | {"pipeline_parallel": 2, "zero_stage": 2}}},
        "gradients cannot be sharded",
    ),
    "devices": ({"place": {"actor.train": ACTORS | {"context_parallel": 8}}}, "need 8 devices"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_divide_is_refused(name: str) -> None:
    changes, words = REFUSED[name]
    place = BIG["place"] | changes.get("place", {})
    with pytest.raises(ValidationError, match=words):
        Scenario.model_validate(BIG | changes | {"place": place}, strict=False)


def test_parallelism_multiplies_to_a_workers_devices() -> None:
    train = {"pool": "actors", "tensor_parallel": 1, "pipeline_parallel": 2, "context_parallel": 3}
    data = BIG | {"place": BIG["place"] | {"actor.train": train}}
    worker = Scenario.model_validate(data, strict=False).team("actor", "train")[0]
    assert len(worker.devices) == worker.parallelism.devices == 6
