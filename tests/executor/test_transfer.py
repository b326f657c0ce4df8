import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor import lora, transfer
from executor.network import build_actor
from executor.transfer import WeightGroup, WeightSender
from executor.workers import HOST, free_port
from lab.library import model
from lab.lora import Lora

Items = list[tuple[str, torch.Tensor]]


def sent(
    items: Items,
    num_engines: int,
    times: int = 1,
    base: Any = None,
    factor: Any = None,
    route: Any = "chain",
    *,
    lossy: bool = False,
) -> tuple[list[float], list[list[Items]]]:
    """Bytes of each send, and what every receiver got each time; all ends are threads of this process."""
    port = free_port()

    def sender() -> list[float]:
        end = WeightSender(HOST, port, 1 + num_engines, base, factor, route, lossy=lossy)
        return [end.send(items) for _ in range(times)]

    def receiver(rank: int) -> list[Items]:
        end = WeightGroup(HOST, port, rank, 1 + num_engines, lossy=lossy)
        return [list(end.receive()) for _ in range(times)]

    with ThreadPoolExecutor() as pool:
        sending = pool.submit(sender)
        receiving = [pool.submit(receiver, 1 + engine) for engine in range(num_engines)]
        return sending.result(), [future.result() for future in receiving]


def assert_same(items: Items, other: Items) -> None:
    assert [name for name, _ in items] == [name for name, _ in other]
    for (_, one), (_, two) in zip(items, other, strict=True):
        torch.testing.assert_close(one, two, atol=0, rtol=0)


@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize("route", ["chain", "tree", "flat"])
@pytest.mark.parametrize("num_engines", [1, 2, 5])
def test_every_engine_gets_the_weights_bit_for_bit_every_time(
    num_engines: int, route: str, lossy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1 << 20)
    items = list(build_actor(model("tiny-llama"), 0).state_dict().items())
    sizes, received = sent(items, num_engines, times=2, route=route, lossy=lossy)
    assert sizes == [model("tiny-llama").weight_bytes("float32")] * 2
    for engine in received:
        for round_ in engine:
            assert_same(items, round_)


@given(st.sampled_from(["chain", "tree", "flat"]), st.integers(2, 40))
def test_every_end_is_sent_to_once_by_one_that_has_it_already(route: str, num_ends: int) -> None:
    """In a tree the number of those who have it doubles with every round."""
    hops = [transfer.HOPS[route](rank, num_ends) for rank in range(num_ends)]
    had = {0: 0}
    for rank, (_, targets) in enumerate(hops):
        for place, target in enumerate(targets):
            assert hops[target][0] == rank and target not in had
            had[target] = had[rank] + place + 1
    assert sorted(had) == list(range(num_ends)) and hops[0][0] is None
    rounds = {"chain": num_ends - 1, "flat": num_ends - 1, "tree": (num_ends - 1).bit_length()}
    assert max(had.values()) == rounds[route]


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


def test_tensors_that_do_not_fit_one_broadcast_go_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BUCKET_BYTES", 100)
    items = [(str(size), torch.arange(size, dtype=torch.float32)) for size in (3, 20, 100, 1, 2)]
    _, ((received,),) = sent(items, 1)
    assert_same(items, received)


def test_only_adapters_travel_and_the_engine_merges_them() -> None:
    """Merged by the engine, the network says what it says with adapters beside its matrices."""
    adapted, ids = build_actor(model("tiny-llama"), 3), torch.arange(4, 24)[None]
    lora.add_adapters(adapted, Lora(rank=4, alpha=6.0), seed=1)
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for number, parameter in enumerate(trained.values()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) / 9)
    base, plain = dict(build_actor(model("tiny-llama"), 3).named_parameters()), build_actor(model("tiny-llama"), 3)
    matrices = {name: base[name] for name in lora.matrices(trained)}
    sizes, received = sent(list(trained.items()), 2, 1, matrices, 6.0 / 4)
    assert sizes == [4.0 * Lora(rank=4, alpha=6.0).parameters(model("tiny-llama"))]
    for ((items,),) in zip(received, strict=True):
        assert {name for name, _ in items} == set(matrices)
        plain.load_state_dict(dict(items), strict=False)
        torch.testing.assert_close(plain(input_ids=ids).logits, adapted(input_ids=ids).logits, atol=1e-4, rtol=0)
        assert (
            build_actor(model("tiny-llama"), 3)(input_ids=ids).logits - adapted(input_ids=ids).logits
        ).abs().max() > 0.1


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"{HOST}:{port}: another program has taken the port"):
            WeightSender(HOST, port, 2)
