"""Frozen models and rules that score a step's samples, and the critic's values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from lab.judging import TRAINERS
from lab.measurement import pass_quantities
from lab.model import ModelSpec
from lab.policies.microbatch import pack
from simulator.blocks import Ints
from simulator.microbatches import reads
from simulator.remote import makespan
from simulator.scorers import cache, calls, counted, host, kind, known, overlap, sizes
from simulator.world import Lane, Process, World


def passes(
    spec: ModelSpec, role: str, lengths: Sequence[int], groups: Sequence[Sequence[int]], zero_stage: int = 0
) -> Iterator[tuple[int, dict[str, float]]]:
    """Tokens and cost quantities of each forward pass."""
    for group in groups:
        longest = max(lengths[i] for i in group)
        yield sum(lengths[i] for i in group), pass_quantities(spec, role, len(group), longest, zero_stage)


def score(world: World, stage: str, step: int) -> list[Process]:
    """Reward or reference: one process for each worker, or one for all where samples come and go one by one."""
    if world.dataflow.streams(stage, step):
        return [overlap(world, stage, step)]
    team = world.scenario.team(stage, "score")
    shares = [partial(_share, world, stage, step, rank) for rank in range(len(team))]
    return [
        world.attempts(worker.name, share) if world.losable(worker) else share()
        for worker, share in zip(team, shares, strict=True)
    ]


def _share(world: World, stage: str, step: int, rank: int) -> Process:
    """The samples of a step that one worker is dealt: the first, second, … of every so many."""
    team = world.scenario.team(stage, "score")
    lane, mine = Lane(world, stage, step, team[rank]), world.ledger.batches[step][rank :: len(team)]
    hits = known(world, stage, mine)
    lengths, notes = sizes(world.ledger, mine), {"hits": int(hits.sum())} if cache(world.scenario, stage) else {}
    if not hits.all():
        notes |= yield from WHOLE[kind(world.scenario, stage)](lane, mine[~hits], sizes(world.ledger, mine[~hits]))
    lane.end(tokens=sum(lengths), samples=len(lengths), **notes)


def _model(lane: Lane, samples: Ints, lengths: list[int]) -> Process:
    """All passes of the samples, one after the other."""
    scenario, role = lane.world.scenario, lane.worker.role
    groups = pack(lengths, scenario.pass_tokens, scenario.scored[role].max_batch_samples)
    readings = 1 + (scenario.algorithm.extra_forwards if role == "reference" else 0)
    yield from _forward(lane.world, lane, lengths, groups * readings)
    yield from lane.world.spend(lane.worker, "score_host", host(len(lengths), sum(lengths)))
    return {}


def _head(lane: Lane, samples: Ints, lengths: list[int]) -> Process:
    """The passes were the trunk's; see `simulator.scorers`."""
    yield from lane.world.spend(lane.worker, "score_host", host(len(lengths), sum(lengths)))
    return {}


def _function(lane: Lane, samples: Ints, lengths: list[int]) -> Process:
    yield from lane.world.spend(lane.worker, "reward", host(len(lengths), sum(lengths)))
    return {}


def _remote(lane: Lane, samples: Ints, lengths: list[int]) -> Process:
    """Calls for so many samples each, in their order, each as soon as one of those under way has its answer."""
    chosen = lane.world.scenario.place.reward_score
    assert chosen is not None and chosen.remote is not None, "refused by lab.placement"
    yield from lane.world.spend(lane.worker, "score_host", host(len(lengths), sum(lengths)))
    size = chosen.max_batch_samples
    found = calls(lane.world, samples[::size])
    yield lane.world.env.timeout(makespan(found.seconds, chosen.remote.concurrency))
    return counted(found, size, len(samples) % size or size)


WHOLE: dict[str, Callable[[Lane, Ints, list[int]], Process]] = {
    "model": _model, "head": _head, "function": _function, "remote": _remote,
}  # fmt: skip
"""by kind of scorer: does the samples of a step on one lane; returns what its span notes"""


def judge(world: World, stage: str, step: int) -> list[Process]:
    """One process for each rank of a trainer: values by the critic, or log-probabilities by the actor (old_logprob)."""
    if world.dataflow.streams(stage, step):
        return [overlap(world, stage, step)]
    role = TRAINERS[stage]
    return [_judge(world, stage, role, step, rank) for rank in range(len(world.scenario.team(role, "train")))]


def _judge(world: World, stage: str, role: str, step: int, rank: int) -> Process:
    """Forward passes over the samples that one rank is dealt, packed as for its update."""
    worker = world.scenario.team(role, "train")[rank]
    mine = reads(world.scenario, role, rank, world.ledger.lengths(step), world.ledger.prompts(step))
    lane, start, tokens = Lane(world, stage, step, worker), world.now, int(mine.passes.tokens.sum())
    for made in mine.passes:
        yield from lane.op("forward", "logprob", made.quantities, tokens=made.tokens)
    yield from bubble(lane, world.now - start, len(mine.passes))
    yield from world.spend(worker, "score_host", host(mine.num_samples, tokens))
    lane.end(tokens=tokens, samples=mine.num_samples)


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
