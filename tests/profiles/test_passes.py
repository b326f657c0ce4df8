"""Passes from kernels: laws of their parts, and what lies below and above them."""

import pytest

from profiles import passes, roofline
from profiles.passes import GRADIENT_BYTES, SUSTAINED, PassTable
from profiles.profile import find
from simulator.studies.training import Trainer

H100 = "h100-80g-sxm"


def trainer(**changes: object) -> Trainer:
    return Trainer(**{"arch": "qwen3-4b", "device": H100, "ranks": 8} | changes)  # type: ignore[arg-type]


def table(one: Trainer) -> PassTable:
    from profiles.tables import kernels_of

    worker = one.scenario.team(one.role, "train")[0]
    kernels = kernels_of(find(one.device))
    assert kernels is not None
    return passes.table(one.costs.layout(worker), kernels)


def quantities(one: Trainer, length: int, num_samples: int = 1) -> dict[str, float]:
    from lab.measurement import pass_quantities

    return pass_quantities(one.scenario.spec(one.role), one.role, num_samples, length, one.zero_stage)


def test_no_pass_is_quicker_than_its_arithmetic_at_the_peak() -> None:
    one = trainer()
    q = quantities(one, 4096)
    peak = 989e12
    assert table(one).work("forward", q) > (q["linear_flops"] + q["attention_flops"]) / peak
    assert table(one).work("backward", q) > 3 * q["linear_flops"] / peak, "recomputed"


def test_a_full_gpu_reaches_about_half_of_its_peak_as_trainers_publish() -> None:
    """Model FLOPs over time: 38-52 % (Llama 3 report 2024; Narayanan et al. 2021), here of an 8B model."""
    one = trainer(arch="llama-3.1-8b", recompute=False)
    q = quantities(one, 4096)
    seconds = table(one).work("forward", q) + table(one).work("backward", q)
    assert 0.38 < 3 * q["linear_flops"] / seconds / 989e12 < 0.62


def test_a_larger_pass_takes_less_for_each_token() -> None:
    one = trainer(arch="qwen2.5-0.5b")
    small, large = (table(one).work("forward", quantities(one, 512, n)) / n for n in (1, 16))
    assert large < small


def test_recomputing_adds_the_layers_but_not_the_head() -> None:
    with_it, without = (trainer(recompute=again) for again in (True, False))
    q = quantities(with_it, 4096)
    added = table(with_it).work("backward", q) - table(without).work("backward", q)
    assert 0 < added < table(with_it).work("forward", q)


def test_a_critic_has_no_logits() -> None:
    actor, critic = trainer(), trainer(role="critic")
    assert table(critic).work("forward", quantities(critic, 4096)) < table(actor).work(
        "forward", quantities(actor, 4096)
    )


def test_longer_sequences_cost_more_attention() -> None:
    one = trainer()
    apart, together = quantities(one, 1024, 8), quantities(one, 8192, 1)
    assert apart["tokens"] == together["tokens"]
    assert table(one).work("forward", apart) < table(one).work("forward", together)


def test_tensor_parallel_ranks_share_the_products() -> None:
    whole, halves = trainer(arch="qwen3-32b"), trainer(arch="qwen3-32b", tensor=2)
    q = quantities(whole, 4096)
    assert 1.6 < table(whole).work("forward", q) / table(halves).work("forward", q) < 2.05


def test_beyond_the_grid_times_grow_in_proportion() -> None:
    one = trainer()
    part = table(one)
    end = float(passes.GRID[-1])
    assert passes._at(part.products, 2 * end) == pytest.approx(2 * passes._at(part.products, end))


def test_a_short_pass_takes_what_its_launches_take() -> None:
    one = trainer(arch="qwen2.5-0.5b", ranks=1, zero_stage=0)
    worker = one.scenario.team("actor", "train")[0]
    seconds = one.costs.op(worker, "forward", quantities(one, 64)).seconds
    assert seconds == pytest.approx(roofline.launch_seconds(one.costs.layout(worker)))
    assert seconds == pytest.approx(24 * roofline.LAYER_PASS_S["gpu"] + roofline.PASS_S["gpu"])


def test_routed_experts_and_a_slow_host_launch_longer() -> None:
    def launches(arch: str, device: str) -> float:
        one = trainer(arch=arch, device=device)
        return (
            roofline.launch_seconds(one.costs.layout(one.scenario.team("actor", "train")[0])) - roofline.PASS_S["gpu"]
        )

    assert launches("qwen3-30b-a3b", H100) == pytest.approx(
        48 * (roofline.LAYER_PASS_S["gpu"] + roofline.EXPERTS_PASS_S["gpu"])
    )
    assert launches("qwen3-4b", "gb200") == pytest.approx(roofline.HOSTS["gb200"] * launches("qwen3-4b", H100))


def test_adapters_leave_out_the_gradients_of_frozen_weights() -> None:
    whole, adapted = trainer(), trainer(lora_rank=16)
    assert adapted.update([[8192]]) < whole.update([[8192]])
    assert 0.5 < SUSTAINED <= 1.0 and GRADIENT_BYTES == 8.0
