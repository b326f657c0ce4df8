"""How the samples of an update become passes of its ranks, and what padding and uneven lengths cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lab.measurement import packed_quantities, pass_columns
from lab.policies.microbatch import imbalance, pack_shared, pack_tight, parts, shared_tokens
from lab.scenario import Scenario
from simulator.blocks import Ints

MOST_SHOWN = 1000
"""passes of all ranks in one epoch"""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Samples that one rank reads forward and backward at once."""

    tokens: int
    """of its samples"""
    quantities: dict[str, float]
    """as `lab.measurement.OPS` names them; `tokens` with padding"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Passes:
    """The passes of one rank over its part of a mini-batch, as columns."""

    tokens: Ints
    """(passes,) of their samples"""
    quantities: dict[str, Floats]
    """(passes,) each, as `lab.measurement.OPS` names them; `tokens` with padding"""

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[Pass]:
        for number, tokens in enumerate(self.tokens.tolist()):
            yield Pass(
                tokens=tokens, quantities={name: float(column[number]) for name, column in self.quantities.items()}
            )

    @property
    def padded(self) -> float:
        """Tokens with padding, of all passes."""
        return float(self.quantities["tokens"].sum()) if len(self) else 0.0

    def first(self, number: int) -> Passes:
        """So many of them."""
        return Passes(
            tokens=self.tokens[:number], quantities={name: column[:number] for name, column in self.quantities.items()}
        )

    def after(self, number: int) -> Passes:
        """All but so many of them."""
        return Passes(
            tokens=self.tokens[number:], quantities={name: column[number:] for name, column in self.quantities.items()}
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The passes of one epoch."""

    passes: list[list[Passes]]
    """by mini-batch and rank"""
    num_samples: int
    """of one rank"""

    @cached_property
    def imbalance(self) -> float:
        """What the most loaded rank of each mini-batch has above the mean, as a share of it."""
        loads = [[part.padded for part in batch] for batch in self.passes]
        whole = sum(map(sum, loads))
        return sum(imbalance(load) * sum(load) for load in loads) / whole if whole else 0.0

    @cached_property
    def many(self) -> bool:
        """Whether they are too many to be shown one by one."""
        return sum(len(part) for batch in self.passes for part in batch) > MOST_SHOWN

    def notes(self, rank: int) -> dict[str, float]:
        """What the span of a rank says: `padding`, the share of its padded tokens that are none, and `imbalance`.

        Where samples share prompts, fewer tokens are read than they have, and none is padding.
        """
        mine = [batch[rank] for batch in self.passes]
        padded = sum(made.padded for made in mine)
        padding = max(1.0 - sum(int(made.tokens.sum()) for made in mine) / padded, 0.0) if padded else 0.0
        return {"padding": padding, "imbalance": self.imbalance}


def plan(
    scenario: Scenario, role: str, lengths: npt.ArrayLike, prompts: tuple[npt.ArrayLike, npt.ArrayLike] | None = None
) -> Plan:
    """The passes of a role's trainer over samples of these lengths, dealt to its ranks mini-batch by mini-batch.

    `prompts`: of each sample a number of its prompt, and that one's tokens; without them no two samples share one.
    """
    ranks, together = scenario.train(role).data_parallel, scenario.algorithm.together
    samples = _columns(lengths, prompts)
    batches = [samples[first:last].reshape(-1, together, 3) for first, last in _minibatches(scenario, len(samples))]
    passes = [[_passes(scenario, role, units[rank::ranks]) for rank in range(ranks)] for units in batches]
    return Plan(passes=passes, num_samples=len(samples) // ranks)


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What one rank reads of a step before its update."""

    passes: Passes
    num_samples: int


def reads(
    scenario: Scenario, role: str, rank: int, lengths: npt.ArrayLike, prompts: tuple[npt.ArrayLike, npt.ArrayLike]
) -> Reads:
    """The forward passes of a rank over its part of all samples of a step; arguments as for `plan`."""
    samples = _columns(lengths, prompts).reshape(-1, scenario.algorithm.together, 3)
    mine = samples[rank :: scenario.train(role).data_parallel]
    return Reads(passes=_passes(scenario, role, mine), num_samples=mine.shape[0] * mine.shape[1])


def _columns(lengths: npt.ArrayLike, prompts: tuple[npt.ArrayLike, npt.ArrayLike] | None) -> Ints:
    """(samples, 3): tokens, number of the prompt, tokens of the prompt."""
    sizes = np.asarray(lengths, np.int64)
    numbers, tokens = prompts or (np.arange(len(sizes)), np.zeros(len(sizes), np.int64))
    return np.stack([sizes, np.asarray(numbers, np.int64), np.asarray(tokens, np.int64)], axis=1)


def _minibatches(scenario: Scenario, num_samples: int) -> list[tuple[int, int]]:
    size = scenario.update.minibatch_samples
    return [(first, min(first + size, num_samples)) for first in range(0, num_samples, size)]


def _passes(scenario: Scenario, role: str, units: Ints) -> Passes:
    """Of one rank's units, (units, samples that stay together, 3): tokens, number of the prompt, tokens of the prompt."""
    stage = scenario.train(role).zero_stage
    if scenario.update.pack != "padded":
        lengths, prompts, prompt_tokens = units.reshape(-1, 3).T.tolist()
        return _tight(scenario, role, lengths, prompts, prompt_tokens, stage)
    units = units[:, :, 0]
    units = units[np.argsort(-units.max(axis=1, initial=0), kind="stable")]
    longest, together = units.max(axis=1, initial=0), units.shape[1]
    most = scenario.update.microbatch_samples
    ends = np.array(parts(longest.tolist(), scenario.pass_tokens, most, together), np.int64).reshape(-1, 2)
    if not len(ends):
        return Passes(tokens=np.zeros(0, np.int64), quantities={})
    number = (ends[:, 1] - ends[:, 0]) * together
    quantities = pass_columns(scenario.spec(role), role, number, longest[ends[:, 0]], stage)
    tokens = np.add.reduceat(units.sum(axis=1), ends[:, 0])
    return Passes(tokens=tokens, quantities=quantities)


def _tight(
    scenario: Scenario,
    role: str,
    lengths: Sequence[int],
    prompts: Sequence[int],
    prompt_tokens: Sequence[int],
    stage: int,
) -> Passes:
    """Samples laid end to end."""
    shares = scenario.update.pack == "shared"
    limits = (scenario.pass_tokens, scenario.update.microbatch_samples, scenario.algorithm.together)
    groups = pack_shared(lengths, prompts, prompt_tokens, *limits) if shares else pack_tight(lengths, *limits)
    rows = [
        packed_quantities(
            scenario.spec(role), role, [lengths[i] for i in group], stage,
            shared_tokens(group, lengths, prompts, prompt_tokens) if shares else None,
        )
        for group in groups
    ]  # fmt: skip
    names = rows[0] if rows else ()
    tokens = np.array([sum(lengths[i] for i in group) for group in groups], np.int64)
    return Passes(tokens=tokens, quantities={name: np.array([row[name] for row in rows]) for name in names})
