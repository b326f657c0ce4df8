"""Dealing the prompts of a step to the rollout engines, step after step. Both worlds hold one dealer for a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lab.drawing import issued
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
        self._history = LengthHistory.empty(issued(scenario), workload.response_tokens.mean)
        self._new: list[tuple[npt.ArrayLike, npt.ArrayLike]] = []

    def deal(self, step: int, absent: Collection[int] = ()) -> list[Share]:
        """The share of each engine, in the order of the engines; those that are absent get nothing."""
        rule, prompts = self._scenario.rollout.dispatch, self.prompts(step)
        present = [index for index in range(len(self._speed)) if index not in absent]
        dealt = DISPATCH[rule](prompts, Engines.idle([self._speed[index] for index in present]))
        shares: list[list[int]] = [[] for _ in self._speed]
        for index, share in zip(present, dealt, strict=True):
            shares[index] = share
        return [self._share(rule, prompts, *pair) for pair in zip(shares, self._speed, strict=True)]

    def choose(self, prompts: Sequence[tuple[int, int]], engines: Engines) -> list[list[int]]:
        """Without a barrier: which of these prompts (step and index in it) each engine gets, as places in `prompts`."""
        known = {step: self.prompts(step).predicted_tokens for step in {step for step, _ in prompts}}
        waiting = Prompts(
            predicted_tokens=np.array([known[step][index] for step, index in prompts]),
            samples_per_prompt=self._scenario.num_tried, num_buckets=len(set(self._speed)),
        )  # fmt: skip
        return DISPATCH[self._scenario.rollout.dispatch](waiting, engines)

    def prompts(self, step: int) -> Prompts:
        """The prompts of a step as the dispatcher sees them: it knows their own lengths and predicts the responses'."""
        known = self._scenario.workload.prompt_lengths(self._scenario.seed, step, issued(self._scenario))
        return Prompts(
            predicted_tokens=known + self._learned().predict(np.arange(len(known))),
            samples_per_prompt=self._scenario.num_tried, num_buckets=len(set(self._speed)),
        )  # fmt: skip

    def returned(self, prompts: npt.ArrayLike, tokens: npt.ArrayLike) -> None:
        """Responses of so many tokens to these prompts (indices within the step, repeats allowed) came back."""
        self._new.append((prompts, tokens))

    def state(self) -> dict[str, Any]:
        """What came back, fit for JSON."""
        history = self._learned()
        return {"num_seen": history.num_seen.tolist(), "total_tokens": history.total_tokens.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` said, to the bit."""
        seen, tokens = np.asarray(state["num_seen"], np.int64), np.asarray(state["total_tokens"], np.float64)
        self._history, self._new = replace(self._history, num_seen=seen, total_tokens=tokens), []

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
