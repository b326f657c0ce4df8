"""How much the answers to one prompt differ: distinct n-grams, and the entropy of what is drawn. No heavy import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from executor.experience import Samples

Sums = dict[str, float]
"""numbers that add up over engines"""


def distinct(responses: Sequence[Sequence[int]], n: int) -> float:
    """Different n-grams of some responses as a share of all of them (Li et al. 2016); 0 where none is so long."""
    grams = [tuple(tokens[i : i + n]) for tokens in responses for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def diversity(samples: Samples) -> Sums:
    """Of the samples of one engine: sums over prompts of distinct-1 and distinct-2 of a prompt's answers, and over
    tokens of -log p, whose mean estimates the entropy (nats) of the distributions that they were drawn from."""
    responses = [
        tokens[known:].tolist() for tokens, known in zip(samples.tokens, samples.num_prompt_tokens, strict=True)
    ]
    of = {int(prompt): np.flatnonzero(samples.prompts == prompt) for prompt in np.unique(samples.prompts)}
    groups = [[responses[i] for i in rows] for rows in of.values()]
    every = np.concatenate(samples.logprobs) if len(samples) else np.empty(0)
    return {
        "prompts": float(len(groups)),
        "distinct_1": sum(distinct(group, 1) for group in groups),
        "distinct_2": sum(distinct(group, 2) for group in groups),
        "tokens": float(len(every)),
        "surprise": float(-every.sum(dtype=np.float64)),
    }


def joined(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means of a step over all engines: distinct_1, distinct_2 and entropy."""
    total = {name: sum(part[name] for part in parts) for name in parts[0]}
    prompts, tokens = max(total["prompts"], 1.0), max(total["tokens"], 1.0)
    return {
        "distinct_1": total["distinct_1"] / prompts,
        "distinct_2": total["distinct_2"] / prompts,
        "sampled_entropy": total["surprise"] / tokens,
    }
