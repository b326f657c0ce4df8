"""Dealing the prompts of a step to the rollout engines, step after step. Both worlds hold one dealer for a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lab.policies.dispatch import DISPATCH, Engines, Prompts
from lab.policies.lengths import LengthHistory
from lab.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one engine gets of a step."""

    prompts: list[int]
    """indices within the step"""
    notes: dict[str, Any]
    """the decision as the span of the engine's rollout records it: `dispatch` the rule, `prompts`, `speed`, and where
    the rule goes by it `predicted_tokens` of each of these prompts"""


class Dealer:
    """Deals by `rollout.dispatch` and keeps what came back.

    A step's prompts are all dealt when its rollout starts, and the engines are idle then: a rollout starts after the
    one before has ended.
    """

    def __init__(self, scenario: Scenario) -> None:
        workload = scenario.workload
        self._scenario = scenario
        self._speed = [engine.speed for engine in scenario.team("actor", "generate")]
        self._history = LengthHistory.empty(workload.prompts_per_step, workload.response_tokens.mean)
        self._new: list[tuple[npt.ArrayLike, npt.ArrayLike]] = []

    def deal(self, step: int) -> list[Share]:
        """The share of each engine, in the order of the engines."""
        rule, prompts = self._scenario.rollout.dispatch, self.prompts(step)
        shares = DISPATCH[rule](prompts, Engines.idle(self._speed))
        return [self._share(rule, prompts, *pair) for pair in zip(shares, self._speed, strict=True)]

    def prompts(self, step: int) -> Prompts:
        """The prompts of a step as the dispatcher sees them: it knows their own lengths and predicts the responses'."""
        workload = self._scenario.workload
        known = workload.prompt_lengths(self._scenario.seed, step)
        return Prompts(
            predicted_tokens=known + self._learned().predict(np.arange(len(known))),
            samples_per_prompt=workload.samples_per_prompt, num_buckets=len(set(self._speed)),
        )  # fmt: skip

    def returned(self, prompts: npt.ArrayLike, tokens: npt.ArrayLike) -> None:
        """Responses of so many tokens to these prompts (indices within the step, repeats allowed) came back."""
        self._new.append((prompts, tokens))

    def _learned(self) -> LengthHistory:
        """The history, brought up to date."""
        if self._new:
            prompts, tokens = (np.concatenate(column) for column in zip(*self._new, strict=True))
            self._history, self._new = self._history.with_responses(prompts, tokens), []
        return self._history

    def _share(self, rule: str, prompts: Prompts, indices: list[int], speed: float) -> Share:
        notes: dict[str, Any] = {"dispatch": rule, "prompts": indices, "speed": speed}
        if rule == "length_buckets":
            notes["predicted_tokens"] = prompts.predicted_tokens[indices].tolist()
        return Share(prompts=indices, notes=notes)
