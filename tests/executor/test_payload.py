"""What travels of new weights, and what an engine makes of it."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.network import build_actor
from executor.payload import BLOCK, Damaged, Packer, Parcel, Unpacker, dequantized, digest, opened, quantized
from lab.library import model
from lab.policies.weight_sync import payload_bytes

Weights = dict[str, torch.Tensor]


def weights(seed: int = 0) -> Weights:
    network = build_actor(model("tiny-llama"), seed)
    return {name: parameter.detach() for name, parameter in network.named_parameters()}


def changed(before: Weights, share: float) -> Weights:
    """The same with a share of the numbers of every tensor moved."""
    draws = torch.Generator().manual_seed(7)
    masks = {name: torch.rand(tensor.shape, generator=draws) < share for name, tensor in before.items()}
    return {name: tensor + masks[name] * 0.1 for name, tensor in before.items()}


def received(unpacker: Unpacker, parcel: Parcel) -> Weights:
    """After a journey as one blob; the tensors are copies, as an engine's are."""
    blob = bytearray(parcel.blob())
    came = opened(blob, digest(blob))
    return {name: tensor.clone() for name, tensor in unpacker.unpack(came.about, came.tensors.items())}


def assert_same(one: Weights, two: Weights) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_whole_weights_arrive_bit_for_bit(dtype: torch.dtype) -> None:
    sent = {name: tensor.to(dtype) for name, tensor in weights().items()}
    assert_same(received(Unpacker(), Packer("full").pack(sent)), sent)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 1.0])
def test_changes_bring_an_engine_to_the_same_bits_step_after_step(share: float) -> None:
    first = weights()
    packer = Packer("delta", first)
    unpacker = Unpacker({name: tensor.clone() for name, tensor in first.items()})
    now = first
    for _ in range(3):
        now = changed(now, share)
        parcel = packer.pack(now)
        assert_same(received(unpacker, parcel), now)
        assert parcel.notes["changed_share"] == pytest.approx(share, abs=0.01)
    assert_same(packer.whole().tensors, now)


def test_changes_have_the_bytes_that_the_simulation_counts() -> None:
    first = weights()
    number = sum(tensor.numel() for tensor in first.values())
    for share in (0.002, 0.2):
        parcel = Packer("delta", first).pack(changed(first, share))
        found = parcel.notes["changed_share"]
        assert parcel.num_bytes == pytest.approx(payload_bytes(number, 4, "delta", found), rel=0.02)


def test_an_engine_that_has_nothing_takes_the_whole_and_then_changes() -> None:
    first = weights()
    packer = Packer("delta", first)
    second, third = changed(first, 0.1), changed(changed(first, 0.1), 0.2)
    packer.pack(second)
    unpacker = Unpacker(weights(seed=9))
    assert_same(received(unpacker, packer.whole()), second)
    assert_same(received(unpacker, packer.pack(third)), third)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5 * BLOCK), st.floats(1e-6, 1e6), st.integers(0, 1000))
def test_eight_bits_are_off_by_half_a_step_of_their_block_at_most(number: int, size: float, seed: int) -> None:
    tensor = torch.randn(number, generator=torch.Generator().manual_seed(seed)) * size
    numbers, scales = quantized(tensor)
    assert numbers.dtype == torch.int8 and numbers.shape == tensor.shape and len(scales) == -(-number // BLOCK)
    gap = (dequantized(numbers, scales, torch.float32) - tensor).abs()
    allowed = scales.repeat_interleave(BLOCK)[:number] * 0.5001
    assert bool((gap <= allowed).all())


def test_zeros_and_scalars_survive_eight_bits() -> None:
    for tensor in (torch.zeros(300), torch.tensor(3.5), torch.full((2, 3), -7.0)):
        numbers, scales = quantized(tensor)
        torch.testing.assert_close(dequantized(numbers, scales, torch.float32), tensor)


def test_eight_bits_take_the_bytes_that_the_simulation_counts_and_say_their_error() -> None:
    sent = weights()
    parcel = Packer("int8").pack(sent)
    number = sum(tensor.numel() for tensor in sent.values())
    assert parcel.num_bytes == pytest.approx(payload_bytes(number, 4, "int8"), rel=0.01)
    found = received(Unpacker(), parcel)
    worst = max(float((found[name] - tensor).abs().max()) for name, tensor in sent.items())
    wrong = sum(float((found[name] - tensor).square().sum()) for name, tensor in sent.items())
    whole = sum(float(tensor.square().sum()) for tensor in sent.values())
    assert parcel.notes["error_max"] == pytest.approx(worst, rel=1e-5)
    assert parcel.notes["error_relative"] == pytest.approx((wrong / whole) ** 0.5, rel=1e-4)
    assert 0 < parcel.notes["error_relative"] < 0.02


def spoiled(blob: bytes) -> Iterator[bytearray]:
    """A byte flipped at the front, in the middle and at the end; half of it; nothing of it."""
    for place in (9, len(blob) // 2, len(blob) - 1):
        found = bytearray(blob)
        found[place] ^= 1
        yield found
    yield bytearray(blob[: len(blob) // 2])
    yield bytearray()


def test_damaged_bytes_are_refused() -> None:
    blob = Packer("full").pack(weights()).blob()
    for bad in spoiled(blob):
        with pytest.raises(Damaged):
            opened(bad, digest(blob))
    opened(bytearray(blob), digest(blob))
