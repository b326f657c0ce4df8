"""Int8 weights on a CPU: exact whole-number products, bounded error, a quarter of the bytes."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from executor.network import build_actor, build_critic
from executor.quantized import Int8Embedding, Int8Linear, quantize, rounded
from lab.library import model
from tests.executor.judged import MODEL, Make, judged_by, samples, scorers

SEEDS = st.integers(0, 2**31)
RMS, LARGEST = 0.08, 0.5
"""of log-probs, whose own standard deviation over tokens is 1; measured: 0.07 and 0.34"""
SHAPES = ("tiny-llama", "small-llama")


def held_bytes(network: nn.Module) -> int:
    """Bytes of parameters and buffers, each counted once."""
    held = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-6, 6, (shape[0], 1), generator=generator)
    return torch.randn(*shape, generator=generator) * sizes


@settings(deadline=None)
@given(SEEDS, st.integers(1, 20), st.integers(1, 50))
def test_rounding_errs_by_half_a_step_and_keeps_sign_and_zero(seed: int, height: int, width: int) -> None:
    rows = drawn(seed, height, width)
    rows[0] = 0.0
    whole, scale = rounded(rows)
    assert whole.dtype == torch.int8 and int(whole.min()) >= -127
    assert ((whole * scale - rows).abs() <= scale * 0.5001).all()
    assert (whole[0] == 0).all() and torch.isfinite(scale).all()
    assert (rounded(-rows)[0] == -whole).all()


@settings(deadline=None)
@given(SEEDS, st.integers(1, 40), st.integers(2, 70), st.integers(2, 30), st.booleans())
def test_a_layer_sums_exactly_and_stays_within_its_bound(
    seed: int, height: int, width: int, outputs: int, bias: bool
) -> None:
    layer = nn.Linear(width, outputs, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(drawn(seed, outputs, width))
    inputs = drawn(seed + 1, height, width)
    found = Int8Linear(layer)(inputs).double()
    (x, sx), (w, sw) = rounded(inputs), rounded(layer.weight.detach())
    whole = x.numpy().astype(np.int64) @ w.numpy().astype(np.int64).T
    offset = layer.bias.detach().double() if bias else 0.0
    product = torch.from_numpy(whole).double() * sx.double() * sw.T.double()
    slack = (product.abs() + abs(offset)) * 1e-6 + 1e-30  # of float32
    assert ((found - product - offset).abs() <= slack).all()
    true = inputs.double() @ layer.weight.detach().double().T + offset
    weights = layer.weight.detach().abs().sum(1)
    bound = (inputs.abs().sum(1, keepdim=True) * sw.T + sx * weights) / 2 + width * sx * sw.T / 4
    assert ((found - true).abs() <= bound * 1.001 + slack).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    layer, inputs = Int8Linear(nn.Linear(48, 20)), drawn(0, 1300, 48)
    together = layer(inputs)
    for rows in ([0], [1299], [5, 900], range(511, 514), range(3)):
        assert torch.equal(layer(inputs[list(rows)]), together[list(rows)])
    assert torch.equal(layer(inputs.reshape(13, 100, 48)), together.reshape(13, 100, 20))
    assert layer(inputs[:0]).shape == (0, 20)


def test_an_embedding_is_its_rounded_rows() -> None:
    table = nn.Embedding(30, 16)
    whole, scale = rounded(table.weight.detach())
    ids = torch.tensor([[3, 29], [0, 3]])
    assert torch.equal(Int8Embedding(table)(ids), (whole.float() * scale)[ids])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_logprobs_and_rewards_err_within_what_the_docstring_says(shape: str, seed: int) -> None:
    spec, generator = model(shape), torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 64, (8, 64), generator=generator)

    def read(actor: Any, critic: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            logits = actor(input_ids=ids, use_cache=False).logits[:, :-1]
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            return logprobs, critic(ids, torch.ones_like(ids))[:, -1]

    networks = build_actor(spec, seed).eval(), build_critic(spec, seed, head_std=1.0).eval()
    full, size = read(*networks), held_bytes(networks[0])
    less = [quantize(network) for network in networks]
    logprobs, rewards = read(*less)
    errors = logprobs - full[0]
    assert 0 < float(errors.pow(2).mean().sqrt()) < RMS and float(errors.abs().max()) < LARGEST
    assert abs(float(errors.mean())) < 0.02
    assert float((rewards - full[1]).abs().max()) < 0.3
    assert held_bytes(less[0]) < 0.27 * size
    assert not any(parameter.requires_grad for parameter in less[1].parameters())
    assert isinstance(less[1].value_head, nn.Linear), "a head of one output stays as it is"


def test_scorers_with_int8_weights_stay_close_to_those_without(scenario: Make) -> None:
    place = {"reference.score": {"pool": "all", "dtype": "int8"}}
    plain = judged_by(scenario, {"kind": "model"}, **MODEL)
    less = judged_by(scenario, {"kind": "model", "dtype": "int8"}, place=place, **MODEL)
    rows = samples(12)
    for role, name in (("reference", "reference_logprobs"), ("reward", "rewards")):
        ours, theirs = (np.hstack(list(scorers(chosen, role)[0].judged(rows)[name])) for chosen in (plain, less))
        assert 0 < np.abs(ours - theirs).max() < 2 * LARGEST  # the lowest temperature is 0.5
        assert np.corrcoef(ours, theirs)[0, 1] > 0.98
