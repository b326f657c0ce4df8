"""Weights that are kept for engines that come back pass between processes as they lie in memory."""

import pickle

import pytest
import torch

from executor.loss import Weights

KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (0, 4)])
def test_weights_arrive_as_they_were(kind: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = Weights(a=torch.randn(shape).mul(9).to(kind), b=torch.ones(2, 3).t())
    found = pickle.loads(pickle.dumps(sent))
    assert found.keys() == sent.keys()
    for name, tensor in sent.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)
        found[name].zero_()  # they are the receiver's own


def test_the_bytes_of_weights_are_not_copied_into_a_message() -> None:
    sent, aside = Weights(a=torch.randn(1000, 100), b=torch.randn(500).bfloat16()), list[pickle.PickleBuffer]()
    message = pickle.dumps(sent, protocol=5, buffer_callback=aside.append)
    assert sum(buffer.raw().nbytes for buffer in aside) == 400_000 + 1000
    assert len(message) < 1000
    found = pickle.loads(message, buffers=[bytes(buffer.raw()) for buffer in aside])
    assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())
