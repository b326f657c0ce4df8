"""What the driver does for algorithms without a rollout."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.datasets import Dataset
from executor.ledger import finishes
from executor.offline import Reading, scored
from lab.load import load
from lab.scenario import Scenario
from lab.wiring import build

Make = Callable[..., Scenario]
ENDS = {
    "sft-7b": "update_actor", "reward-model-7b": "update_critic", "dpo-7b": "update_actor", "kto-7b": "update_actor",
    "quickstart": "weight_sync", "ppo-tiny": "weight_sync",
}  # fmt: skip


@pytest.mark.parametrize(("name", "stage"), ENDS.items())
def test_a_step_ends_when_weights_are_published_or_trained(name: str, stage: str) -> None:
    assert finishes(build(load(Path("scenarios") / f"{name}.yaml"))) == stage


def tiny() -> Scenario:
    lengths = {"prompt_tokens": {"dist": "fixed", "value": 8}, "response_tokens": {"dist": "fixed", "value": 6}}
    workload = {"prompts_per_step": 4, "samples_per_prompt": 2} | lengths
    update = {"minibatch_samples": 8, "microbatch_tokens": 64}
    chosen = load(Path("scenarios") / "dpo-7b.yaml")
    train = {"pool": "train", "data_parallel": 4, "zero_stage": 3}
    place = chosen.model_dump(mode="json", by_alias=True)["place"] | {"actor.train": train}
    return chosen.replace({"workload": workload, "update": update, "place": place, "num_steps": 3})


def test_what_several_scorers_say_is_put_beside_the_samples() -> None:
    samples = Dataset(tiny()).batch(0)

    async def said(column: dict[str, Any]) -> dict[str, Any]:
        return column

    async def whole() -> Any:
        parts = [
            said({"rewards": np.arange(8.0)}),
            said({"a": {i: i for i in range(4)}}),
            said({"a": {4: 4, 5: 5, 6: 6, 7: 7}}),
        ]
        return await scored(samples, parts)

    found = asyncio.run(whole())
    assert found.columns["a"] == list(range(8))
    assert found.columns["rewards"].tolist() == list(range(8))
    assert found.tokens is samples.tokens


@pytest.mark.real
def test_steps_are_read_ahead_and_let_go(local_ray: None) -> None:
    import ray

    reading = Reading(tiny())
    first = reading.reference(0)
    reading.ahead(0)
    assert reading.reference(0) == first
    assert ray.get(reading.reference(1)).step == 1
    samples = reading.trained(0)
    assert [row.tolist() for row in samples.tokens] == [row.tolist() for row in ray.get(first).tokens]
    reading.ahead(2)  # there is no step after the last
    with pytest.raises(KeyError):
        reading.trained(3)
