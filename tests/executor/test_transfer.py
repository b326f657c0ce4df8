from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from executor.network import build_actor
from executor.transfer import WeightGroup, WeightSender
from executor.workers import HOST, free_port
from lab.library import model

Items = list[tuple[str, torch.Tensor]]


def sent(items: Items, num_engines: int, times: int = 1) -> tuple[list[float], list[list[Items]]]:
    """Bytes of each send, and what every receiver got each time; all ends are threads of this process."""
    port = free_port()

    def sender() -> list[float]:
        end = WeightSender(HOST, port, 1 + num_engines)
        return [end.send(items) for _ in range(times)]

    def receiver(rank: int) -> list[Items]:
        end = WeightGroup(HOST, port, rank, 1 + num_engines)
        return [list(end.receive()) for _ in range(times)]

    with ThreadPoolExecutor() as pool:
        sending = pool.submit(sender)
        receiving = [pool.submit(receiver, 1 + engine) for engine in range(num_engines)]
        return sending.result(), [future.result() for future in receiving]


def assert_same(items: Items, other: Items) -> None:
    assert [name for name, _ in items] == [name for name, _ in other]
    for (_, one), (_, two) in zip(items, other, strict=True):
        torch.testing.assert_close(one, two, atol=0, rtol=0)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_every_engine_gets_the_weights_bit_for_bit_every_time(num_engines: int) -> None:
    items = list(build_actor(model("tiny-llama"), 0).state_dict().items())
    sizes, received = sent(items, num_engines, times=2)
    assert sizes == [model("tiny-llama").weight_bytes("float32")] * 2
    for engine in received:
        for round_ in engine:
            assert_same(items, round_)


SHAPES: dict[str, Callable[[], torch.Tensor]] = {
    "a scalar": lambda: torch.tensor(3.5),
    "integers": lambda: torch.arange(7),
    "bfloat16": lambda: torch.randn(3, 5).bfloat16(),
    "a transposed view": lambda: torch.arange(12.0).reshape(3, 4).T,
    "with gradient": lambda: torch.nn.Parameter(torch.ones(2, 2)),
}


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_kinds_of_tensors(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    (size,), ((received,),) = sent([("one", tensor)], 1)
    assert size == tensor.nbytes
    assert_same([("one", tensor.detach())], received)
