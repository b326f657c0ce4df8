"""How long the responses to a prompt will probably be, from those it had before; never from the one to come."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LengthHistory:
    """Sums over the responses that came back, by prompt of the data set."""

    num_seen: Ints
    """(num_prompts,) responses that came back"""
    total_tokens: Floats
    """(num_prompts,) their tokens"""
    prior_tokens: float
    """expected of a prompt while nothing at all came back"""
    prior_weight: float = 1.0
    """the mean over all prompts counts like so many responses of a prompt's own"""

    @classmethod
    def empty(cls, num_prompts: int, prior_tokens: float, prior_weight: float = 1.0) -> LengthHistory:
        """Nothing came back yet."""
        seen, tokens = np.zeros(num_prompts, np.int64), np.zeros(num_prompts)
        return cls(num_seen=seen, total_tokens=tokens, prior_tokens=prior_tokens, prior_weight=prior_weight)

    def with_responses(self, prompts: npt.ArrayLike, tokens: npt.ArrayLike) -> LengthHistory:
        """The history after responses of so many tokens to these prompts (indices, repeats allowed) came back."""
        size = len(self.num_seen)
        index = np.asarray(prompts, np.int64)
        return replace(
            self,
            num_seen=self.num_seen + np.bincount(index, minlength=size),
            total_tokens=self.total_tokens + np.bincount(index, np.asarray(tokens, float), minlength=size),
        )

    def predict(self, prompts: npt.ArrayLike) -> Floats:
        """Expected response tokens of these prompts: each one's own mean, drawn towards the mean over all."""
        index, seen = np.asarray(prompts, np.int64), int(self.num_seen.sum())
        overall = float(self.total_tokens.sum()) / seen if seen else self.prior_tokens
        weight = self.num_seen[index] + self.prior_weight
        own = self.total_tokens[index] + self.prior_weight * overall
        return np.asarray(np.divide(own, weight, out=np.full(len(index), float(overall)), where=weight > 0))
