"""Engine tables from kernels: the work of a layer adds up, however it is spread over devices."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from lab.library import model
from lab.model import ModelSpec
from profiles.engine_table import BF16, Fusion, engine_table
from profiles.iteration import Iteration
from profiles.kernels import WIDTH, prefix_share

LAUNCH = 1e-6


@dataclass
class FlopKernels:
    """Every product takes one second per FLOP, every pair that attends one, every byte of a collective one; all else
    nothing: totals can be counted by hand."""

    limit: float = 8192
    notes: set[str] = field(default_factory=set)
    calls: list[tuple] = field(default_factory=list)

    def token_limit(self, dtype):
        return self.limit

    def gemm(self, dtype, m, n, k):
        self.calls.append((dtype, n, k))
        return 2.0 * np.asarray(m, float) * n * k

    def context_attention(self, batch, isl, prefix, heads, kv_heads, head_dim, kv_dtype, window=0):
        return 4.0 * batch * heads * head_dim * np.asarray(isl) * (np.asarray(prefix) + (np.asarray(isl) + 1) / 2)

    def generation_attention(self, batch, context, heads, kv_heads, head_dim, kv_dtype, window=0):
        seen = np.minimum(context, window) if window else np.asarray(context)
        return 4.0 * np.asarray(batch) * heads * head_dim * seen

    def moe(self, dtype, tokens, hidden, intermediate, topk, num_experts, tp, ep):
        return 6.0 * np.asarray(tokens, float) * topk * hidden * intermediate / tp / ep

    def collective(self, op, size, ranks, graph=True):
        return np.zeros(np.shape(size))

    def memory_bound(self, size):
        return np.zeros(np.shape(size))


@dataclass
class CountingKernels(FlopKernels):
    """Only small kernels and collectives cost anything: one each."""

    def gemm(self, dtype, m, n, k):
        return np.zeros(np.shape(m))

    def moe(self, *shape):
        return np.zeros(np.shape(shape[1]))

    def collective(self, op, size, ranks, graph=True):
        return np.full(np.shape(size), 0.0 if ranks == 1 else 1.0)

    def memory_bound(self, size):
        return np.full(np.shape(size), LAUNCH)


def exact(name: str) -> ModelSpec:
    return model(name)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b", "deepseek-v3", "opt-1.3b"])
def test_products_are_the_models_own_flops(name: str) -> None:
    spec = exact(name)
    table = engine_table(spec, "bfloat16", "bfloat16", 1, FlopKernels())
    for tokens in (1, 16, 2048):
        at = np.searchsorted(table.token_grid, tokens)
        wanted = spec.linear_flops(float(table.token_grid[at]), head_tokens=0.0)
        assert table.token_seconds[at] == pytest.approx(wanted, rel=1e-9)
    head = 2.0 * 64 * spec.vocabulary * spec.hidden
    assert table.sequence_seconds[table.sequence_grid == 64][0] == pytest.approx(head)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallel_ranks_share_the_work_evenly(tp: int) -> None:
    spec = exact("llama-3.1-70b")
    whole = engine_table(spec, "bfloat16", "bfloat16", 1, FlopKernels())
    part = engine_table(spec, "bfloat16", "bfloat16", tp, FlopKernels())
    assert np.allclose(part.token_seconds * tp, whole.token_seconds, rtol=1e-12)
    assert np.allclose(part.attention_seconds * tp, whole.attention_seconds, rtol=1e-12)


def test_attention_of_an_iteration_is_that_of_the_model() -> None:
    spec = exact("llama-3.1-8b")
    table = engine_table(spec, "bfloat16", "bfloat16", 1, FlopKernels())
    decode = Iteration(tokens=32, sequences=32, decodes=32, context_sum=32 * 1023, context_max=1023, context_min=1023)
    linear = spec.linear_flops(32.0, head_tokens=32.0)
    assert table.seconds(decode) == pytest.approx(linear + spec.attention_flops(32 * 1023.0), rel=1e-9)


@pytest.mark.parametrize("prompts", [1, 2, 4, 8, 16])
def test_several_prompts_at_once_attend_to_their_own_pairs_only(prompts: int) -> None:
    spec = exact("llama-3.1-8b")
    table = engine_table(spec, "bfloat16", "bfloat16", 1, FlopKernels())
    length = 8192 // prompts
    pairs = prompts * length * length / 2
    prefix = pairs / 8192 - 8192 / 2
    assert prefix <= 0
    burst = Iteration(tokens=8192, sequences=prompts, prefill_tokens=8192, prefix=prefix)
    linear = spec.linear_flops(8192.0, head_tokens=float(prompts))
    assert table.seconds(burst) - linear == pytest.approx(spec.attention_flops(pairs), rel=0.1)


def test_layers_with_a_window_attend_only_within_it() -> None:
    spec = exact("llama-3.1-8b").model_copy(update={"sliding_window": 128, "window_layers": 16})
    table = engine_table(spec, "bfloat16", "bfloat16", 1, FlopKernels())
    at = np.searchsorted(table.context_grid, 8191)
    found = table.attention_seconds[0, 0, table.decode_grid == 64, at][0]
    assert found == pytest.approx(4.0 * 64 * spec.heads * spec.head_dim * 16 * (8191 + 128))


def test_experts_meet_the_tokens_of_all_copies() -> None:
    spec = exact("qwen3-30b-a3b")
    alone = engine_table(spec, "bfloat16", "bfloat16", 1, FlopKernels(), 1)
    copies = engine_table(spec, "bfloat16", "bfloat16", 1, FlopKernels(), 4, data_parallel=4)
    assert np.allclose(alone.token_seconds, copies.token_seconds), "four times the tokens on four times the devices"


def test_formats_of_experts_head_and_the_rest_are_their_own() -> None:
    kernels = FlopKernels()
    engine_table(exact("llama-3.1-8b"), "fp8", "fp8", 1, kernels)
    heads = [call for call in kernels.calls if call[1] == 128256]
    assert {call[0] for call in heads} == {"bfloat16"}
    assert {call[0] for call in kernels.calls if call not in heads} == {"fp8"}


@pytest.mark.parametrize(
    ("dtype", "tp", "fusion", "kernels"),
    [
        ("bfloat16", 1, Fusion(), 5), ("fp8", 1, Fusion(), 6), ("fp8_block", 1, Fusion(), 9), ("nvfp4", 1, Fusion(), 9),
        ("nvfp4", 2, Fusion(allreduce_norm=True, attention_quant=True), 4),
    ],
)  # fmt: skip
def test_small_kernels_of_a_layer(dtype: str, tp: int, fusion: Fusion, kernels: int) -> None:
    """Two norms, activation, rotary, cache write; quantising where nothing else does it; norms within all-reduces."""
    spec = exact("llama-3.1-8b")
    table = engine_table(spec, dtype, "bfloat16", tp, CountingKernels(), fusion=fusion)
    reductions = (2 * spec.layers + 1) * (tp > 1)
    assert table.token_seconds[0] == pytest.approx(LAUNCH * (kernels * spec.layers + 2) + reductions)


def test_the_table_ends_where_the_kernels_were_measured() -> None:
    table = engine_table(exact("llama-3.1-8b"), "bfloat16", "bfloat16", 1, FlopKernels(limit=4096))
    assert table.token_grid[-1] <= 4096
    assert table.measured


def test_a_note_of_the_kernels_makes_the_table_not_measured() -> None:
    class Noting(FlopKernels):
        def moe(self, *shape):
            self.notes.add("scaled")
            return super().moe(*shape)

    assert not engine_table(exact("qwen3-30b-a3b"), "bfloat16", "bfloat16", 1, Noting()).measured


def test_shares_of_a_prompt_add_up() -> None:
    first, second = prefix_share(300, 0), prefix_share(700, 300)
    assert float(first) == 1.0
    assert float(second) == pytest.approx(1 - 300 * 301 / (1000 * 1001))


def test_widths_of_formats() -> None:
    assert WIDTH["bfloat16"] == BF16 and WIDTH["nvfp4"] * 2 == WIDTH["fp8"] == 1.0
