"""The engine on transformers alone, in this process: its draws against distributions computed naively."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, TopPLogitsWarper

from executor.inference import Ended, Progress, Request
from executor.network import build_actor, save
from executor.origin import origin
from executor.transfer import WeightSender
from executor.transformers_engine import TransformersBackend, distributions
from executor.workers import HOST, free_port
from lab.scenario import Scenario

CLOSE = 1e-4
PROMPTS = ([1, 5, 6], [1, 9, 8, 7, 6, 5, 4], [1], [1, 33, 12, 40, 40])
Make = Callable[..., Scenario]


@pytest.fixture(scope="module")
def chosen(scenario: Make) -> Scenario:
    engine = [{"pool": "all", "backend": "transformers"}]
    return scenario("quickstart", place={"actor.generate": engine}, rollout={"max_num_seqs": 6})


@pytest.fixture(scope="module")
def network(chosen: Scenario) -> torch.nn.Module:
    return build_actor(*origin(chosen, "actor")).eval()


@pytest.fixture(scope="module")
def backend(
    chosen: Scenario, network: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory
) -> TransformersBackend:
    return started(chosen, network, tmp_path_factory.mktemp("actor"))


def started(chosen: Scenario, network: torch.nn.Module, folder: Path) -> TransformersBackend:
    save(network, folder)
    return TransformersBackend(chosen, chosen.team("actor", "generate")[0], folder)


def asked(**about: object) -> list[Request]:
    """Requests with prompts of four lengths, three samples of each, with responses of other lengths."""
    return [
        Request(
            prompt_index=i,
            sample=sample,
            prompt=list(prompt),
            num_tokens=3 + 2 * sample + i,
            seed=100 * i + sample,
            **about,
        )  # type: ignore[arg-type]
        for i, prompt in enumerate(PROMPTS)
        for sample in range(3)
    ]


def run(backend: TransformersBackend, requests: Sequence[Request]) -> tuple[list[Ended], list[Progress]]:
    found = list(backend.generate(requests))
    ended = {one.index: one for progress in found for one in progress.ended}
    return [ended[i] for i in range(len(requests))], found


def naive(network: torch.nn.Module, request: Request, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probs [T, vocabulary] before each response token: whole forward passes, and transformers' own processors."""
    rows = []
    for i in range(len(tokens)):
        ids = torch.tensor([[*request.prompt, *tokens[:i]]])
        with torch.no_grad():
            scores = network(input_ids=ids).logits[:, -1].float()
        if request.repetition_penalty != 1:
            scores = RepetitionPenaltyLogitsProcessor(request.repetition_penalty)(ids, scores)
        scores = scores / request.temperature
        if request.top_p < 1:
            scores = TopPLogitsWarper(request.top_p)(ids, scores)
        rows.append(torch.log_softmax(scores, -1)[0])
    return torch.stack(rows)


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"temperature": 0.6},
        {"top_p": 0.7},
        {"repetition_penalty": 1.5},
        {"temperature": 1.3, "top_p": 0.8, "repetition_penalty": 0.8},
    ],
)
def test_logprobs_are_those_of_the_distribution_drawn_from(
    backend: TransformersBackend, network: torch.nn.Module, about: dict[str, float]
) -> None:
    requests = asked(**about)
    ended, _ = run(backend, requests)
    for request, one in zip(requests, ended, strict=True):
        assert len(one.tokens) == request.num_tokens
        expected = naive(network, request, one.tokens)
        found = expected.gather(1, torch.tensor(one.tokens)[:, None])[:, 0].numpy()
        assert np.abs(found - one.logprobs).max() < CLOSE


def test_draws_are_as_frequent_as_the_distribution_says(backend: TransformersBackend, network: torch.nn.Module) -> None:
    """First tokens of 3000 seeds, within four standard deviations of their expected counts."""
    number, request = 3000, Request(prompt_index=0, prompt=[1, 5, 6], num_tokens=1, seed=0)
    logits = torch.log_softmax(naive(network, request, [0])[0], -1)
    rows = [Request(prompt_index=0, prompt=[1, 5, 6], num_tokens=1, seed=7919 * i + 3) for i in range(number)]
    size, backend._size = backend._size, number
    ended, _ = run(backend, rows)
    backend._size = size
    counts = np.bincount([one.tokens[0] for one in ended], minlength=len(logits))
    share = logits.exp().numpy()
    assert (np.abs(counts - number * share) <= 4 * np.sqrt(number * share * (1 - share)) + 1).all()


def test_a_response_depends_on_its_own_seed_alone(backend: TransformersBackend) -> None:
    requests = asked()
    whole, _ = run(backend, requests)
    for chosen in ([4], [11, 0, 7], list(range(12))[::-1]):
        part, _ = run(backend, [requests[i] for i in chosen])
        assert [one.tokens for one in part] == [whole[i].tokens for i in chosen]
    again = [Request(prompt_index=0, prompt=[1, 5, 6], num_tokens=30, seed=seed) for seed in (1, 1, 2)]
    found, _ = run(backend, again)
    assert found[0].tokens == found[1].tokens != found[2].tokens


def test_batches_are_static_and_passes_count_what_they_did(backend: TransformersBackend) -> None:
    """Six rows at once: the second batch begins when all of the first have ended, and nothing is computed for the rest."""
    requests = asked()
    _, progress = run(backend, requests)
    firsts = [i for i, one in enumerate(progress) if one.iterations[0].prefill_tokens]
    assert firsts == [0, max(request.num_tokens for request in requests[:6])]
    ended = [one.index for part in progress[: firsts[1]] for one in part.ended]
    assert sorted(ended) == list(range(6))
    passes = [one.iterations[0] for one in progress]
    fed = sum(len(request.prompt) + request.num_tokens - 1 for request in requests)
    assert sum(one.tokens for one in passes) == fed
    context = sum((n := len(request.prompt) + request.num_tokens - 1) * (n + 1) // 2 for request in requests)
    assert sum(one.token_context for one in passes) == context
    assert [one.waiting for one in passes] == [6] * firsts[1] + [0] * (len(passes) - firsts[1])


def test_responses_end_at_a_stop_token_or_at_the_longest(backend: TransformersBackend) -> None:
    stop = (5, 6, 7, 8, 9, 10)
    requests = [Request(prompt_index=0, prompt=[1], num_tokens=20, seed=seed, stop=stop) for seed in range(24)]
    ended, _ = run(backend, requests)
    lengths = [len(one.tokens) for one in ended]
    assert min(lengths) < 20
    for one in ended:
        assert not set(one.tokens[:-1]) & set(stop)
        assert one.tokens[-1] in stop or len(one.tokens) == 20


def test_greedy_tokens_are_the_likeliest(backend: TransformersBackend, network: torch.nn.Module) -> None:
    requests = [
        Request(prompt_index=0, prompt=list(prompt), num_tokens=6, seed=1, temperature=0.0) for prompt in PROMPTS
    ]
    ended, _ = run(backend, requests)
    for request, one in zip(requests, ended, strict=True):
        ids = torch.tensor([[*request.prompt, *one.tokens]])
        with torch.no_grad():
            logits = network(input_ids=ids).logits[0, len(request.prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == one.tokens


def test_the_nucleus_is_the_smallest_set_that_holds_top_p() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 4))
    kept = []
    for limit in (0.3, 0.6, 0.75, 1.0):
        request = Request(prompt_index=0, prompt=[], num_tokens=1, seed=0, top_p=limit)
        kept.append(int(torch.isfinite(distributions(logits[:1], [request], [[]])).sum()))
    assert kept == [1, 2, 3, 4]


def test_weights_that_are_sent_take_effect(chosen: Scenario, tmp_path: Path) -> None:
    network = build_actor(*origin(chosen, "actor")).eval()
    engine = started(chosen, network, tmp_path)
    request, port = Request(prompt_index=0, prompt=[1, 5], num_tokens=8, seed=3), free_port()
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(WeightSender, HOST, port, 2)
        engine.connect(HOST, port, 1, 2)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
        stale = run(engine, [request])[0][0]
        sent = pool.submit(sending.result().send, network.named_parameters())
        engine.receive_weights()
        sent.result()
    fresh = run(engine, [request])[0][0]

    def gap(one: Ended) -> float:
        expected = naive(network, request, one.tokens).gather(1, torch.tensor(one.tokens)[:, None])[:, 0].numpy()
        return float(np.abs(expected - one.logprobs).max())

    assert gap(fresh) < CLOSE < gap(stale)
