"""Beam search on top of an engine: the likeliest responses that a search of some width finds.

As vLLM does it: every token of every beam is a request of its own, whose prompt is what the beam has so far; blocks of
the KV cache are found again where prefix caching is on. Nothing is drawn, so seeds have no meaning here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from executor.inference import Ended, InferenceBackend, Iteration, Progress, Request

Candidates = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Beam:
    """A response that is searched on, or has ended."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    num_cached_tokens: int = 0
    ended: bool = False

    @property
    def score(self) -> float:
        """Mean log-prob of a token: a beam that has ended competes with longer ones."""
        return sum(self.logprobs) / max(len(self.logprobs), 1)

    def grown(self, token: int, logprob: float, ended: bool) -> Beam:
        return replace(self, tokens=(*self.tokens, token), logprobs=(*self.logprobs, logprob), ended=ended)


def advanced(beams: Sequence[Beam], candidates: Sequence[Candidates], width: int, request: Request) -> list[Beam]:
    """The best `width` beams one token on: of those that have ended, and of all continuations of the others.

    `candidates` of each of `beams`, ids and log-probs; none of one that has ended. Ties go to the first.
    """
    found = [beam for beam in beams if beam.ended]
    for beam, offered in zip(beams, candidates, strict=True):
        longest = len(beam.tokens) + 1 == request.num_tokens
        found += [beam.grown(token, value, longest or token in request.stop) for token, value in offered]
    return heapq.nlargest(width, found, key=lambda beam: beam.score)


def search(backend: InferenceBackend, requests: Sequence[Request]) -> Iterator[Progress]:
    """Runs beam search for requests that come in groups, one for each beam of a prompt, the samples of a group equal.

    Ends with one progress in which all have ended: the first sample of a prompt has its best beam, and so on.
    """
    groups: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.prompt_index, []).append(index)
    beams = {prompt: [Beam()] for prompt in groups}
    while open_beams := [(p, b) for p, group in beams.items() for b in group if not b.ended]:
        offered: dict[int, Ended] = {}
        asked = [_next(requests[groups[p][0]], beam, len(groups[p])) for p, beam in open_beams]
        for progress in backend.generate(asked):
            offered |= {ended.index: ended for ended in progress.ended}
            yield replace(progress, ended=())
        answers = iter([offered[i] for i in range(len(asked))])
        for prompt, group in beams.items():
            said = [None if beam.ended else next(answers) for beam in group]
            beams[prompt] = _stepped(group, said, requests[groups[prompt][0]], len(groups[prompt]))
    yield Progress(start_s=0.0, end_s=0.0, iterations=list[Iteration](), ended=list(_ended(groups, beams)))


def _stepped(group: Sequence[Beam], said: Sequence[Ended | None], request: Request, width: int) -> list[Beam]:
    counted = [
        beam if ended is None else replace(beam, num_cached_tokens=beam.num_cached_tokens + ended.num_cached_tokens)
        for beam, ended in zip(group, said, strict=True)
    ]
    return advanced(counted, [() if ended is None else ended.candidates for ended in said], width, request)


def _next(request: Request, beam: Beam, width: int) -> Request:
    """Asks for the continuations of a beam: twice as many as there are beams, so that some may end."""
    return replace(request, prompt=[*request.prompt, *beam.tokens], num_tokens=1, stop=(), num_candidates=2 * width)


def _ended(groups: dict[int, list[int]], beams: dict[int, list[Beam]]) -> Iterator[Ended]:
    for prompt, indices in groups.items():
        found = beams[prompt]
        for place, index in enumerate(indices):
            beam = found[min(place, len(found) - 1)]  # a vocabulary smaller than the width
            yield Ended(
                index=index, tokens=list(beam.tokens), logprobs=np.asarray(beam.logprobs, dtype=np.float32),
                num_cached_tokens=beam.num_cached_tokens,
            )  # fmt: skip
