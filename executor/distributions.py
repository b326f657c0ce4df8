"""How rewards, advantages, KL and lengths of a step's samples are spread, for whoever watches the run. Arrays only."""

from __future__ import annotations

import numpy as np

from executor.experience import Samples
from executor.observed import Distribution
from lab.watched import BY_NAME


def distributions(samples: Samples) -> dict[str, Distribution]:
    """By metric, over the samples of a step with all their columns; what they do not have is left out."""
    columns = samples.columns
    lengths = np.asarray(samples.lengths) - samples.num_prompt_tokens
    found = {"response_tokens": lengths.astype(np.float64)}
    if "rewards" in columns:
        found["reward_distribution"] = np.asarray(columns["rewards"], dtype=np.float64)
    if "advantages" in columns and sum(map(len, columns["advantages"])) == lengths.sum():
        found["advantage_distribution"] = _means(columns["advantages"], lengths)
    if "reference_logprobs" in columns:
        policy = columns.get("old_logprobs", samples.logprobs)
        ours, theirs = np.concatenate(policy), np.concatenate(columns["reference_logprobs"])
        if len(ours) == len(theirs) == lengths.sum():
            found["kl_distribution"] = _means([ours.astype(np.float64) - theirs], lengths)
    return {name: spread(numbers, BY_NAME[name].edges) for name, numbers in found.items()}


def spread(numbers: np.ndarray, edges: tuple[float, ...]) -> Distribution:
    """Numbers [N] in buckets; each counts in the first one whose upper edge is not below it. NaN counts nowhere."""
    kept = numbers[~np.isnan(numbers)]
    counts = np.bincount(np.searchsorted(edges, kept, side="left"), minlength=len(edges) + 1)
    return Distribution(counts=tuple(counts.tolist()), total=float(kept.sum()))


def _means(rows: list[np.ndarray], lengths: np.ndarray) -> np.ndarray:
    """Of each sample over its response tokens, [N], from rows laid end to end; 0 for an empty response."""
    sample = np.repeat(np.arange(len(lengths)), lengths)
    sums = np.bincount(sample, np.concatenate(rows).astype(np.float64), minlength=len(lengths))
    means: np.ndarray = sums / np.maximum(lengths, 1)
    return means
