"""Prompts with responses of other prompts, from which KTO estimates how far the policy is from the reference.

Arrays only: no torch, so the reference's worker and the trainer build the same ones.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from executor.experience import Samples
from lab.policies.microbatch import minibatches


def partners(prompts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of each sample of a mini-batch, [n], whose response it is read with: a few places on, which is another prompt's
    where none has more than half of the samples; else those of other prompts in turn, where there are any."""
    shift = int(np.unique(prompts, return_counts=True)[1].max(initial=0))
    found = (np.arange(len(prompts)) + shift) % max(len(prompts), 1)
    for i in np.flatnonzero(prompts[found] == prompts):
        others = np.flatnonzero(prompts != prompts[i])
        found[i] = others[i % len(others)] if len(others) else found[i]
    return found


def mismatched(samples: Samples, minibatch_samples: int) -> Samples:
    """Every prompt with a response of another prompt of its mini-batch (Ethayarajh et al. 2024, section 4.1)."""
    tokens = [row[:0] for row in samples.tokens]
    for chosen in minibatches(len(samples), minibatch_samples):
        for i, partner in zip(chosen, partners(samples.prompts[chosen]), strict=True):
            start, other = samples.num_prompt_tokens[i], chosen[partner]
            response = samples.tokens[other][samples.num_prompt_tokens[other] :]
            tokens[i] = np.concatenate([samples.tokens[i][:start], response])
    return replace(samples, tokens=tokens, logprobs=[row[:0] for row in samples.logprobs], columns={})
