"""Parallelism, experts, adapters and narrow dtypes: where they change time, and by how much."""

from typing import Any

import pytest

from lab.load import load
from lab.lora import Lora
from lab.scenario import Scenario
from profiles.cost import CostModel
from profiles.layout import Layout
from profiles.profile import datasheet
from profiles.roofline import CPU_ADAM_S, PASS_S

BIG = load("scenarios/ppo-7b-16gpu.yaml")
SHEET = {"a100-80g-sxm": datasheet("a100-80g-sxm")}
PASS = {"passes": 1.0, "tokens": 16384.0, "linear_flops": 2e14, "attention_flops": 1e13}
MOE = {"actor": {"arch": "qwen3-30b-a3b"}}


def made(part: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    """The large scenario on one machine of eight devices for the trainer, with changes of `place.actor.train`."""
    data = BIG.model_dump(mode="json", by_alias=True)
    data["cluster"]["sites"][0]["nodes"][0] |= {"count": 2, "devices": 8}
    data["pools"] = {"actors": "train[0:8]", "critic": "train[8]", "reference": "serve[0]", "reward": "serve[1]"}
    data["pools"]["rollout"] = "serve[2:4]"
    train = {"pool": "actors", "data_parallel": 1, "tensor_parallel": 1, "zero_stage": 0}
    data["place"] |= {"actor.train": train | (part or {})}
    data["place"]["actor.generate"] = [{"pool": "rollout"} | changes.pop("generate", {})]
    merged = {key: data[key] | value for key, value in changes.items()}
    return BIG.replace(data | merged)


def cost(scenario: Scenario, op: str, q: dict[str, float], team: tuple[str, str] = ("actor", "train")) -> float:
    return CostModel(scenario, SHEET).op(scenario.team(*team)[0], op, q).seconds


@pytest.mark.parametrize("way", ["tensor_parallel", "pipeline_parallel", "context_parallel"])
def test_more_devices_shorten_a_pass_and_never_to_less_than_their_share(way: str) -> None:
    alone = cost(made(), "forward", PASS)
    spread = {n: cost(made({way: n}), "forward", PASS) for n in (2, 4)}
    assert alone > spread[2] > spread[4]
    assert all(seconds >= alone / n * 0.97 for n, seconds in spread.items()), "only kernel launches may scale better"


def test_backward_and_recomputation_repeat_the_collectives_once_each() -> None:
    def talk(op: str, recompute: str) -> float:
        """Free products leave launches and collectives; launches are those of the unspread worker."""
        free = PASS | {"linear_flops": 0.0, "attention_flops": 0.0}
        scenario = made({"tensor_parallel": 2}, update={"recompute": recompute})
        return cost(scenario, op, free) - cost(made(update={"recompute": recompute}), op, free)

    assert talk("backward", "none") == pytest.approx(talk("forward", "none"))
    assert talk("backward", "full") == pytest.approx(2 * talk("forward", "none"))


def test_a_pipeline_hands_its_activations_on() -> None:
    scenario = made({"pipeline_parallel": 2})
    layout = Layout(scenario, scenario.team("actor", "train")[0])
    assert layout.stages.ranks == 2 and layout.tensor.ranks == 1
    free = PASS | {"linear_flops": 0.0, "attention_flops": 0.0}
    row = 16384 * scenario.spec("actor").hidden * 2
    hop = layout.intra("train[0]").latency + row / layout.intra("train[0]").bandwidth
    layers = cost(made(), "forward", free) - PASS_S["gpu"]
    assert cost(scenario, "forward", free) == pytest.approx(layers / 2 + PASS_S["gpu"] + hop)


def test_experts_shared_by_ranks_move_tokens_and_hold_fewer_parameters() -> None:
    apart = made({"data_parallel": 8}, models=MOE)
    shared = made({"data_parallel": 8, "expert_parallel": 8}, models=MOE)
    assert cost(shared, "forward", PASS) > cost(apart, "forward", PASS)
    step = {"passes": 1.0, "parameters": float(apart.spec("actor").parameters)}
    assert cost(shared, "optimizer", step) < 0.25 * cost(apart, "optimizer", step)
    layouts = [Layout(s, s.team("actor", "train")[0]) for s in (apart, shared)]
    assert layouts[0].share == pytest.approx(1)
    sparse = apart.spec("actor").expert_parameters / apart.spec("actor").parameters
    assert layouts[1].share == pytest.approx(1 - sparse + sparse / 8)
    assert (layouts[1].experts.ranks, layouts[1].expert_gradients.ranks) == (8, 1)


def test_a_small_pass_takes_as_long_as_launching_its_kernels() -> None:
    few = PASS | {"tokens": 64.0, "linear_flops": 1e12, "attention_flops": 1e10}
    assert cost(made(), "forward", few) == pytest.approx(28 * 1.5e-3 + PASS_S["gpu"])
    assert cost(made(), "backward", few) == pytest.approx(2 * (28 * 1.5e-3 + PASS_S["gpu"])), (
        "layers are launched again to recompute"
    )


def test_products_with_routed_experts_run_at_a_rate_of_their_own() -> None:
    """Times of both parts at their own efficiency add up."""
    scenario = made(models=MOE)
    spec = scenario.spec("actor")
    work = PASS | {"linear_flops": spec.linear_flops(1e5, head_tokens=0), "attention_flops": 0.0}
    routed = 2e5 * spec.expert_parameters * spec.moe.experts_per_token / spec.moe.num_experts
    parts = (work["linear_flops"] - routed) / (312e12 * 0.45) + routed / (312e12 * 0.2)
    assert cost(scenario, "forward", work) == pytest.approx(parts)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradient_sync_by_zero_stage(stage: int) -> None:
    """A reduce-scatter moves half of what an all-reduce does; stages 1 and 2 gather the weights on top."""
    size = {"calls": 1.0, "bytes": 15e9, "ranks": 8.0}
    found = cost(made({"data_parallel": 8, "zero_stage": stage}), "grad_sync", size)
    whole = 2 * 7 / 8 * 15e9 / (300e9 * 0.8)
    assert found == pytest.approx(whole / (2 if stage == 3 else 1), rel=0.01)


def test_gradients_hide_behind_the_backward_pass_but_for_the_last_bucket() -> None:
    scenario = made({"data_parallel": 8})
    size = {"calls": 1.0, "bytes": 15e9, "ranks": 8.0}
    whole = cost(scenario, "grad_sync", size)
    assert cost(scenario, "grad_sync", size | {"beside_s": whole / 2}) == pytest.approx(whole / 2)
    assert cost(scenario, "grad_sync", size | {"beside_s": 10.0}) == pytest.approx(whole * 25e6 / 15e9)


def test_after_a_sharded_step_the_gathering_of_weights_is_not_hidden() -> None:
    size = {"calls": 1.0, "bytes": 15e9, "ranks": 8.0, "beside_s": 10.0}
    gathering = 7 / 8 * 15e9 / (300e9 * 0.8)
    assert cost(made({"data_parallel": 8, "zero_stage": 1}), "grad_sync", size) == pytest.approx(gathering, rel=0.01)


def test_weights_gathered_for_zero_3_hide_behind_the_pass() -> None:
    whole = cost(made({"data_parallel": 8, "zero_stage": 2}), "forward", PASS)
    gathered = cost(made({"data_parallel": 8, "zero_stage": 3}), "forward", PASS)
    assert whole < gathered < 1.02 * whole
    free = PASS | {"linear_flops": 0.0, "attention_flops": 0.0}
    weights = 7 / 8 * made().spec("actor").weight_bytes("bfloat16") / (300e9 * 0.8)
    assert cost(made({"data_parallel": 8, "zero_stage": 3}), "forward", free) >= weights


def test_narrow_weights_score_and_roll_out_faster() -> None:
    whole = made()
    place = whole.model_dump(mode="json", by_alias=True)["place"]
    narrow = whole.replace({"place": place | {"reference.score": {"pool": "reference", "dtype": "int8"}}})
    team = ("reference", "score")
    assert cost(narrow, "logprob", PASS, team) < 0.6 * cost(whole, "logprob", PASS, team)
    step = {"sequences": 8.0, "tokens": 8.0, "linear_flops": 0.0, "attention_flops": 1e9, "kv_bytes": 1e9}
    team = ("actor", "generate")
    assert cost(made(generate={"dtype": "int8"}), "engine_step", step, team) < 0.7 * cost(
        whole, "engine_step", step, team
    )


def test_adapters_spare_the_gradients_of_frozen_weights() -> None:
    whole, lora = made(), made(models={"actor": {"arch": "qwen2.5-7b", "lora": {"rank": 16}}})
    forward, backward = (cost(lora, op, PASS) / cost(whole, op, PASS) for op in ("forward", "backward"))
    assert 1.0 < forward < 1.02
    assert 0.6 < backward < 0.75, "with recomputation: two of three products are left"
    assert lora.trainable_parameters("actor") == Lora(rank=16).parameters(lora.spec("actor"))
    assert lora.trainable_parameters("critic") == lora.spec("critic").parameters


def test_adapter_parameters_are_their_closed_form() -> None:
    """LoRA of rank 16 on all seven matrices of Llama 3 8B has 41.9 million parameters."""
    from lab.library import model

    spec = model("llama-3-8b")
    q, kv, mlp = 4096 + 4096, 4096 + 1024, 4096 + 14336
    assert Lora(rank=16).parameters(spec) == 32 * 16 * (2 * q + 2 * kv + 3 * mlp) == 41_943_040


def test_moves_of_weights_and_states() -> None:
    scenario = made({"tensor_parallel": 2})
    size = {"calls": 1.0, "bytes": 1e9}
    names = ("host_copy", "reshard", "convert", "weight_sync", "checkpoint", "checkpoint_read")
    found = {op: cost(scenario, op, size) for op in names}
    assert found["reshard"] == pytest.approx(0.5e9 / 240e9, rel=0.01)
    assert found["host_copy"] == pytest.approx(0.5e9 / 25.6e9, rel=0.01)
    assert found["checkpoint"] == pytest.approx(0.2) == found["checkpoint_read"]
    assert cost(made(), "reshard", size) == 0.0
    sleep, wake, reload, start = (
        cost(scenario, f"engine_{name}", size, ("actor", "generate")) for name in ("sleep", "wake", "reload", "start")
    )
    assert sleep == wake < reload < start


def test_an_op_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="lunch"):
        cost(made(), "lunch", PASS)


def test_a_weight_sync_pays_for_every_tensor_beside_its_bytes() -> None:
    """Qwen2.5 7B: 28 layers of 4 + 3 matrices, 3 biases and 2 norms; embeddings, head and the last norm."""
    small = cost(made(), "weight_sync", {"calls": 1.0, "bytes": 1.0})
    assert small == pytest.approx(5e-4 * (28 * 12 + 3), rel=0.01)
    large = cost(made(), "weight_sync", {"calls": 1.0, "bytes": 15e9})
    assert large > small + 15e9 / 600e9


def test_ranks_of_one_host_share_its_memory_when_adam_runs_there() -> None:
    """All states of a host are read and written by its own CPUs, however many ranks they belong to."""
    seconds = {}
    for ranks in (1, 2, 4):
        place = BIG.place.model_dump(mode="json", by_alias=True)
        place["actor.train"] |= {"data_parallel": ranks, "tensor_parallel": 1, "zero_stage": 2, "offload": "optimizer"}
        chosen = BIG.replace({"place": place})
        parameters = float(chosen.trainable_parameters("actor"))
        model, worker = CostModel(chosen, SHEET), chosen.team("actor", "train")[0]
        seconds[ranks] = model.op(worker, "optimizer", {"passes": 1.0, "parameters": parameters}).seconds
        assert seconds[ranks] > parameters * CPU_ADAM_S
    assert seconds[1] > seconds[2] > seconds[4], "only the copies over PCIe are shared out"
