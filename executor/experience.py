"""The samples of one step as they travel from worker to worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Samples:
    """N samples of one step, grouped by prompt: sample i answers prompt i // samples_per_prompt of the step."""

    step: int
    policy_version: int
    """of the actor that generated them"""
    prompts: NDArray[np.int64]
    """index of each sample's prompt within the step, shape [N]"""
    num_prompt_tokens: NDArray[np.int64]
    """shape [N]"""
    tokens: list[NDArray[np.int64]]
    """prompt and response of each sample"""
    logprobs: list[NDArray[np.float32]]
    """log-probability of each response token under the policy that drew it, at the sampling temperature"""
    columns: dict[str, Any] = field(default_factory=dict)
    """rewards [N]; and lists of one array per sample, one number per response token: reference_logprobs, values,
    advantages, returns"""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, prompt and response."""
        return [len(tokens) for tokens in self.tokens]

    def with_columns(self, **columns: Any) -> Samples:
        return replace(self, columns=self.columns | columns)


def merge(parts: Sequence[Samples]) -> Samples:
    """The samples of several engines as one step's, in the order of prompts; samples of a prompt stay in order."""
    prompts = np.concatenate([part.prompts for part in parts])
    order = np.argsort(prompts, kind="stable")
    tokens = [item for part in parts for item in part.tokens]
    logprobs = [item for part in parts for item in part.logprobs]
    return Samples(
        step=parts[0].step, policy_version=min(part.policy_version for part in parts), prompts=prompts[order],
        num_prompt_tokens=np.concatenate([part.num_prompt_tokens for part in parts])[order],
        tokens=[tokens[i] for i in order], logprobs=[logprobs[i] for i in order],
    )  # fmt: skip
