"""Tables of engine iterations agree with the costs they are made of, and say what was measured."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.load import load
from lab.model import attended
from lab.scenario import Scenario
from profiles.cost import CostModel
from profiles.curve import Range
from profiles.iteration import EngineTable, Iteration
from profiles.profile import OpProfile, Profile, datasheet, shipped
from profiles.profile import load as load_profile

QUICK, BIG = load("scenarios/quickstart.yaml"), load("scenarios/ppo-7b-16gpu.yaml")
SHEET = {"a100-80g-sxm": datasheet("a100-80g-sxm")}
KERNELS = {"a100-80g-sxm": load_profile(shipped()["a100-80g-sxm"])}
COEFFICIENTS = {
    "each": 2e-3, "sequences": 4e-5, "linear_flops": 2e-11, "attention_flops": 1e-11, "kv_bytes": 1e-10,
    "prefill_steps": 5e-4,
}  # fmt: skip

HIGHEST = {"linear_flops": 8e9, "attention_flops": 1e9, "kv_bytes": 1e7}


def fitted() -> Profile:
    ranges = {name: Range(low=0, high=high) for name, high in HIGHEST.items()}
    ranges |= {"sequences": Range(low=1, high=64), "each": Range(low=1, high=1)}
    op = OpProfile(coefficients=COEFFICIENTS, ranges=ranges, points=9, residual_median=0, residual_p90=0)
    return Profile(name="m", device="cpu-core", kind="measured", models=("tiny-llama",), ops={"engine_step": op})


def iteration(decodes: int, context: float, chunk: int = 0, prefix: float = 0.0) -> Iteration:
    """Equal decoding sequences and one prompt's chunk."""
    return Iteration(
        tokens=decodes + chunk, sequences=decodes + (chunk > 0), prefill_tokens=chunk, prefix=prefix, decodes=decodes,
        context_sum=decodes * context, context_max=context,
        token_context=decodes * (context + 1) + attended(chunk, before=prefix),
        context_read=decodes * context + prefix * (chunk > 0),
    )  # fmt: skip


def quantities(scenario: Scenario, it: Iteration) -> dict[str, float]:
    spec, worker = scenario.spec("actor"), scenario.team("actor", "generate")[0]
    return {
        "sequences": float(it.sequences),
        "tokens": float(it.tokens),
        "linear_flops": spec.linear_flops(it.tokens, head_tokens=it.sequences),
        "attention_flops": spec.attention_flops(it.token_context),
        "kv_bytes": it.context_read * spec.kv_bytes_per_token(worker.kv_dtype),
        "prefill_steps": float(it.prefill_tokens > 0),
    }


def big(generate: dict[str, Any], **changes: Any) -> Scenario:
    data = BIG.model_dump(mode="json", by_alias=True)
    place = data["place"] | {"actor.generate": [{"pool": "rollout"} | generate]}
    return BIG.replace({"place": place} | {key: data[key] | value for key, value in changes.items()})


def table(scenario: Scenario) -> EngineTable:
    return CostModel(scenario, SHEET).engine_table(scenario.team("actor", "generate")[0])


ITERATIONS = st.builds(iteration, st.integers(0, 60), st.floats(0, 80), st.integers(0, 500), st.floats(0, 70)).filter(
    lambda it: it.tokens > 0
)


@given(ITERATIONS)
def test_a_fitted_table_is_its_formula(it: Iteration) -> None:
    model, worker = CostModel(QUICK, {"cpu-core": fitted()}), QUICK.team("actor", "generate")[0]
    cost = model.op(worker, "engine_step", quantities(QUICK, it))
    assert model.engine_table(worker).seconds(it) == pytest.approx(cost.seconds, rel=1e-9)


def test_a_fitted_table_says_where_its_measurements_end() -> None:
    found = CostModel(QUICK, {"cpu-core": fitted()}).engine_table(QUICK.team("actor", "generate")[0])
    assert found.covers(iteration(64, 70)) and found.covers(iteration(0, 0, chunk=500))
    assert not found.covers(iteration(80, 10)) and not found.covers(iteration(4, 1e4))
    assert not found.covers(iteration(0, 0, chunk=10**5))


def test_another_model_and_more_threads_are_not_what_was_measured() -> None:
    data = QUICK.model_dump(mode="json", by_alias=True)
    place = data["place"]["actor.generate"][0]
    other = QUICK.replace({"models": data["models"] | {"actor": {"arch": "small-llama", "dtype": "float32"}}})
    threads = QUICK.replace({"place": data["place"] | {"actor.generate": [place | {"threads": 2}]}})
    for scenario in (other, threads):
        model = CostModel(scenario, {"cpu-core": fitted()})
        assert not model.engine_table(scenario.team("actor", "generate")[0]).measured


@pytest.mark.parametrize("generate", [{}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"dtype": "int8"}], ids=str)
@given(it=ITERATIONS)
def test_a_datasheet_table_is_its_roofline(generate: dict[str, Any], it: Iteration) -> None:
    """Between the knots of the larger of two straight lines a chord lies a little above."""
    scenario = big({"engines": 1} | generate)
    model, worker = CostModel(scenario, SHEET), scenario.team("actor", "generate")[0]
    exact = model.op(worker, "engine_step", quantities(scenario, it)).seconds
    assert exact * (1 - 1e-9) <= model.engine_table(worker).seconds(it) <= exact * 1.1
    assert not model.engine_table(worker).covers(it)


def test_a_pipeline_reads_its_weights_once_in_each_of_its_batches() -> None:
    """One sequence gains nothing from a pipeline; many share p times the memory but as much arithmetic."""
    one, two = table(big({"engines": 1})), table(big({"engines": 1, "pipeline_parallel": 2}))
    assert two.seconds(iteration(1, 100)) > one.seconds(iteration(1, 100))
    full = iteration(0, 0, chunk=8192)
    assert two.seconds(full) < 0.6 * one.seconds(full)


def test_copies_of_attention_share_the_experts() -> None:
    moe = {"models": {"actor": {"arch": "qwen3-30b-a3b"}}}
    one = table(big({"engines": 1, "tensor_parallel": 2}, **moe))
    copies = table(big({"engines": 1, "data_parallel": 2, "expert_parallel": 2}, **moe))
    light, heavy = iteration(8, 100), iteration(256, 4000)
    assert copies.seconds(light) > one.seconds(light), "each copy reads all attention weights"
    assert one.seconds(heavy) < copies.seconds(heavy) < 2 * one.seconds(heavy), "with twice the sequences in all"


def test_more_ranks_than_heads_that_keep_keys_and_values_keep_them_twice() -> None:
    data = BIG.model_dump(mode="json", by_alias=True)
    data["cluster"]["sites"][0]["nodes"][1]["devices"] = 16
    data["pools"]["rollout"] = "serve[2:10]"
    data["models"]["actor"]["arch"] = "qwen2.5-3b"

    def reading(width: int) -> float:
        place = data["place"] | {"actor.generate": [{"pool": "rollout", "tensor_parallel": width}]}
        return table(BIG.replace(data | {"place": place})).context_read_s

    assert reading(2) == pytest.approx(reading(1) / 2)
    assert reading(8) == pytest.approx(reading(2)), "the model has two such heads"


def test_windowed_layers_stop_growing_and_latent_attention_has_a_grid() -> None:
    workload = {"response_tokens": {"dist": "fixed", "value": 15000}}
    update = {"microbatch_tokens": 20000}
    windowed = table(big({"engines": 2}, models={"actor": {"arch": "mistral-7b"}}, workload=workload, update=update))
    inside, beyond = (
        windowed.seconds(iteration(32, n + 1000)) - windowed.seconds(iteration(32, n)) for n in (2000, 9000)
    )
    assert inside > 0 and beyond == pytest.approx(0, abs=1e-9)
    assert windowed.token_context_s == 0 == windowed.context_read_s


def kernel_table(scenario: Scenario) -> EngineTable:
    return CostModel(scenario, KERNELS).engine_table(scenario.team("actor", "generate")[0])


def test_kernels_make_a_measured_table_and_host_time_is_added() -> None:
    found = kernel_table(BIG)
    assert found.measured and found.step_s > 0 and found.sequence_s > 0
    assert found.covers(iteration(200, 1000)) and not found.covers(iteration(10**5, 1000))
    ratio = found.seconds(iteration(64, 1000)) / table(BIG).seconds(iteration(64, 1000))
    assert 0.7 < ratio < 1.5, "the datasheet's stated efficiencies are of the right order"


def test_pipelines_and_copies_of_kernels_behave_as_those_of_a_datasheet() -> None:
    one, two = kernel_table(big({"engines": 1})), kernel_table(big({"engines": 1, "pipeline_parallel": 2}))
    assert two.seconds(iteration(1, 100)) > one.seconds(iteration(1, 100)) and not two.measured
    assert two.seconds(iteration(0, 0, chunk=8192)) < 0.6 * one.seconds(iteration(0, 0, chunk=8192))
    moe = {"models": {"actor": {"arch": "qwen3-30b-a3b"}}}
    apart = kernel_table(big({"engines": 1, "tensor_parallel": 2}, **moe))
    copies = kernel_table(big({"engines": 1, "data_parallel": 2, "expert_parallel": 2}, **moe))
    assert copies.seconds(iteration(256, 4000)) < 2 * apart.seconds(iteration(256, 4000))
    assert copies.seconds(iteration(8, 100)) > 0.9 * apart.seconds(iteration(8, 100))


def test_where_a_profile_holds_kernels_only_engine_time_is_not_extrapolated() -> None:
    model, worker = CostModel(BIG, KERNELS), BIG.team("actor", "generate")[0]
    inside = model.iterations(worker, 1.0, (iteration(8, 100), iteration(8, 110)))
    assert inside == (1.0, False)
    assert model.op(worker, "dispatch", {"calls": 1.0, "bytes": 0.0}).extrapolated
    said = model.header_profiles()["a100-80g-sxm"]
    assert 0 < said["extrapolated_share"] < 0.01 and said["unmeasured"] == ["dispatch"]


def test_a_table_takes_less_than_a_fifth_of_a_second() -> None:
    for make in (table, kernel_table):
        make(BIG)
        start = time.perf_counter()
        make(BIG)
        assert time.perf_counter() - start < 0.2
