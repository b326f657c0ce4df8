"""Memory as laws: what ZeRO, recomputation, adapters, parallelism and block size must do to a footprint."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.library import model
from lab.lora import Lora
from lab.model import ModelSpec
from profiles.footprint import Footprint, device_parameters, expert_adapter_parameters
from profiles.footprint_layers import widths
from profiles.footprint_serving import Scoring, Serving, scoring, serving, weight_bytes
from profiles.footprint_training import Training, footprint

DENSE, SPARSE = model("qwen2.5-7b"), model("qwen3-30b-a3b")
STATES = ("weights", "gradients", "optimizer states", "fp32 masters")
tokens = st.integers(1, 2**17)
ranks = st.sampled_from([1, 2, 4, 8, 64])
models = st.sampled_from(["tiny-llama", "qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "opt-125m"])


def states(training: Training) -> float:
    return sum(footprint(training).resident[name] for name in STATES)


@given(models, ranks)
def test_stage_three_over_n_ranks_holds_an_nth_of_the_states(name: str, n: int) -> None:
    whole = Training(spec=model(name), tokens=1024, data=n)
    assert states(replace(whole, zero_stage=3)) == pytest.approx(states(whole) / n)


@given(models, ranks)
def test_no_stage_holds_more_than_the_one_before(name: str, n: int) -> None:
    by_stage = [states(Training(spec=model(name), tokens=64, data=n, zero_stage=stage)) for stage in (0, 1, 2, 3)]
    assert by_stage == sorted(by_stage, reverse=True)


@given(models, tokens)
def test_the_more_is_recomputed_the_less_is_kept(name: str, count: int) -> None:
    kept = [
        footprint(Training(spec=model(name), tokens=count, recompute=how)).instants["logits"]["activations"]
        for how in ("none", "selective", "full")
    ]
    assert kept[0] > kept[1] > kept[2] > 0


@given(models, tokens, tokens, st.sampled_from(["none", "selective", "full"]))
def test_more_tokens_never_need_less(name: str, few: int, many: int, how: str) -> None:
    few, many = sorted((few, many))
    spec = model(name)
    pair = [footprint(Training(spec=spec, tokens=n, recompute=how)).peak_bytes for n in (few, many)]  # type: ignore[arg-type]
    assert pair[0] <= pair[1]
    assert scoring(Scoring(spec=spec, tokens=few)).peak_bytes <= scoring(Scoring(spec=spec, tokens=many)).peak_bytes


@given(
    st.dictionaries(st.sampled_from("abc"), st.floats(0, 1e12), min_size=1),
    st.dictionaries(st.sampled_from("xyz"), st.dictionaries(st.sampled_from("abd"), st.floats(0, 1e12), min_size=1)),
)
def test_the_peak_is_the_resident_part_and_the_largest_instant(
    resident: dict[str, float], instants: dict[str, dict[str, float]]
) -> None:
    found = Footprint(resident=resident, instants=instants)
    largest = max((sum(part.values()) for part in instants.values()), default=0.0)
    assert found.peak_bytes == pytest.approx(sum(resident.values()) + largest)
    assert sum(found.consumers.values()) == pytest.approx(found.peak_bytes)
    assert list(found.consumers.values()) == sorted(found.consumers.values(), reverse=True)


def test_a_layer_of_gpt_keeps_what_korthikanti_counted() -> None:
    """34·s·b·h bytes, of which dropout's two masks (2·s·b·h) are not in the models here."""
    hidden = 1024
    gpt = ModelSpec(
        hidden=hidden, layers=1, heads=16, kv_heads=16, head_dim=64, intermediate=4 * hidden, vocabulary=2, gated=False
    )
    assert widths(gpt).kept * 2 == 32 * hidden
    assert (widths(gpt, scores=100).kept - widths(gpt).kept) * 2 == 2 * 16 * 100


def test_adapters_train_what_the_adapter_has_and_keep_the_weights() -> None:
    adapter = float(Lora(rank=16).parameters(DENSE))
    found = footprint(Training(spec=DENSE, tokens=1024, adapter=adapter)).resident
    whole = footprint(Training(spec=DENSE, tokens=1024)).resident
    assert found["weights"] == whole["weights"]
    assert found["gradients"] == 2 * adapter and found["optimizer states"] == 8 * adapter
    assert expert_adapter_parameters(DENSE, 16) == 0 < expert_adapter_parameters(SPARSE, 16)


def test_offloading_frees_the_states_and_from_stage_two_on_the_gradients() -> None:
    here, away = (footprint(Training(spec=DENSE, tokens=1, zero_stage=2, offload=how)) for how in ("none", "optimizer"))
    assert here.resident["optimizer states"] > away.resident["optimizer states"] == 0
    assert here.resident["gradients"] > away.resident["gradients"] == 0
    assert footprint(Training(spec=DENSE, tokens=1, offload="optimizer")).resident["gradients"] > 0


def test_a_loss_in_chunks_holds_a_chunk_of_the_logits() -> None:
    whole, chunk = (
        footprint(Training(spec=DENSE, tokens=4096, logit_columns=columns)).instants["logits"]["logits"]
        for columns in (None, 2048)
    )
    assert whole == 4096 * DENSE.vocabulary * 18
    assert chunk == 4096 * (2048 * 18 + DENSE.hidden * 4)
    value = footprint(Training(spec=DENSE, tokens=4096, outputs=1)).instants["logits"]["logits"]
    assert value == 4096 * 18


def test_gathered_layers_come_with_stage_three_only() -> None:
    by_stage = [
        footprint(Training(spec=DENSE, tokens=1, data=4, zero_stage=stage)).instants["layer"] for stage in (2, 3)
    ]
    assert by_stage[0]["gathered weights"] == 0
    layers = 2 * DENSE.layer_matrix_parameters + DENSE.vocabulary * DENSE.hidden
    assert by_stage[1]["gathered weights"] == 2 * layers


@given(models, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_parallelism_divides_the_parameters(name: str, tensor: int, pipeline: int) -> None:
    spec = model(name)
    assert device_parameters(spec, tensor=tensor, pipeline=pipeline) == pytest.approx(
        spec.parameters / (tensor * pipeline)
    )
    assert device_parameters(spec, expert=4) == pytest.approx(spec.parameters - spec.expert_parameters * 3 / 4)


@given(st.sampled_from([1, 8, 16, 32]), st.floats(0.3, 1.0), st.sampled_from([1, 2, 4, 8]))
def test_kv_comes_in_whole_blocks_within_the_engine_s_share(block: int, fraction: float, tensor: int) -> None:
    engine = Serving(
        spec=DENSE, capacity_bytes=80e9, fraction=fraction, block_tokens=block, tensor=tensor, max_num_batched_tokens=2048
    )  # fmt: skip
    held = serving(engine)
    assert held.resident["KV cache"] == engine.blocks * engine.block_bytes
    if engine.blocks > 2:
        assert held.peak_bytes <= fraction * 80e9 < held.peak_bytes + engine.block_bytes


def test_a_given_cache_is_divided_over_the_ranks_and_rounded_down() -> None:
    engine = Serving(spec=DENSE, capacity_bytes=80e9, kv_bytes=1e9, tensor=2)
    assert engine.blocks == int(1e9 // (16 * DENSE.kv_bytes_per_token("bfloat16")))
    assert Serving(spec=DENSE, capacity_bytes=80e9, kv_bytes=1.0).blocks == 2


def test_the_block_rule_gives_what_an_engine_resolved() -> None:
    """vLLM 0.19 on an RTX 4090 of 25,250,627,584 bytes, Llama-3.1-8B, 2,048 batched tokens: num_gpu_blocks = 2588."""
    engine = Serving(spec=model("llama-3.1-8b"), capacity_bytes=25250627584, max_num_batched_tokens=2048)
    assert engine.blocks == pytest.approx(2588, rel=0.05)


def test_eight_bits_leave_embeddings_and_norms_as_they_are() -> None:
    rest = DENSE.parameters - DENSE.matrix_parameters
    assert weight_bytes(DENSE, "int8") == pytest.approx(DENSE.matrix_parameters + 2 * rest)
    sizes = [
        scoring(Scoring(spec=DENSE, tokens=8, dtype=dtype)).peak_bytes for dtype in ("int8", "bfloat16", "float32")
    ]
    assert all(small < large for small, large in itertools.pairwise(sizes))


def test_a_cpu_has_no_context() -> None:
    assert "CUDA context" not in footprint(Training(spec=DENSE, tokens=1, device_kind="cpu")).resident
    assert footprint(Training(spec=DENSE, tokens=1)).resident["CUDA context"] > 0
