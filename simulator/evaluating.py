"""Evaluation in virtual time: engines answer prompts of a set of their own, or trainers read held-out samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lab.evaluation import lengths, shares
from lab.measurement import pass_quantities
from lab.placement import Worker
from lab.policies.microbatch import deal, pack
from simulator.engine import Requests, grouped
from simulator.lockstep import start_engine
from simulator.scoring import bubble
from simulator.world import Lane, Process, World


def evaluate(world: World, step: int) -> list[Process]:
    """One process for each worker that takes part."""
    prompt, answers = lengths(world.scenario, step)
    node = world.dataflow.nodes["evaluate"]
    team = [world.scenario.workers[name] for name in node.workers]
    if not world.scenario.algorithm.rolls_out:
        sizes = (prompt[:, None] + answers).ravel().tolist()
        together = world.scenario.algorithm.together
        parts = deal(len(sizes), len(team), together)
        return [_read(world, worker, step, [sizes[i] for i in mine]) for worker, mine in zip(team, parts, strict=True)]
    return [
        _answer(world, worker, step, _requests(world, prompt[mine], answers[mine]))
        for worker, mine in zip(team, shares(world.scenario, step, world.publication.absent), strict=True)
        if mine
    ]


def _requests(world: World, prompt: np.ndarray, answers: np.ndarray) -> Requests:
    """All answers to these prompts; those of one prompt share its full blocks."""
    number = answers.shape[1]
    each, groups = np.repeat(prompt, number), np.repeat(np.arange(len(prompt)), number)
    contents = grouped(each.tolist(), groups.tolist(), world.scenario.rollout.block_tokens)
    return Requests(prompt=each, response=answers.ravel(), contents=contents)


def _answer(world: World, worker: Worker, step: int, requests: Requests) -> Process:
    """An engine's part, in one go: nobody comes between, and who shares the devices stretches all of it."""
    lane, start = Lane(world, "evaluate", step, worker), world.now
    engine = start_engine(world.scenario, worker, world.costs.engine_table(worker), requests)
    engine.arrive(range(len(requests)))
    seconds, iterations, extrapolated = 0.0, 0, False
    for piece in engine.pieces():
        cost = world.costs.iterations(worker, piece.seconds, (piece.first, piece.last))
        seconds, iterations = seconds + cost.seconds, iterations + piece.iterations
        extrapolated |= cost.extrapolated
    yield from world.cores(worker).work(worker, "engine_step", seconds)
    lane.record("decode", start, extrapolated, tokens=int(requests.response.sum()), iterations=iterations)
    given, made = int(requests.prompt.sum()), int(requests.response.sum())
    host = {"calls": 1.0, "samples": float(len(requests)), "tokens": float(made)}
    yield from world.spend(worker, "rollout_host", host)
    lane.end(
        tokens=given + made, samples=len(requests), prompt_tokens=given, response_tokens=made, iterations=iterations
    )  # fmt: skip


def _read(world: World, worker: Worker, step: int, sizes: Sequence[int]) -> Process:
    """A trainer rank's forward passes over its part."""
    scenario, role = world.scenario, worker.role
    lane, start = Lane(world, "evaluate", step, worker), world.now
    groups = pack(sizes, scenario.pass_tokens, scenario.update.microbatch_samples, scenario.algorithm.together)
    for group in groups:
        mine = [sizes[i] for i in group]
        quantities = pass_quantities(
            scenario.spec(role), role, len(mine), max(mine), scenario.train(role).zero_stage
        )  # fmt: skip
        yield from lane.op("forward", "logprob", quantities, tokens=sum(mine))
    yield from bubble(lane, world.now - start, len(groups))
    host = {"calls": 1.0, "samples": float(len(sizes)), "tokens": float(sum(sizes))}
    yield from world.spend(worker, "score_host", host)
    lane.end(tokens=sum(sizes), samples=len(sizes))
