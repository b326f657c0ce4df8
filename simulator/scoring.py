"""Frozen models and rules that score a step's samples, and the critic's values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lab.measurement import pass_quantities
from lab.model import ModelSpec
from lab.policies.microbatch import deal, pack
from simulator.world import Lane, Process, World


def passes(
    spec: ModelSpec, role: str, lengths: Sequence[int], groups: Sequence[Sequence[int]], zero_stage: int = 0
) -> Iterator[tuple[int, dict[str, float]]]:
    """Tokens and cost quantities of each forward pass."""
    for group in groups:
        longest = max(lengths[i] for i in group)
        yield sum(lengths[i] for i in group), pass_quantities(spec, role, len(group), longest, zero_stage)


def score(world: World, stage: str, step: int, lengths: Sequence[int]) -> Process:
    """Reward or reference on its one worker, over all samples."""
    role = "reward" if stage == "reward" else "reference"
    worker = world.scenario.team(role, "score")[0]
    place = world.scenario.place
    lane, host = Lane(world, stage, step, worker), _host(lengths)
    if role == "reward" and place.reward_score.kind == "function":
        yield from world.spend(worker, "reward", host)
    else:
        chosen = place.reward_score if role == "reward" else place.reference_score
        assert chosen is not None, "refused by lab.coherence"
        groups = pack(lengths, world.scenario.update.microbatch_tokens, chosen.max_batch_samples)
        yield from _forward(world, lane, lengths, groups)
        yield from world.spend(worker, "score_host", host)
    lane.end(tokens=sum(lengths), samples=len(lengths))


def value(world: World, step: int, lengths: Sequence[int], rank: int) -> Process:
    """Values of the samples that one rank of the critic is dealt."""
    team = world.scenario.team("critic", "train")
    mine = [lengths[i] for i in deal(len(lengths), len(team))[rank]]
    lane = Lane(world, "value", step, team[rank])
    if mine:
        groups, start = pack(mine, world.scenario.update.microbatch_tokens), world.now
        yield from _forward(world, lane, mine, groups, world.scenario.train("critic").zero_stage)
        yield from bubble(lane, world.now - start, len(groups))
    yield from world.spend(team[rank], "score_host", _host(mine))
    lane.end(tokens=sum(mine), samples=len(mine))


def bubble(lane: Lane, busy_s: float, num_microbatches: int) -> Process:
    """What filling and draining a pipeline adds to the passes of m micro-batches: (p-1)/m of their time.

    Every stage works m of the m + p - 1 slots (Narayanan et al. 2019, PipeDream; 2021). Nothing without a pipeline.
    """
    stages = lane.worker.parallelism.pipeline
    if stages == 1 or not num_microbatches:
        return
    start = lane.world.now
    yield lane.world.env.timeout(busy_s * (stages - 1) / num_microbatches)
    lane.record("bubble", start, extrapolated=True)


def _forward(
    world: World, lane: Lane, lengths: Sequence[int], groups: Sequence[Sequence[int]], zero_stage: int = 0
) -> Process:
    spec, role = world.scenario.spec(lane.worker.role), lane.worker.role
    for tokens, quantities in passes(spec, role, lengths, groups, zero_stage):
        yield from lane.op("forward", "logprob", quantities, tokens=tokens)


def _host(lengths: Sequence[int]) -> dict[str, float]:
    return {"calls": 1.0, "samples": float(len(lengths)), "tokens": float(sum(lengths))}
