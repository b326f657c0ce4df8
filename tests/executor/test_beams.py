"""Beam search on a real engine, against all sequences there are."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from executor.beams import Beam, advanced, search
from executor.inference import Ended, Request
from executor.network import build_actor, save
from executor.origin import origin
from executor.transformers_engine import TransformersBackend
from lab.scenario import Scenario

VOCABULARY = 64
PROMPT = [1, 5, 6, 7]


@pytest.fixture(scope="module")
def engine(
    scenario: Callable[..., Scenario], tmp_path_factory: pytest.TempPathFactory
) -> tuple[TransformersBackend, torch.nn.Module]:
    chosen = scenario("quickstart", place={"actor.generate": [{"pool": "all", "backend": "transformers"}]})
    network = build_actor(*origin(chosen, "actor")).eval()
    folder: Path = tmp_path_factory.mktemp("actor")
    save(network, folder)
    return TransformersBackend(chosen, chosen.team("actor", "generate")[0], folder), network


def found(backend: TransformersBackend, width: int, **about: object) -> list[Ended]:
    about = {"num_tokens": 3, **about}
    requests = [Request(prompt_index=0, sample=i, prompt=PROMPT, seed=i, **about) for i in range(width)]  # type: ignore[arg-type]
    ended = {one.index: one for progress in search(backend, requests) for one in progress.ended}
    return [ended[i] for i in range(width)]


def everything(network: torch.nn.Module, length: int) -> dict[tuple[int, ...], float]:
    """The log-prob of every sequence of so many tokens."""
    heads = {(): 0.0}
    for _ in range(length):
        rows = list(heads)
        with torch.no_grad():
            logits = network(input_ids=torch.tensor([[*PROMPT, *row] for row in rows])).logits[:, -1]
        following = torch.log_softmax(logits, -1).double()
        heads = {
            (*row, token): heads[row] + float(following[i, token])
            for (i, row), token in itertools.product(enumerate(rows), range(VOCABULARY))
        }
    return heads


def test_a_beam_as_wide_as_the_vocabulary_finds_the_best_of_all(
    engine: tuple[TransformersBackend, torch.nn.Module],
) -> None:
    backend, network = engine
    beams = found(backend, VOCABULARY, num_tokens=2)
    ranked = sorted(everything(network, 2).items(), key=lambda pair: -pair[1])[:VOCABULARY]
    assert [tuple(beam.tokens) for beam in beams] == [tokens for tokens, _ in ranked]
    totals = [float(beam.logprobs.sum()) for beam in beams]
    assert totals == pytest.approx([value for _, value in ranked], abs=1e-4)


def test_one_beam_is_greedy_and_wider_ones_are_no_worse(engine: tuple[TransformersBackend, torch.nn.Module]) -> None:
    backend, _ = engine
    greedy = [Request(prompt_index=0, prompt=PROMPT, num_tokens=9, seed=0, temperature=0.0)]
    [best] = [one for progress in backend.generate(greedy) for one in progress.ended]
    scores = []
    for width in (1, 2, 8):
        beams = found(backend, width, num_tokens=9)
        assert len({tuple(beam.tokens) for beam in beams}) == width
        assert np.all(np.diff([beam.logprobs.sum() for beam in beams]) <= 1e-6)
        scores.append(float(beams[0].logprobs.sum()))
        if width == 1:
            assert beams[0].tokens == best.tokens
    assert scores[0] <= scores[2] + 1e-6
    assert scores[2] > scores[0]


def test_beams_that_have_ended_compete_by_their_mean() -> None:
    request = Request(prompt_index=0, prompt=[1], num_tokens=4, seed=0, stop=(2,))
    ended = Beam(tokens=(5, 2), logprobs=(-1.0, -1.0), ended=True)
    running = Beam(tokens=(5, 6), logprobs=(-1.0, -2.0))
    kept = advanced([ended, running], [(), ((2, -0.3), (7, -0.9), (8, -5.0))], 3, request)
    assert [beam.tokens for beam in kept] == [(5, 2), (5, 6, 2), (5, 6, 7)]
    assert [beam.ended for beam in kept] == [True, True, False]
    last = advanced([kept[2]], [((9, -0.1),)], 3, request)
    assert last[0].ended, "it has all its tokens"


def test_beams_are_more_alike_and_more_likely_than_samples(engine: tuple[TransformersBackend, torch.nn.Module]) -> None:
    from executor.diversity import distinct

    backend, _ = engine
    beams = found(backend, 8, num_tokens=12)
    drawn = [Request(prompt_index=0, sample=i, prompt=PROMPT, num_tokens=12, seed=i) for i in range(8)]
    samples = [one for progress in backend.generate(drawn) for one in progress.ended]
    for n in (1, 2):
        assert distinct([one.tokens for one in beams], n) < distinct([one.tokens for one in samples], n)
    assert np.mean([one.logprobs.mean() for one in beams]) > np.mean([one.logprobs.mean() for one in samples])
