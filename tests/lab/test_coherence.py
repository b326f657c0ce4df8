"""Parallelism that cannot be is refused with the key to change."""

import copy
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lab.coherence import Incoherent
from lab.library import devices
from lab.load import load
from lab.model import Dtype
from lab.placement import BYTE_WIDE
from lab.scenario import Scenario

BIG = load("scenarios/ppo-7b-16gpu.yaml").model_dump(mode="json", by_alias=True)
QUICK = load("scenarios/quickstart.yaml").model_dump(mode="json", by_alias=True)
NODES = BIG["cluster"]["sites"][0]["nodes"]
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


def changed(data: dict[str, Any], **changes: Any) -> Scenario:
    return Scenario.model_validate(data | changes, strict=False)


def refused(data: dict[str, Any], **changes: Any) -> Incoherent:
    with pytest.raises(ValidationError) as caught:
        changed(data, **changes)
    wrong = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(wrong, Incoherent) and wrong.remedy
    return wrong


@given(st.sampled_from(["actor", "critic"]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 3, 4]), st.integers(1, 8))
def test_ranks_of_one_group_are_on_gpus_of_their_own(role: str, tensor: int, ranks: int, size: int) -> None:
    """A resident pool is shared between roles, not between the ranks of one."""
    key = f"{role}.train"
    train = BIG["place"][key] | {"pool": "here", "data_parallel": ranks, "tensor_parallel": tensor, "zero_stage": 1}
    changes = {
        "pools": BIG["pools"] | {"here": f"train[7:{7 + size}]", "spare": f"train[{7 + size}:16]"},
        "cluster": {"sites": [BIG["cluster"]["sites"][0] | {"nodes": [NODES[0] | {"count": 4}, NODES[1]]}]},
        "sharing": {"here": {"how": "resident"}},
        "place": BIG["place"] | {key: train},
    }
    if ranks * tensor <= size:
        used = [device for worker in changed(BIG, **changes).team(role, "train") for device in worker.devices]
        assert len(used) == len(set(used))
    elif ranks > 1:
        wrong = refused(BIG, **changes)
        assert wrong.key == f"place.{key}.data_parallel"
        assert f"need {ranks * tensor} GPUs, pool here has {size}" in wrong.problem
        assert size < tensor or f"set it to {size // tensor}" in wrong.remedy
    else:
        refused(BIG, **changes)


def test_ranks_may_share_cores() -> None:
    place = QUICK["place"] | {"actor.train": QUICK["place"]["actor.train"] | {"data_parallel": 4}}
    assert len(changed(QUICK, place=place).team("actor", "train")) == 4


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize("lora", [None, {"rank": 8}])
def test_weights_of_eight_bits_are_trained_only_below_adapters(role: str, dtype: str, lora: Any) -> None:
    models = BIG["models"] | {role: BIG["models"][role] | {"dtype": dtype, "lora": lora}}
    if dtype in BYTE_WIDE and lora is None:
        assert refused(BIG, models=models).key == f"models.{role}.dtype"
    else:
        assert changed(BIG, models=models).model(role).dtype == dtype


@pytest.mark.parametrize("role", ["reference", "reward"])
@pytest.mark.parametrize("dtype", BYTE_WIDE)
def test_frozen_weights_may_have_eight_bits(role: str, dtype: str) -> None:
    models = BIG["models"] | {role: BIG["models"][role] | {"dtype": dtype}}
    assert changed(BIG, models=models).team(role, "score")[0].dtype == dtype


@given(st.integers(1, 300))
def test_blocks_are_those_of_the_engine(size: int) -> None:
    """On GPUs multiples of 16; nowhere larger than the longest sequence, rounded up to a power of two."""
    rollout = BIG["rollout"] | {"block_tokens": size}
    if size % 16:
        wrong = refused(BIG, rollout=rollout)
        assert wrong.key == "rollout.block_tokens" and wrong.remedy == f"set it to {size + 16 - size % 16}"
    else:
        assert changed(BIG, rollout=rollout)
    longest = changed(QUICK).workload.max_sequence_tokens
    rollout = QUICK["rollout"] | {"block_tokens": size}
    if size >= 2 * longest:
        assert f"the longest sequence has {longest}" in refused(QUICK, rollout=rollout).problem
    elif size <= longest:
        assert changed(QUICK, rollout=rollout)


OLD = [name for name, entry in devices().items() if entry.kind == "gpu" and "bfloat16" not in entry.flops]
HALF = {role: model | {"dtype": "float16"} for role, model in BIG["models"].items() if model}


def on(name: str) -> dict[str, Any]:
    return {"sites": [BIG["cluster"]["sites"][0] | {"nodes": [node | {"device": name} for node in NODES]}]}


@pytest.mark.parametrize("name", devices())
def test_a_gpu_without_bfloat16_is_not_given_it(name: str) -> None:
    if name not in OLD:
        assert changed(BIG, cluster=on(name))
        return
    assert changed(BIG, cluster=on(name), models=HALF).team("actor", "generate")[0].kv_dtype == "float16"
    for role in HALF:
        wrong = refused(BIG, cluster=on(name), models=HALF | {role: HALF[role] | {"dtype": "bfloat16"}})
        assert wrong.key == f"models.{role}.dtype" and "float16" in wrong.remedy and name in wrong.problem


@pytest.mark.parametrize("part", [
    "actor.generate[0].dtype", "actor.generate[0].kv_dtype", "reference.score.dtype", "reward.score.dtype"
])  # fmt: skip
def test_bfloat16_of_a_placement_is_refused_there(part: str) -> None:
    where, name = part.rsplit(".", 1)
    place = copy.deepcopy(BIG["place"])
    found = place[where.removesuffix("[0]")]
    (found[0] if where.endswith("[0]") else found)[name] = "bfloat16"
    assert refused(BIG, cluster=on(OLD[0]), models=HALF, place=place).key == f"place.{part}"


@pytest.mark.parametrize("dtype", BYTE_WIDE)
def test_what_is_kept_beside_weights_of_eight_bits_suits_the_device(dtype: str) -> None:
    models = HALF | {role: HALF[role] | {"dtype": dtype, "lora": {"rank": 8}} for role in ("actor", "critic")}
    assert changed(BIG, models=models).team("actor", "generate")[0].kv_dtype == "bfloat16"
    for name in OLD:
        assert changed(BIG, models=models, cluster=on(name)).team("actor", "generate")[0].kv_dtype == "float16"


def test_kto_needs_responses_of_other_prompts_in_a_mini_batch() -> None:
    data = load("scenarios/kto-7b.yaml").model_dump(mode="json", by_alias=True)
    each = data["update"]["minibatch_samples"]
    alone = {"workload": data["workload"] | {"samples_per_prompt": each, "prompts_per_step": 2}}
    wrong = refused(data, **alone)
    assert wrong.key == "update.minibatch_samples" and f"{2 * each}" in str(wrong.remedy)
    assert changed(data, **alone, algorithm={"name": "kto", "kl": "none"}).algorithm.extra_forwards == 0
