"""How the samples of an update become passes of its ranks, and what padding and uneven lengths cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lab.measurement import packed_quantities, pass_quantities
from lab.policies.microbatch import deal, imbalance, minibatches, pack, pack_tight
from lab.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Samples that one rank reads forward and backward at once."""

    tokens: int
    """of its samples"""
    quantities: dict[str, float]
    """as `lab.measurement.OPS` names them; `tokens` with padding"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The passes of one epoch."""

    passes: list[list[list[Pass]]]
    """by mini-batch and rank"""
    num_samples: int
    """of one rank"""

    @cached_property
    def imbalance(self) -> float:
        """What the most loaded rank of each mini-batch has above the mean, as a share of it."""
        loads = [[sum(made.quantities["tokens"] for made in part) for part in batch] for batch in self.passes]
        whole = sum(map(sum, loads))
        return sum(imbalance(load) * sum(load) for load in loads) / whole if whole else 0.0

    def notes(self, rank: int) -> dict[str, float]:
        """What the span of a rank says: `padding`, the share of its padded tokens that are none, and `imbalance`."""
        mine = [made for batch in self.passes for made in batch[rank]]
        padded = sum(made.quantities["tokens"] for made in mine)
        padding = 1.0 - sum(made.tokens for made in mine) / padded if padded else 0.0
        return {"padding": padding, "imbalance": self.imbalance}


def plan(scenario: Scenario, role: str, lengths: Sequence[int]) -> Plan:
    """The passes of a role's trainer over samples of these lengths, dealt to its ranks mini-batch by mini-batch."""
    train, together = scenario.train(role), scenario.algorithm.together
    passes = [
        [
            _passes(scenario, role, [lengths[batch[i]] for i in part], train.zero_stage)
            for part in deal(len(batch), train.data_parallel, together)
        ]
        for batch in minibatches(len(lengths), scenario.update.minibatch_samples)
    ]
    return Plan(passes=passes, num_samples=len(lengths) // train.data_parallel)


def _passes(scenario: Scenario, role: str, lengths: Sequence[int], zero_stage: int) -> list[Pass]:
    update, spec, tight = scenario.update, scenario.spec(role), scenario.update.pack == "packed"
    rule = pack_tight if tight else pack
    found = []
    for group in rule(lengths, scenario.pass_tokens, update.microbatch_samples, scenario.algorithm.together):
        sizes = [lengths[i] for i in group]
        if tight:
            quantities = packed_quantities(spec, role, sizes, zero_stage)
        else:
            quantities = pass_quantities(spec, role, len(sizes), max(sizes), zero_stage)
        found.append(Pass(tokens=sum(sizes), quantities=quantities))
    return found
