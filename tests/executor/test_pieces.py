"""An engine driven call by call: requests come and leave while others run, and weights change under those that go on."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from executor.inference import Ended, Request
from executor.network import build_actor, save
from executor.origin import origin
from executor.producing import versions_of
from executor.transformers_engine import TransformersBackend
from lab.scenario import Scenario

CLOSE = 1e-3
Make = Callable[..., Scenario]


def asked(number: int = 6, num_tokens: int = 20) -> list[Request]:
    return [
        Request(prompt_index=i, prompt=[1, 5 + i, *[7] * i], num_tokens=num_tokens + i, seed=31 * i)
        for i in range(number)
    ]


def read(network: torch.nn.Module, request: Request, tokens: Sequence[int]) -> np.ndarray:
    """Log-probs of response tokens by one pass over all of them."""
    ids = torch.tensor([[*request.prompt, *tokens]])
    with torch.no_grad():
        logprobs = torch.log_softmax(network(input_ids=ids).logits[0].float(), -1)
    first = len(request.prompt)
    return logprobs[first - 1 : -1].gather(1, ids[0, first:, None]).squeeze(1).numpy()


class Engine:
    """An engine on transformers, and the network that it has."""

    def __init__(self, scenario: Scenario, folder: Path, rows: int = 32) -> None:
        self.network = build_actor(*origin(scenario, "actor")).eval()
        save(self.network, folder)
        self.backend = TransformersBackend(scenario, scenario.team("actor", "generate")[0], folder)
        self.backend._size = rows

    def rest(self) -> dict[int, Ended]:
        found: dict[int, Ended] = {}
        while self.backend.unfinished:
            found |= {one.index: one for one in self.backend.advance().ended}
        return found

    def change(self) -> torch.nn.Module:
        """New weights come, as they would from a trainer; returns the network as it was."""
        old = copy.deepcopy(self.network)
        with torch.no_grad():
            for parameter in self.network.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
            own = dict(self.backend._network.named_parameters())
            for name, parameter in self.network.named_parameters():
                own[name].copy_(parameter)
        return old


@pytest.fixture
def engine(scenario: Make, tmp_path: Path) -> Engine:
    torch.manual_seed(3)
    chosen = scenario("quickstart", place={"actor.generate": [{"pool": "all", "backend": "transformers"}]})
    return Engine(chosen, tmp_path)


def test_requests_have_the_numbers_that_they_were_given(engine: Engine) -> None:
    requests = asked()
    whole = {i: one.tokens for i, one in enumerate(ended_in_order(engine, requests))}
    engine.backend.submit(requests[:3], [10, 20, 30])
    for _ in range(5):
        engine.backend.advance()
    engine.backend.submit(requests[3:], [40, 50, 60])
    assert {one.sample: one.response_tokens for one in engine.backend.running()} == {10: 5, 20: 5, 30: 5}
    assert engine.backend.unfinished == 6
    found = engine.rest()
    assert {number // 10 - 1: one.tokens for number, one in found.items()} == whole


def ended_in_order(engine: Engine, requests: Sequence[Request]) -> list[Ended]:
    found = {one.index: one for progress in engine.backend.generate(requests) for one in progress.ended}
    return [found[i] for i in range(len(requests))]


def test_what_is_aborted_leaves_and_changes_nothing_for_others(engine: Engine) -> None:
    requests = asked()
    whole = ended_in_order(engine, requests)
    engine.backend._size = 4
    engine.backend.submit(requests, range(6))
    for _ in range(7):
        engine.backend.advance()
    assert engine.backend.abort([1, 5, 99]) == {1: 7, 5: 0}
    found = engine.rest()
    assert sorted(found) == [0, 2, 3, 4]
    assert all(one.tokens == whole[number].tokens for number, one in found.items())


def test_an_empty_engine_does_nothing(engine: Engine) -> None:
    progress = engine.backend.advance()
    assert progress.iterations == progress.ended == []


@pytest.mark.parametrize("forget", [True, False])
def test_tokens_before_new_weights_are_of_the_old_ones_and_those_after_of_the_new(engine: Engine, forget: bool) -> None:
    """Whoever keeps the old keys and values draws from neither."""
    requests, before = asked(), 8
    engine.backend.submit(requests, range(6))
    for _ in range(before):
        engine.backend.advance()
    engine.backend.hold()
    old = engine.change()
    engine.backend.go_on(forget)
    gaps = []
    for number, one in engine.rest().items():
        by_old, by_new = (read(network, requests[number], one.tokens) for network in (old, engine.network))
        assert np.abs(one.logprobs[:before] - by_old[:before]).max() < CLOSE
        assert np.abs(by_old - by_new).max() > 10 * CLOSE, "the change shows"
        gaps.append(np.abs(one.logprobs[before:] - by_new[before:]).max())
    assert max(gaps) < CLOSE if forget else min(gaps) > CLOSE


def test_the_pass_after_a_change_computes_everything_anew(engine: Engine) -> None:
    engine.backend.submit(asked(2), [0, 1])
    for _ in range(4):
        engine.backend.advance()
    engine.backend.go_on(forget=True)
    [found] = engine.backend.advance().iterations
    assert found.tokens == found.prefill_tokens == (2 + 4) + (3 + 4)
    assert found.recomputed_tokens == found.tokens - 2


def test_each_token_knows_its_version() -> None:
    assert versions_of([(3, 0)], 4).tolist() == [3, 3, 3, 3]
    assert versions_of([(3, 0), (4, 2), (6, 3)], 5).tolist() == [3, 3, 4, 6, 6]
    assert versions_of([(3, 0), (4, 0)], 2).tolist() == [4, 4]
