import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lab.library import model
from lab.model import Mla, ModelSpec, Moe, attended

SPEC = ModelSpec(hidden=8, layers=3, heads=4, kv_heads=2, head_dim=2, intermediate=16, vocabulary=10)
MLA = Mla(q_lora_rank=6, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=3, v_head_dim=2)
MOE = Moe(num_experts=4, experts_per_token=2, intermediate=5, shared_intermediate=7, dense_layers=1)

# Totals that the Hugging Face hub states for the safetensors of these models (tied tables counted once).
PUBLISHED = {
    "opt-125m": 125_239_296, "opt-1.3b": 1_315_758_080, "opt-6.7b": 6_658_473_984, "opt-13b": 12_853_473_280,
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248, "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800, "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096, "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320,
    "deepseek-v3": 671_026_419_200,
}  # fmt: skip
# Rounded figures of model cards: (billions, of which active).
ROUNDED = {
    "qwen3-0.6b": (0.6, 0.6), "qwen3-1.7b": (1.7, 1.7), "opt-66b": (65.7, 65.7), "mixtral-8x7b": (46.7, 12.9),
    "qwen3-30b-a3b": (30.53, 3.35), "qwen3-235b-a22b": (235.1, 22.2), "deepseek-v3": (671.0, 37.0),
}  # fmt: skip


def varied(**changes: object) -> ModelSpec:
    return ModelSpec.model_validate(SPEC.model_dump() | changes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_are_those_of_the_published_model(name: str) -> None:
    assert model(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_total_and_active_parameters_are_those_of_the_model_card(name: str) -> None:
    total, active = ROUNDED[name]
    assert model(name).parameters / 1e9 == pytest.approx(total, rel=0.02)
    assert model(name).active_parameters / 1e9 == pytest.approx(active, rel=0.02)


def test_flops_are_twice_the_matrix_parameters_per_token() -> None:
    matrices = 3 * (8 * 2 * (2 * 4 + 2 * 2) + 3 * 8 * 16)
    assert SPEC.linear_flops(5) == 2 * 5 * (matrices + 10 * 8)
    assert SPEC.linear_flops(5, head_tokens=1) == 2 * (5 * matrices + 10 * 8)


def test_kv_and_weights_count_bytes_of_their_dtype() -> None:
    assert SPEC.kv_bytes_per_token("bfloat16") == 2 * 3 * 2 * 2 * 2
    assert SPEC.weight_bytes("float32") == 4 * SPEC.parameters
    tied = SPEC.model_copy(update={"tied_embeddings": True})
    assert SPEC.parameters - tied.parameters == 10 * 8


def test_published_caches() -> None:
    assert model("llama-3.1-8b").kv_bytes_per_token("bfloat16") == 128 * 1024
    # DeepSeek-V3 report: (512 + 64) values in each of 61 layers, about 70 KB
    assert model("deepseek-v3").kv_bytes_per_token("bfloat16") == 61 * 576 * 2


def test_a_token_passes_only_its_experts() -> None:
    spec, expert = varied(moe=MOE), 3 * 8 * 5
    assert spec.expert_parameters == 2 * 4 * expert
    assert spec.parameters - spec.active_parameters == 2 * 2 * expert
    one_layer = SPEC.attention_matrix_parameters + 8 * 4 + 3 * 8 * 7 + 2 * expert
    assert spec.linear_flops(1, head_tokens=0) == 2 * (SPEC.layer_matrix_parameters + 2 * one_layer)


def test_all_experts_active_is_dense_in_flops() -> None:
    spec = varied(moe=Moe(num_experts=4, experts_per_token=4, intermediate=4))
    assert spec.active_parameters == spec.parameters
    router = SPEC.layers * SPEC.hidden * 4
    assert spec.linear_flops(1) == SPEC.linear_flops(1) + 2 * router  # 4 experts of 4 are an MLP of 16


def test_without_a_gate_there_are_two_matrices() -> None:
    assert SPEC.parameters - varied(gated=False).parameters == 3 * 8 * 16


def test_biases_norms_and_positions_add_up() -> None:
    assert varied(qkv_bias=True).parameters - SPEC.parameters == 3 * 2 * (4 + 2 * 2)
    assert varied(output_bias=True).parameters - SPEC.parameters == 3 * 8
    assert varied(mlp_bias=True).parameters - SPEC.parameters == 3 * (2 * 16 + 8)
    assert varied(norm_bias=True).parameters - SPEC.parameters == 8 * (2 * 3 + 1)
    assert varied(norms_per_layer=4).parameters - SPEC.parameters == 3 * 2 * 8
    assert varied(qk_norm=True).parameters - SPEC.parameters == 3 * 2 * 2
    assert varied(learned_positions=11).parameters - SPEC.parameters == 11 * 8


def test_latent_attention_caches_the_latent_and_multiplies_what_it_is_asked_to() -> None:
    spec = varied(mla=MLA, kv_heads=4)
    assert spec.kv_bytes_per_token("fp8") == 3 * (5 + 3)
    assert spec.attention_matrix_parameters == 8 * 6 + 6 * 4 * 7 + 8 * 8 + 5 * 4 * (4 + 2) + 4 * 2 * 8
    assert spec.attention_flops(10) == 2 * 3 * 4 * (7 + 2) * 10
    assert spec.attention_flops(10, absorbed=True) == 2 * 3 * 4 * (8 + 5) * 10
    assert SPEC.attention_flops(10) == SPEC.attention_flops(10, absorbed=True) == 4 * 3 * 4 * 2 * 10


def test_windowed_layers_keep_and_read_only_the_window() -> None:
    spec = varied(sliding_window=4, window_layers=2)
    assert spec.kv_bytes(3, "bfloat16") == 3 * spec.kv_bytes_per_token("bfloat16")
    assert spec.kv_bytes(10, "bfloat16") == (10 + 4 + 4) * spec.kv_bytes_per_token("bfloat16") / 3
    assert SPEC.kv_bytes(10, "bfloat16") == 10 * SPEC.kv_bytes_per_token("bfloat16")
    assert spec.causal_attention_flops(10) == 2 * 4 * 4 * (attended(10) + 2 * attended(10, window=4))
    assert SPEC.causal_attention_flops(10) == SPEC.attention_flops(55)


@given(st.integers(0, 40), st.integers(0, 40), st.none() | st.integers(1, 50))
def test_attended_pairs_are_the_sum_over_tokens(tokens: int, before: int, window: int | None) -> None:
    contexts = range(before + 1, before + tokens + 1)
    assert attended(tokens, before=before, window=window) == sum(min(i, window or i) for i in contexts)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 50))
def test_a_pass_in_two_parts_attends_as_often_as_a_whole_one(first: int, second: int, window: int) -> None:
    parts = attended(first, window=window) + attended(second, before=first, window=window)
    assert parts == attended(first + second, window=window)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kv_heads": 3}, "not a multiple"),
        ({"window_layers": 4, "sliding_window": 8}, "above layers"),
        ({"window_layers": 1}, "needs sliding_window"),
        ({"moe": MOE.model_dump() | {"dense_layers": 4}}, "above layers"),
        ({"moe": MOE.model_dump() | {"experts_per_token": 5}}, "above num_experts"),
    ],
)
def test_shapes_that_do_not_fit_together_are_refused(change: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        varied(**change)
