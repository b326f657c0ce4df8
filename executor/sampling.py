"""What the driver decides about sampling, step after step: temperatures, shares of a mixture, and which answers are kept.

Plain numpy. What a step draws depends on what steps brought whose weights had been published before: with a barrier on
all earlier ones, one step off on all but the last. So a resumed run decides as it would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor.algorithms.advantages import joined
from executor.diversity import joined as means
from executor.experience import Samples
from lab import drawing
from lab.policies import sampling as policy
from lab.scenario import Scenario

COLDEST = 0.05
"""no temperature is lowered below it; what the scenario itself says may be colder"""
_KEPT = 4
"""steps whose decisions are remembered: those that may be drawn again after a crash"""

Numbers = dict[str, Any]


class Decisions:
    """Temperatures of every step; learns from entropies and rewards where the scenario says so."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario, self._lag = scenario, 1 + (scenario.schedule.mode != "synchronous")
        number = len(scenario.sampling.mixture)
        self._arms, self._offset, self._folded = policy.Arms.untried(number), 0.0, -1
        self._entropy: float | None = None
        self._bounds: tuple[float, float] | None = None
        """of all rewards seen, which the bandit scales to 0 … 1"""
        self._seen: dict[int, Numbers] = {}
        self._decided: dict[int, Numbers] = {}

    def temperatures(self, step: int) -> NDArray[np.float64]:
        """Of each sample of a step, [prompts, samples]. Asked again, it is the same."""
        shape = (self._scenario.workload.prompts_per_step, self._scenario.num_tried)
        decided = self._decision(step)
        base = drawing.temperatures(self._scenario, step, shape)
        if decided["shares"]:
            base = self._heats[self.arms(step).reshape(shape)]
        return np.maximum(base + decided["offset"], np.minimum(base, COLDEST))

    def issued(self, step: int) -> NDArray[np.float64]:
        """Of each sample that a step sends out, [prompts, samples]: prompts beyond those that are kept begin anew."""
        heats = self.temperatures(step)
        return np.resize(heats, (drawing.issued(self._scenario), heats.shape[1]))

    def arms(self, step: int) -> NDArray[np.int64]:
        """Which temperature of the mixture each sample of a step has, in the order of prompts, [N]."""
        number = self._scenario.workload.prompts_per_step * self._scenario.num_tried
        shares = self._decision(step)["shares"] or [arm.share for arm in self._scenario.sampling.mixture]
        return policy.mixture(shares, number)

    def rolled(self, step: int, infos: Sequence[Numbers]) -> Numbers:
        """The samples of a step are there: what the learning row says of how they were drawn. Takes `diversity` of each
        engine's info."""
        found: Numbers = dict(means([info.pop("diversity") for info in infos]))
        self._note(step, entropy=found["sampled_entropy"])
        decided = self._decision(step)
        found["temperature"] = float(self.temperatures(step).mean())
        return found | ({"sampling": decided} if self._scenario.sampling.decides else {})

    @property
    def wants_rewards(self) -> bool:
        """Whether `rewarded` has anything to do."""
        return bool(self._scenario.sampling.mixture)

    def rewarded(self, step: int, columns: Sequence[Numbers]) -> Numbers:
        """The rewards of all samples that a step generated are known: the mean for each temperature of the mixture."""
        arms = self.arms(step)
        rewards = np.asarray(joined(columns, len(arms))["rewards"], dtype=np.float64)
        self._note(step, rewards=rewards.tolist(), arms=arms.tolist())
        by_arm = {
            f"{heat:g}": float(rewards[arms == i].mean()) for i, heat in enumerate(self._heats) if (arms == i).any()
        }
        return {"reward_by_temperature": by_arm}

    @property
    def _heats(self) -> NDArray[np.float64]:
        return np.asarray([arm.temperature for arm in self._scenario.sampling.mixture])

    def _note(self, step: int, **found: Any) -> None:
        if self._scenario.sampling.decides and step > self._folded:
            self._seen[step] = self._seen.get(step, {}) | found

    def _decision(self, step: int) -> Numbers:
        """Made once for each step: the shares, what is added to temperatures, and what it was made from."""
        if step not in self._decided:
            for earlier in sorted(known for known in self._seen if known <= step - self._lag):
                self._fold(earlier, self._seen.pop(earlier))
            self._decided[step] = self._made(step)
            self._decided = {known: self._decided[known] for known in sorted(self._decided)[-_KEPT:]}
        return self._decided[step]

    def _fold(self, step: int, found: Numbers) -> None:
        """Learns from what a step brought."""
        sampling = self._scenario.sampling
        if sampling.entropy is not None and "entropy" in found:
            self._offset = policy.steered(sampling.entropy.band, self._offset, found["entropy"])
        if sampling.bandit is not None and "rewards" in found:
            low, high = min(found["rewards"]), max(found["rewards"])
            old = self._bounds or (low, high)
            self._bounds = (min(low, old[0]), max(high, old[1]))
            self._arms = self._arms.with_rewards(found["arms"], found["rewards"], sampling.bandit.discount)
        self._folded, self._entropy = step, found.get("entropy")

    def _made(self, step: int) -> Numbers:
        bandit, shares = self._scenario.sampling.bandit, list[float]()
        scaled = self._scaled()
        if bandit is not None and self._bounds is not None:
            number = self._scenario.workload.prompts_per_step * self._scenario.num_tried
            seed = self._scenario.seed + step
            shares = policy.shares(bandit.rule, scaled, bandit.floor, seed, number).tolist()
        observed: Numbers = {"last_step": self._folded, "entropy": self._entropy}
        if bandit is not None:
            tries = self._arms.num_tried
            observed |= {
                "tries": tries.tolist(),
                "mean_rewards": (self._arms.total_reward / np.maximum(tries, 1e-12)).tolist(),
            }
        return {"shares": shares, "offset": self._offset, "observed": observed}

    def _scaled(self) -> policy.Arms:
        """The arms with rewards from 0, the lowest seen, to 1, the highest."""
        low, high = self._bounds or (0.0, 1.0)
        tries = self._arms.num_tried
        gained = (self._arms.total_reward - low * tries) / ((high - low) or 1.0)
        return policy.Arms(num_tried=tries, total_reward=np.clip(gained, 0.0, tries))

    def state(self) -> Numbers:
        """All that decisions depend on, fit for JSON."""
        return {
            "tries": self._arms.num_tried.tolist(), "rewards": self._arms.total_reward.tolist(),
            "offset": self._offset, "folded": self._folded, "bounds": self._bounds, "entropy": self._entropy,
            "seen": {str(step): found for step, found in self._seen.items()},
            "decided": {str(step): made for step, made in self._decided.items()},
        }  # fmt: skip

    def restore(self, state: Numbers) -> None:
        """Goes on from a state."""
        self._arms = policy.Arms(
            num_tried=np.asarray(state["tries"], float), total_reward=np.asarray(state["rewards"], float)
        )
        self._offset, self._folded, self._entropy = state["offset"], state["folded"], state["entropy"]
        self._bounds = None if state["bounds"] is None else (state["bounds"][0], state["bounds"][1])
        self._seen = {int(step): found for step, found in state["seen"].items()}
        self._decided = {int(step): made for step, made in state["decided"].items()}


def keep_best(worker: Any, best_of: int, samples: Samples, *columns: Numbers) -> tuple[Samples, Numbers]:
    """Of every `best_of` answers to a prompt in turn the one with the highest reward, and all columns of those.

    `columns` as scorers gave them, of all samples. Runs in the process of a reward worker, where samples are at hand.
    """
    found = joined(columns, len(samples))
    rewards = np.asarray(found["rewards"], dtype=np.float64).reshape(-1, best_of)
    chosen = np.arange(len(rewards)) * best_of + policy.best_of(rewards)
    return samples.take(chosen), samples.with_columns(**found).take(chosen).columns
