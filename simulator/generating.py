"""The rollout of a step in virtual time: every engine plays its share of the prompts, piece by piece."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lab.dealing import Share
from lab.fates import BUFFERED, INDEX, PROMPT, RESPONSE
from lab.placement import Worker
from simulator.blocks import Ints
from simulator.engine import Requests
from simulator.joint import Joint, joint
from simulator.lockstep import start_engine
from simulator.losing import Losses
from simulator.rollout import Piece, samples, settings
from simulator.whole import Played, countable, whole
from simulator.world import Lane, Process, World

COUNTS = ("iterations", "preemptions", "recomputed_tokens", "cached_tokens")
"""what a rollout's span says of its engine's work"""


def rollout(world: World, step: int) -> list[Process]:
    """The processes of a step's rollout, one per engine that got prompts."""
    engines, absent = world.scenario.team("actor", "generate"), world.publication.absent | world.away()
    if len(absent) == len(engines):
        return [_later(world, step)]
    if joint(world.scenario) or world.lossy:
        return _together(world, step, absent)
    shares = world.dealer.deal(step, absent)
    everything = np.arange(world.scenario.workload.prompts_per_step * world.scenario.num_tried)
    numbers = world.ledger.issue(step, everything, world.dataflow.policy_version("rollout", step))
    world.ledger.batches[step] = numbers
    pairs = zip(engines, shares, strict=True)
    return [_generate(world, worker, step, share, numbers) for worker, share in pairs if share.prompts]


def _together(world: World, step: int, absent: frozenset[int]) -> list[Process]:
    """The processes of engines that help each other, or may fail."""
    team = Joint(world, step, absent)
    watched = [world.engines.watch(team, step)] if world.engines is not None else []
    return [*team.processes(), Losses(world, team, step).guard(), *watched]


def _later(world: World, step: int) -> Process:
    """Every engine is down: the rollout begins when the first works again."""
    yield world.next_up()
    yield world.env.all_of([world.env.process(part) for part in rollout(world, step)])


def _generate(world: World, worker: Worker, step: int, share: Share, numbers: Ints) -> Process:
    """One engine's part of a step; `numbers` are the ledger's, of all samples of the step."""
    scenario = world.scenario
    mine = numbers.reshape(-1, scenario.num_tried)[share.prompts].ravel()
    lane = Lane(world, "rollout", step, worker)
    if (played := _whole(world, worker, mine)) is not None:
        yield from _windows(world, lane, played, mine)
        counts = dict.fromkeys(COUNTS, 0) | {"iterations": played.iterations, "cached_tokens": played.cached_tokens}
    else:
        counts = yield from _pieces(world, lane, mine)
    prompts, responses = (world.ledger.column(column)[mine] for column in (PROMPT, RESPONSE))
    world.ledger.generated(mine, responses)
    world.ledger.settle(mine, BUFFERED)
    world.ledger.came_from(mine, worker.name)
    given, made = int(prompts.sum()), int(responses.sum())
    host = {"calls": 1.0, "samples": float(len(mine)), "tokens": float(made)}
    yield from world.spend(worker, "rollout_host", host)
    world.dealer.returned(np.repeat(share.prompts, scenario.num_tried), responses)
    lane.end(
        tokens=given + made, samples=len(mine), prompt_tokens=given, response_tokens=made, **counts, **share.notes
    )  # fmt: skip


def _pieces(world: World, lane: Lane, numbers: Ints) -> Process:
    """An engine's share, piece by piece, so that others can come between; returns what was counted."""
    worker, requests = lane.worker, samples(world.scenario, world.ledger, numbers)
    engine = start_engine(world.scenario, worker, world.costs.engine_table(worker), requests)
    engine.arrive(range(len(requests)))
    counts = dict.fromkeys(COUNTS, 0)
    for piece in engine.pieces():
        yield from _piece(world, lane, piece)
        _hand_on(world, lane, numbers[list(piece.ended)])
        counts["iterations"] += piece.iterations
        counts["preemptions"] += piece.preempted
        counts["recomputed_tokens"] += piece.recomputed_tokens
        counts["cached_tokens"] += piece.cached_tokens
    return counts


def _whole(world: World, worker: Worker, numbers: Ints) -> Played | None:
    """An engine's share in one go; None where somebody may come between, or counting blocks is not enough."""
    if worker.parallelism.data > 1 or not world.exclusive(worker) or world.slowed(worker):
        return None
    chosen, table = settings(world.scenario, worker), world.costs.engine_table(worker)
    if not countable(chosen, table):
        return None
    prompt, response, index = (world.ledger.column(column)[numbers] for column in (PROMPT, RESPONSE, INDEX))
    requests, groups = Requests(prompt=prompt, response=response), index // world.scenario.num_tried
    return whole(chosen, world.tables(table, chosen.max_num_seqs), requests, groups)


def _windows(world: World, lane: Lane, played: Played, numbers: Ints) -> Process:
    """What an engine did in one go; samples are handed on as they end."""
    begun, streams, place = world.now, world.streams("rollout", lane.step), 0
    order = np.argsort(played.ended_s, kind="stable")
    ends, ended = played.ended_s[order], numbers[order]
    for window in played.windows:
        seconds, last = window.end_s - window.start_s, int(np.searchsorted(ends, window.end_s, "right"))
        for first, after in _together_at(ends[place:last]) if streams else ():
            yield world.env.timeout(max(begun + ends[place + first] - world.now, 0.0))
            _hand_on(world, lane, ended[place + first : place + after])
        place = last
        cost = world.costs.iterations(lane.worker, seconds, (window.largest, window.largest))
        yield world.env.timeout(max(begun + window.end_s - world.now, 0.0))
        lane.record(
            window.op, begun + window.start_s, cost.extrapolated, tokens=window.tokens, iterations=window.iterations,
            sequences=window.sequences, prefill_tokens=window.prefill_tokens,
        )  # fmt: skip


def _together_at(times: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Where times that are equal begin and end."""
    bounds = [0, *(np.flatnonzero(np.diff(times)) + 1).tolist(), len(times)]
    return list(pairwise(bounds)) if len(times) else []


def _hand_on(world: World, lane: Lane, numbers: Ints) -> None:
    """These samples have their responses now."""
    world.ledger.came_from(numbers, lane.worker.name)
    for stream in world.streams("rollout", lane.step):
        stream.put(numbers.tolist())


def _piece(world: World, lane: Lane, piece: Piece) -> Process:
    """The iterations of a piece; what comes beside them stretches it."""
    start, worker = world.now, lane.worker
    cost = world.costs.iterations(worker, piece.seconds, (piece.first, piece.last))
    yield from world.cores(worker).work(worker, "engine_step", cost.seconds)
    lane.record(
        piece.op, start, cost.extrapolated, tokens=piece.iterations * piece.tokens, iterations=piece.iterations,
        sequences=piece.sequences,
    )  # fmt: skip
