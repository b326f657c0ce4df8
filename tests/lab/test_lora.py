"""What adapters add to a pass, against a count by hand."""

import pytest

from lab.library import model
from lab.lora import Lora
from lab.measurement import pass_quantities

SPEC = model("tiny-llama")
RANK = 4
PLAIN = pass_quantities(SPEC, "actor", 3, 20)


def matrices() -> list[tuple[int, int]]:
    """Inputs and outputs of every matrix of one layer."""
    heads, kv = SPEC.heads * SPEC.head_dim, SPEC.kv_heads * SPEC.head_dim
    attention = [(SPEC.hidden, heads), (SPEC.hidden, kv), (SPEC.hidden, kv), (heads, SPEC.hidden)]
    return [*attention, *[(SPEC.hidden, SPEC.intermediate)] * 2, (SPEC.intermediate, SPEC.hidden)]


def test_a_forward_pass_does_both_products_and_a_backward_pass_leaves_frozen_gradients_out() -> None:
    lora = Lora(rank=RANK)
    ends = sum(inputs + outputs for inputs, outputs in matrices()) * SPEC.layers
    share = RANK * ends / SPEC.active_matrix_parameters
    forward, backward = lora.adapted(SPEC, PLAIN), lora.adapted(SPEC, PLAIN, 2.0)
    assert forward["linear_flops"] == pytest.approx(PLAIN["linear_flops"] * (1 + share))
    assert backward["linear_flops"] == pytest.approx(PLAIN["linear_flops"] * (1 / 2 + share))
    assert lora.adapted(SPEC, PLAIN, 3.0)["linear_flops"] == pytest.approx(PLAIN["linear_flops"] * (2 / 3 + share))
    assert forward["adapter_values"] == backward["adapter_values"] == 60 * ends


def test_nothing_else_of_a_pass_changes() -> None:
    changed = {"linear_flops", "adapter_values"}
    found = Lora(rank=RANK).adapted(SPEC, PLAIN)
    assert {k: v for k, v in found.items() if k not in changed} == {k: v for k, v in PLAIN.items() if k not in changed}
