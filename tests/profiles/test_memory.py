"""A scenario's memory: which workers share a device, what adds up, and when it does not fit."""

import itertools
from pathlib import Path

import pytest

from lab.library import device as library_device
from lab.load import parse
from profiles.footprint import Footprint
from profiles.memory import (
    crowded,
    device_bytes,
    kv_blocks,
    kv_bytes,
    peaks,
    pools,
    roomier,
    together,
    worker_footprint,
)

BIG = Path("scenarios/ppo-7b-16gpu.yaml").read_text()
ACTOR = "actor.train: {pool: actors, data_parallel: 3, tensor_parallel: 2, zero_stage: 2}"


def trained(text: str, role: str = "actor") -> Footprint:
    scenario = parse(text)
    return worker_footprint(scenario, scenario.team(role, "train")[0])


def test_zero_divides_states_then_gradients_then_weights() -> None:
    parameters = parse(BIG).spec("actor").parameters / 2
    names = ("weights", "gradients", "optimizer states", "fp32 masters")
    by_stage = [
        sum(
            trained(BIG.replace(ACTOR, ACTOR.replace("zero_stage: 2", f"zero_stage: {stage}"))).resident[n]
            for n in names
        )
        for stage in range(4)
    ]
    drops = [before - after for before, after in itertools.pairwise(by_stage)]
    assert drops == pytest.approx([parameters * 12 * 2 / 3, parameters * 2 * 2 / 3, parameters * 2 * 2 / 3])


def test_a_critic_of_seven_billion_parameters_fits_only_with_its_optimizer_offloaded() -> None:
    assert peaks(parse(BIG))["critic"]["fits"]
    without = peaks(parse(BIG.replace(", offload: optimizer", "")))["critic"]
    assert not without["fits"] and without["peak_bytes"] > 16 * 7.6e9


def test_recomputation_saves_activations() -> None:
    assert trained(BIG).peak_bytes < trained(BIG.replace("recompute: full", "recompute: none")).peak_bytes


def test_kv_is_what_the_fraction_leaves_and_the_pool_never_exceeds_it() -> None:
    scenario = parse(BIG)
    engine = scenario.team("actor", "generate")[0]
    device = peaks(scenario)["rollout"]
    assert 0.89 * device["capacity_bytes"] < device["peak_bytes"] <= 0.9 * device["capacity_bytes"]
    per_block = 16 * scenario.spec("actor").kv_bytes_per_token("bfloat16")
    assert kv_blocks(scenario, engine) * per_block == kv_bytes(scenario, engine)
    fixed = parse(BIG.replace("kv_memory_fraction: 0.9", "kv_memory_fraction: 0.9, kv_bytes: 1 GB"))
    assert kv_blocks(fixed, engine) == int(1e9 // per_block)


def test_an_engine_that_cannot_hold_the_longest_sequence_does_not_fit() -> None:
    small = parse(BIG.replace("kv_memory_fraction: 0.9", "kv_memory_fraction: 0.9, kv_bytes: 1 MB"))
    found = pools(small)["rollout"]
    assert found.peak_bytes < found.capacity_bytes and not found.fits and "longest sequence" in found.short


def test_workers_that_share_a_device_add_up() -> None:
    scenario = parse(Path("scenarios/quickstart.yaml").read_text())
    for pool in pools(scenario).values():
        on_it = [worker for worker in scenario.workers.values() if pool.device in worker.devices]
        assert pool.peak_bytes == pytest.approx(sum(device_bytes(scenario, worker) for worker in on_it))


def test_in_time_slices_the_largest_counts_and_never_more_than_all() -> None:
    for name in ("minimal-8gpu", "ppo-tiny", "quickstart", "ppo-7b-16gpu"):
        for pool in pools(parse(Path(f"scenarios/{name}.yaml").read_text())).values():
            assert pool.sum_bytes >= pool.largest_bytes == together("time_sliced", pool.workers)
            assert sum(size for _, _, size in pool.consumers) == pytest.approx(pool.sum_bytes)


def test_a_reward_function_takes_no_memory() -> None:
    scenario = parse(Path("scenarios/quickstart.yaml").read_text())
    assert device_bytes(scenario, scenario.team("reward", "score")[0]) == 0


def test_the_capacity_is_what_the_driver_leaves() -> None:
    kind = library_device("a100-80g-sxm")
    assert kind.usable_bytes is not None
    assert peaks(parse(BIG))["rollout"]["capacity_bytes"] == kind.usable_bytes < kind.memory_bytes


def test_offloaded_states_take_host_memory() -> None:
    """Sixteen bytes per parameter in all, whatever ZeRO divides them by: fp32 masters, two moments, fp32 gradients."""
    scenario = parse(BIG)
    parameters = scenario.spec("critic").parameters
    found = pools(scenario)
    assert found["critic"].host_bytes == pytest.approx(16 * parameters, rel=0.01)
    assert all(pool.host_bytes == 0 for name, pool in found.items() if name != "critic")


def test_weights_that_leave_no_room_are_called_that() -> None:
    small = parse(BIG.replace("a100-80g-sxm", "rtx-4090").replace("qwen2.5-7b", "qwen2.5-14b"))
    engine = small.team("actor", "generate")[0]
    text, remedy = crowded(small, engine), roomier(small, engine)
    weights = worker_footprint(small, engine).resident["weights"]
    assert f"weights take {weights / 1e9:.1f} GB" in text and "no room" in text
    assert "tensor_parallel above 1" in remedy and "dtype: fp8" in remedy
    assert pools(small)["rollout"].short == text
    assert not crowded(parse(BIG), parse(BIG).team("actor", "generate")[0])
