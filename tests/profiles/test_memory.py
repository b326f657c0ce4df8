"""Memory as laws: what ZeRO, offload, recomputation and tensor parallelism must do to it."""

import itertools
from pathlib import Path

import pytest

from lab.load import parse
from profiles.memory import device_bytes, kv_blocks, kv_bytes, peaks

BIG = Path("scenarios/ppo-7b-16gpu.yaml").read_text()
ACTOR = "actor.train: {pool: actors, data_parallel: 3, tensor_parallel: 2, zero_stage: 2}"


def trained(text: str, role: str = "actor") -> float:
    scenario = parse(text)
    return device_bytes(scenario, scenario.team(role, "train")[0])


def test_zero_divides_states_then_gradients_then_weights() -> None:
    parameters = parse(BIG).spec("actor").parameters / 2
    by_stage = [
        trained(BIG.replace(ACTOR, ACTOR.replace("zero_stage: 2", f"zero_stage: {stage}"))) for stage in range(4)
    ]
    drops = [before - after for before, after in itertools.pairwise(by_stage)]
    assert drops == pytest.approx([parameters * 12 * 2 / 3, parameters * 2 * 2 / 3, parameters * 2 * 2 / 3])


def test_a_critic_of_seven_billion_parameters_fits_only_with_its_optimizer_offloaded() -> None:
    assert peaks(parse(BIG))["critic"]["fits"]
    without = peaks(parse(BIG.replace(", offload: optimizer", "")))["critic"]
    assert not without["fits"] and without["peak_bytes"] > 16 * 7.6e9


def test_recomputation_saves_activations() -> None:
    assert trained(BIG) < trained(BIG.replace("recompute: full", "recompute: none"))


def test_kv_is_what_the_fraction_leaves_and_the_pool_never_exceeds_it() -> None:
    scenario = parse(BIG)
    engine = scenario.team("actor", "generate")[0]
    device = peaks(scenario)["rollout"]
    assert device["peak_bytes"] <= 0.9 * device["capacity_bytes"]
    per_block = 16 * scenario.spec("actor").kv_bytes_per_token("bfloat16")
    assert kv_blocks(scenario, engine) == int(kv_bytes(scenario, engine) // per_block)
    fixed = parse(BIG.replace("kv_memory_fraction: 0.9", "kv_memory_fraction: 0.9, kv_bytes: 1 GB"))
    assert kv_bytes(fixed, engine) == 1e9


def test_workers_that_share_a_device_add_up() -> None:
    scenario = parse(Path("scenarios/quickstart.yaml").read_text())
    total = sum(device_bytes(scenario, worker) for worker in scenario.workers.values() if "local[0]" in worker.devices)
    assert peaks(scenario)["all"]["peak_bytes"] >= total / 2 > 0
