"""Costs as laws: monotone, divided by parallelism, closed forms of collectives, extrapolation marked."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.load import load, parse
from lab.scenario import Scenario
from profiles.cost import CostModel
from profiles.layout import LINK_EFFICIENCY
from profiles.moves import HOST_LINK_EFFICIENCY
from profiles.profile import OpProfile, Profile, Range, datasheet

BIG = Path("scenarios/ppo-7b-16gpu.yaml").read_text()
QUICK = load("scenarios/quickstart.yaml")
SHEET = {"a100-80g-sxm": datasheet("a100-80g-sxm")}
PASS = {"passes": 1, "tokens": 1e4, "linear_flops": 1e15, "attention_flops": 1e13}


def seconds(text: str, team: tuple[str, str], op: str, quantities: dict[str, float]) -> float:
    scenario = parse(text)
    return CostModel(scenario, SHEET).op(scenario.team(*team)[0], op, quantities).seconds


def test_a_ring_moves_its_closed_form_of_bytes() -> None:
    gradients = {"calls": 1, "bytes": 15e9}
    three = seconds(BIG, ("actor", "train"), "grad_sync", gradients)
    bandwidth, latency = 25e9 * LINK_EFFICIENCY / 2, 2e-6  # two tensor ranks, each with a ring, share a machine's port
    assert three == pytest.approx(2 * 2 / 3 * 15e9 / 2 / bandwidth + 4 * latency)
    sharded = BIG.replace("tensor_parallel: 2, zero_stage: 2", "tensor_parallel: 2, zero_stage: 3")
    assert seconds(sharded, ("actor", "train"), "grad_sync", gradients) == pytest.approx(three / 2)
    assert (
        seconds(
            BIG.replace("oversubscription: 1.0", "oversubscription: 4.0"), ("actor", "train"), "grad_sync", gradients
        )
        > 3.9 * three
    )


def test_recomputation_adds_a_forward_pass() -> None:
    forward = seconds(BIG, ("critic", "train"), "forward", PASS)
    inside = BIG.replace(", offload: optimizer", "")
    assert seconds(inside, ("critic", "train"), "backward", PASS) == pytest.approx(3 * forward)
    assert seconds(
        inside.replace("recompute: full", "recompute: none"), ("critic", "train"), "backward", PASS
    ) == pytest.approx(2 * forward)


@given(st.floats(1e13, 1e16), st.floats(1.1, 10))
def test_a_compute_bound_pass_scales_with_its_flops_and_with_tensor_parallelism(flops: float, factor: float) -> None:
    def of(work: float) -> float:
        return seconds(BIG, ("critic", "train"), "forward", PASS | {"linear_flops": work, "attention_flops": 0})

    assert of(factor * flops) - of(flops) == pytest.approx((factor - 1) * flops / (312e12 * 0.45), rel=1e-6)


def test_gradients_of_an_offloaded_optimizer_cross_to_the_host_and_back_with_every_micro_batch() -> None:
    """The sum so far comes down to the device and goes up again: 2 bytes for each of the critic's parameters, both ways."""
    inside = seconds(BIG.replace(", offload: optimizer", ""), ("critic", "train"), "backward", PASS)
    moved = 2 * 2.0 * parse(BIG).trainable_parameters("critic")
    crossing = moved / (32e9 * HOST_LINK_EFFICIENCY)
    assert seconds(BIG, ("critic", "train"), "backward", PASS) - inside == pytest.approx(crossing, rel=1e-3)


def test_offloading_the_optimizer_costs_time_on_the_host() -> None:
    step = {"passes": 1, "parameters": 7.6e9}
    inside = seconds(BIG.replace(", offload: optimizer", ""), ("critic", "train"), "optimizer", step)
    assert seconds(BIG, ("critic", "train"), "optimizer", step) > 5 * inside


def test_everything_from_a_datasheet_is_marked_as_extrapolated() -> None:
    scenario = parse(BIG)
    model = CostModel(scenario, SHEET)
    assert model.op(scenario.team("critic", "train")[0], "forward", PASS).extrapolated
    assert model.header_profiles()["a100-80g-sxm"] == {
        "name": "a100-80g-sxm-datasheet",
        "kind": "datasheet",
        "extrapolated_share": 1.0,
        "unmeasured": [],
    }


def measured(scenario: Scenario, **ranges: Range) -> CostModel:
    op = OpProfile(
        coefficients={"each": 0.01, "linear_flops": 1e-9},
        points=3,
        residual_median=0,
        residual_p90=0,
        interference=(1.5, 2.0),
        ranges={
            "each": Range(low=1, high=1),
            "linear_flops": Range(low=1, high=1e9),
            "attention_flops": Range(low=0, high=1e9),
        }
        | ranges,
    )
    profile = Profile(name="m", device="cpu-core", kind="measured", models=("tiny-llama",), ops={"logprob": op})
    return CostModel(scenario, {"cpu-core": profile})


def test_a_measured_cost_is_its_formula_and_outside_the_range_it_is_marked() -> None:
    worker, model = QUICK.team("reference", "score")[0], measured(QUICK)
    inside = model.op(worker, "logprob", {"passes": 1, "linear_flops": 1e6, "attention_flops": 0})
    assert inside == (pytest.approx(0.011), False)
    outside = model.op(worker, "logprob", {"passes": 1, "linear_flops": 1e12, "attention_flops": 0})
    assert outside.extrapolated
    share = outside.seconds / (outside.seconds + inside.seconds)
    assert model.header_profiles()["cpu-core"]["extrapolated_share"] == pytest.approx(share)


def test_another_architecture_than_the_measured_one_is_extrapolated() -> None:
    text = Path("scenarios/quickstart.yaml").read_text().replace("arch: tiny-llama", "arch: small-llama")
    scenario = parse(text)
    quantities = {"passes": 1, "linear_flops": 1e6, "attention_flops": 0}
    assert measured(scenario).op(scenario.team("reference", "score")[0], "logprob", quantities).extrapolated


def test_what_a_measured_profile_lacks_is_said() -> None:
    model = measured(QUICK)
    assert model.op(QUICK.team("actor", "train")[0], "forward", PASS).extrapolated
    assert model.header_profiles()["cpu-core"]["unmeasured"] == ["forward"]


def test_slowdown_grows_with_busy_neighbours() -> None:
    worker, model = QUICK.team("reference", "score")[0], measured(QUICK)
    values = [model.slowdown(worker, "logprob", n) for n in (0, 0.5, 1, 1.5, 2, 7)]
    assert values == pytest.approx([1, 1.25, 1.5, 1.75, 2, 2])


def test_threads_divide_what_a_core_computes_and_mean_nothing_on_a_gpu() -> None:
    text = Path("scenarios/quickstart.yaml").read_text()
    more = text.replace("max_batch_samples: 32, threads: 1", "max_batch_samples: 32, threads: 2")
    bound = {"passes": 1, "tokens": 100, "linear_flops": 1e15, "attention_flops": 0}

    def sheet(text: str) -> float:
        scenario = parse(text)
        model = CostModel(scenario, {"cpu-core": datasheet("cpu-core")})
        return model.op(scenario.team("reference", "score")[0], "logprob", bound).seconds

    assert sheet(more) == pytest.approx(sheet(text) / 2, rel=1e-3)
    wide = BIG.replace("zero_stage: 2, offload", "zero_stage: 2, threads: 8, offload")
    assert wide != BIG and seconds(wide, ("critic", "train"), "forward", PASS) == seconds(
        BIG, ("critic", "train"), "forward", PASS
    )


def test_a_term_that_an_older_fit_left_in_another_is_not_called_extrapolation() -> None:
    """With one network, the number of its layers and the width of its activations are part of other terms."""
    worker, model = QUICK.team("reference", "score")[0], measured(QUICK)
    quantities = {"passes": 1, "linear_flops": 1e6, "attention_flops": 0, "layers": 4, "activations": 1e5}
    assert model.op(worker, "logprob", quantities) == (pytest.approx(0.011), False)
