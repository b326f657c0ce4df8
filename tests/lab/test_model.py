from lab.library import models
from lab.model import ModelSpec

SPEC = ModelSpec(hidden=8, layers=3, heads=4, kv_heads=2, head_dim=2, intermediate=16, vocabulary=10)


def test_the_parameters_are_those_of_the_published_model() -> None:
    assert models()["qwen2.5-7b"].parameters == 7_615_616_512  # model card of Qwen/Qwen2.5-7B: 7.61 B


def test_flops_are_twice_the_matrix_parameters_per_token() -> None:
    matrices = 3 * (8 * 2 * (2 * 4 + 2 * 2) + 3 * 8 * 16)
    assert SPEC.linear_flops(5) == 2 * 5 * (matrices + 10 * 8)
    assert SPEC.linear_flops(5, head_tokens=1) == 2 * (5 * matrices + 10 * 8)


def test_kv_and_weights_count_bytes_of_their_dtype() -> None:
    assert SPEC.kv_bytes_per_token("bfloat16") == 2 * 3 * 2 * 2 * 2
    assert SPEC.weight_bytes("float32") == 4 * SPEC.parameters
    tied = SPEC.model_copy(update={"tied_embeddings": True})
    assert SPEC.parameters - tied.parameters == 10 * 8
