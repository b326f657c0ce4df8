"""Is what a run says of a step what its record gives? Recomputes a step from what was written down.

Three kinds of recomputation. Rewards and reference log-probs are computed again by the workers that computed them.
Advantages, returns and means are computed by formulas of their own, in double precision. Losses come from doing the
updates again: from the latest checkpoint before the step, or from the first weights, through the records between, with
the trainer that trained (see executor.repeating). Nothing of the run's folder is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor import records
from executor.experience import Samples
from lab import runs
from lab.algorithm import Grpo, Ppo
from lab.errors import InputError
from lab.placement import Worker
from lab.scenario import Scenario
from lab.timeline import Header

EXACT, FLOAT, DOUBLE = 0.0, 1e-4, 1e-9
"""largest differences that count as the same: bit for bit; of single-precision passes on another machine or with other
threads; of double-precision sums in another order"""
Row = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One quantity of a step, as written down and as computed again."""

    quantity: str
    how: str
    """by what it was computed again"""
    recorded: float
    """of many numbers, their mean"""
    recomputed: float
    difference: float
    """the largest; relative where the recorded number is larger than 1"""
    allowed: float

    @property
    def matches(self) -> bool:
        return self.difference <= self.allowed

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"matches": self.matches}


@dataclass(frozen=True, kw_only=True)
class Recheck:
    """What came of a step."""

    step: int
    checks: list[Check] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """by quantity, why it was not computed again"""

    @property
    def matches(self) -> bool:
        return all(check.matches for check in self.checks)


def recheck(folder: Path, step: int, *, losses: bool = True) -> Recheck:
    """Recomputes a step of the run in `folder`; `losses` false leaves out the updates, which take the longest.

    Raises InputError where the folder is no run, or the record is missing, damaged or of another scenario.
    """
    header, scenario = runs.read(folder).header, runs.read_scenario(folder)
    samples = records.read(records.path_of(folder, step), header.digest)
    if len(samples) != scenario.workload.samples_per_step and scenario.schedule.mode != "asynchronous":
        problem = f"{len(samples)} samples, a step of this scenario has {scenario.workload.samples_per_step}"
        file = str(records.path_of(folder, step))
        raise InputError(file=file, problem=problem, remedy=records.REMEDY)
    row = learned(folder, header, step)
    found = Recheck(step=step)
    for rule in (_rewards, _references, _advantages, _reported):
        for item in rule(scenario, samples, row or {}):
            _put(found, item)
    if row is None:
        found.skipped["losses"] = f"the run kept no numbers of step {step} to compare with"
    elif losses:
        _losses(found, folder, scenario, header.digest, row)
    return found


Outcome = Check | tuple[str, str]
"""a check, or a quantity and why there is none"""


def _put(found: Recheck, item: Outcome) -> None:
    if isinstance(item, Check):
        found.checks.append(item)
    else:
        found.skipped[item[0]] = item[1]


def learned(folder: Path, header: Header, step: int) -> dict[str, Any] | None:
    """The numbers that the run reported of a step; None where it kept none."""
    return next((row for row in header.learning if row["step"] == step), None)


def compared(quantity: str, how: str, recorded: Any, recomputed: Any, allowed: float) -> Check:
    """Of two numbers, or two arrays of the same shape."""
    ours, theirs = (np.asarray(values, dtype=np.float64).ravel() for values in (recorded, recomputed))
    if len(ours) != len(theirs):
        gap = float("inf")
    else:
        with np.errstate(invalid="ignore"):  # infinities
            gaps = np.where(ours == theirs, 0.0, np.abs(ours - theirs) / np.maximum(np.abs(ours), 1.0))
        gap = float(np.nan_to_num(gaps, nan=np.inf).max(initial=0.0))
    means = [float(values.mean()) if len(values) else 0.0 for values in (ours, theirs)]
    return Check(
        quantity=quantity, how=how, recorded=means[0], recomputed=means[1], difference=gap, allowed=allowed
    )  # fmt: skip


def _rewards(scenario: Scenario, samples: Samples, row: dict[str, Any]) -> Iterator[Outcome]:
    place = scenario.place.reward_score
    if "rewards" not in samples.columns or place is None:
        return
    if place.kind == "remote":
        yield "rewards", "they come from a service elsewhere, which may answer otherwise today"
        return
    from executor.scoring import RewardWorker

    again = _scored(RewardWorker, scenario, "reward", samples)
    by_rule = place.kind == "function"
    how = f"the function {place.function}" if by_rule else "the reward model"
    for name in [name for name in samples.columns if name == "rewards" or name.startswith("reward_")]:
        yield compared(name, how, samples.columns[name], again.get(name, ()), EXACT if by_rule else FLOAT)


def _references(scenario: Scenario, samples: Samples, row: dict[str, Any]) -> Iterator[Outcome]:
    if "reference_logprobs" not in samples.columns:
        return
    from executor.scoring import ReferenceWorker

    again, name = _scored(ReferenceWorker, scenario, "reference", samples), "mismatched_logprobs"
    ours, theirs = (np.concatenate(found["reference_logprobs"]) for found in (samples.columns, again))
    yield compared("reference_logprobs", "the reference model", ours, theirs, FLOAT)
    if name in samples.columns:
        yield compared(name, "the reference model", samples.columns[name], again.get(name, ()), FLOAT)


def _scored(kind: Callable[[Worker, Scenario], Any], scenario: Scenario, role: str, samples: Samples) -> dict[str, Any]:
    """What a scorer says of the samples, in this process."""
    bare = samples.take(range(len(samples)))
    bare.columns.clear()
    scorer = kind(scenario.team(role, "score")[0], scenario)
    scorer.ready()
    columns: dict[str, Any] = scorer.judged(bare)
    return columns


def _advantages(scenario: Scenario, samples: Samples, row: dict[str, Any]) -> Iterator[Outcome]:
    """By formulas of their own, in double precision; of pairs that a reward has put in order, the order."""
    algorithm, columns = scenario.algorithm, samples.columns
    if "weights" in columns:
        chosen, rejected = columns["rewards"][::2], columns["rewards"][1::2]
        decided = np.repeat(chosen > rejected, 2)
        yield compared(
            "weights", "1 where the first of a pair has the higher reward", columns["weights"], decided, EXACT
        )
    if "advantages" not in columns:
        return
    recorded = np.concatenate(columns["advantages"])
    if isinstance(algorithm, Grpo):
        spread = np.repeat(group_advantages(columns["rewards"], samples.prompts), list(map(len, samples.logprobs)))
        yield compared("advantages", "(r - mean) / (std + 1e-6) of each prompt", recorded, spread, FLOAT)
    elif isinstance(algorithm, Ppo):
        advantages = [
            generalised(r, v, algorithm)
            for r, v in zip(_token_rewards(algorithm, samples), values(samples), strict=True)
        ]
        whole = np.concatenate(advantages)
        white = (whole - whole.mean()) / (whole.std() + 1e-6)
        yield compared("advantages", "generalised advantages, whitened", recorded, white, FLOAT)
        returns = np.concatenate([a + v for a, v in zip(advantages, values(samples), strict=True)])
        yield compared("returns", "advantages + values", np.concatenate(columns["returns"]), returns, FLOAT)


def group_advantages(rewards: NDArray[Any], prompts: NDArray[np.int64]) -> Row:
    """Of each sample, by sums over the samples of its prompt."""
    _, group, sizes = np.unique(prompts, return_inverse=True, return_counts=True)
    mean = np.bincount(group, weights=rewards) / sizes
    gaps = rewards - mean[group]
    std = np.sqrt(np.bincount(group, weights=gaps**2) / sizes)
    return np.asarray(gaps / (std[group] + 1e-6))


def values(samples: Samples) -> list[Row]:
    return [np.asarray(row, dtype=np.float64) for row in samples.columns["values"]]


def _token_rewards(algorithm: Ppo, samples: Samples) -> Iterator[Row]:
    """-kl_coef (log p - log p_reference) of every token, and the sample's reward on the last."""
    policy = samples.columns.get("old_logprobs", samples.logprobs)
    references = samples.columns.get("reference_logprobs", policy)
    for reward, ours, theirs in zip(samples.columns["rewards"], policy, references, strict=True):
        tokens = -algorithm.kl_coef * (ours.astype(np.float64) - theirs)
        tokens[-1] += reward
        yield tokens


def generalised(rewards: Row, values: Row, algorithm: Ppo) -> Row:
    """A_t = sum over l of (gamma lambda)^l delta_{t+l}, as one product with the matrix of these powers."""
    deltas = rewards + algorithm.gamma * np.append(values[1:], 0.0) - values
    ahead = np.arange(len(deltas))[None, :] - np.arange(len(deltas))[:, None]
    powers = np.where(ahead >= 0, (algorithm.gamma * algorithm.lam) ** np.maximum(ahead, 0), 0.0)
    return np.asarray(powers @ deltas)


def _reported(scenario: Scenario, samples: Samples, row: dict[str, Any]) -> Iterator[Outcome]:
    """Means that the run reported of these samples."""
    if "reward" in row and "rewards" in samples.columns:
        yield compared(
            "reward", "the mean of the record's rewards", row["reward"], samples.columns["rewards"].mean(), DOUBLE
        )


def _losses(found: Recheck, folder: Path, scenario: Scenario, digest: str, row: dict[str, Any]) -> None:
    from executor.repeating import Unrepeatable, repeated

    for role in scenario.algorithm.trains:
        try:
            start, numbers = repeated(folder, scenario, digest, role, found.step)
        except Unrepeatable as reason:
            found.skipped[f"losses of {role}"] = str(reason)
            continue
        for name, value in numbers.items():
            if value is not None and name not in row:
                found.skipped[name] = f"the run reported none of {role}"
            elif value is not None:
                found.checks.append(compared(name, f"{role}: the updates again from {start}", row[name], value, FLOAT))
