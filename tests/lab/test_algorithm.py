"""What each algorithm needs, trains and leaves alone, and what is refused of it by name."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from lab.algorithm import Algorithm
from lab.coherence import Incoherent
from lab.load import load
from lab.scenario import Scenario
from lab.wiring import build

ALGORITHM: TypeAdapter[Any] = TypeAdapter(Algorithm)


def algorithm(name: str, **settings: Any) -> Any:
    return ALGORITHM.validate_python({"name": name} | settings)


def changed(base: str, **changes: Any) -> Scenario:
    return load(f"scenarios/{base}.yaml").replace(changes)


@pytest.mark.parametrize(
    ("said", "roles", "trains"),
    [
        (algorithm("ppo"), {"actor", "critic", "reward", "reference"}, ("actor", "critic")),
        (algorithm("grpo", kl_coef=0.0), {"actor", "reward"}, ("actor",)),
        (algorithm("dpo"), {"actor", "reference"}, ("actor",)),
        (algorithm("dpo", online=True), {"actor", "reference", "reward"}, ("actor",)),
        (algorithm("kto"), {"actor", "reference"}, ("actor",)),
        (algorithm("sft"), {"actor"}, ("actor",)),
        (algorithm("reward_model"), {"reward"}, ("reward",)),
    ],
)
def test_roles(said: Any, roles: set[str], trains: tuple[str, ...]) -> None:
    assert set(said.roles) == roles and said.trains == trains
    assert said.rolls_out == (said.name in ("ppo", "grpo") or getattr(said, "online", False))


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("sft-7b", ["update_actor", "checkpoint", "evaluate"]),
        ("reward-model-7b", ["update_critic", "checkpoint", "evaluate"]),
        ("dpo-7b", ["reference", "update_actor", "checkpoint"]),
        ("kto-7b", ["reference", "update_actor", "checkpoint"]),
    ],
)
def test_stages_without_a_rollout(name: str, stages: list[str]) -> None:
    assert list(build(load(f"scenarios/{name}.yaml")).nodes) == stages


def test_what_an_algorithm_has_no_use_for_is_left_alone() -> None:
    """A whole PPO scenario is also one of supervised tuning: engines, critic, reference and reward have no workers."""
    data = load("scenarios/ppo-7b-16gpu.yaml").model_dump(mode="json", by_alias=True)
    chosen = changed("ppo-7b-16gpu", algorithm={"name": "sft"}, workload=data["workload"] | {"samples_per_prompt": 1})
    assert {worker.split("[")[0] for worker in chosen.workers} == {"actor.train"}


PAIR = {"minibatch_samples": 192, "microbatch_tokens": 8192}


@pytest.mark.parametrize(
    ("base", "changes", "key"),
    [
        ("sft-7b", {"place": {}}, "place.actor.train"),
        ("quickstart", {"place": {"actor.train": {"pool": "all"}}}, "place.reward.score"),
        ("reward-model-7b", {"models": {"actor": {"arch": "qwen2.5-7b"}}}, "models.reward"),
        ("dpo-7b", {"algorithm": {"name": "dpo", "online": True}}, "place.reward.score"),
        ("ppo-7b-16gpu", {"models": "lora"}, "models.reward.lora"),
        ("dpo-7b", {"schedule": {"mode": "asynchronous"}}, "schedule.mode"),
        ("dpo-7b", {"schedule": {"scoring": "sample"}}, "schedule.scoring"),
        ("sft-7b", {"sampling": {"best_of": 4}}, "sampling.best_of"),
        ("dpo-7b", {"update": PAIR | {"microbatch_tokens": 4000}}, "update.microbatch_tokens"),
        ("dpo-7b", {"update": PAIR | {"microbatch_samples": 1}}, "update.microbatch_samples"),
        ("dpo-7b", {"update": PAIR | {"minibatch_samples": 6}}, "place.actor.train.data_parallel"),
        ("dpo-7b", {"workload": 3}, "workload.samples_per_prompt"),
    ],
)
def test_what_does_not_go_together_is_refused_by_the_key_to_change(
    base: str, changes: dict[str, Any], key: str
) -> None:
    data = load(f"scenarios/{base}.yaml").model_dump(mode="json", by_alias=True)
    if changes.get("models") == "lora":
        changes = {"models": data["models"] | {"reward": {"arch": "qwen2.5-7b", "lora": {"rank": 8}}}}
    if "workload" in changes:
        changes = {"workload": data["workload"] | {"samples_per_prompt": changes["workload"]}}
    with pytest.raises(ValidationError) as caught:
        changed(base, **changes)
    cause = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(cause, Incoherent) and cause.key == key
    assert cause.remedy
