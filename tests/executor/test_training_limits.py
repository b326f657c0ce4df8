import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executor.limits import refuse
from executor.training_limits import limits
from lab.errors import InputError
from lab.scenario import Scenario

Make = Callable[..., Scenario]


@pytest.mark.parametrize(("changes", "key"), [
    ({"models": {"actor": {"lora": {"rank": 4}}}}, "models.actor.lora"),
    ({"update": {"pack": "packed"}}, "update.pack"),
    ({"update": {"pack": "shared"}}, "update.pack"),
])  # fmt: skip
def test_what_is_built_for_other_networks_is_refused(
    scenario: Make, tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt"}))
    data = scenario("quickstart").model_dump(mode="json", by_alias=True)
    actor = data["models"]["actor"] | {"weights": str(tmp_path)} | changes.get("models", {}).get("actor", {})
    update = data["update"] | changes.get("update", {})
    chosen = scenario("quickstart", models=data["models"] | {"actor": actor}, update=update)
    assert [found[0] for found in limits(chosen)] == [key]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert not list(limits(chosen))


@pytest.mark.parametrize(("changes", "key"), [
    ({"offload": "optimizer"}, "offload"),
    ({"tensor_parallel": 2}, "tensor_parallel"),
    ({"pipeline_parallel": 2}, "pipeline_parallel"),
    ({"context_parallel": 2}, "context_parallel"),
])  # fmt: skip
def test_ways_to_train_that_need_other_hardware_are_refused_by_name(
    scenario: Make, changes: dict[str, Any], key: str
) -> None:
    train = scenario("quickstart").model_dump(mode="json", by_alias=True)["place"]["actor.train"]
    with pytest.raises(InputError) as caught:
        refuse(scenario("quickstart", place={"actor.train": train | changes}))
    assert caught.value.key == f"place.actor.train.{key}"
