"""The stage `weight_sync` of a run with a barrier: the sender and the engines meet, and weights go from one to the others."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from executor.calls import values
from executor.publishing import FOLDER, fetches, needs_base
from lab.placement import Worker

if TYPE_CHECKING:
    from executor.experience import Samples
    from executor.stages import Stages

Info = dict[str, Any]


async def meet(stages: Stages, engines: Sequence[Worker]) -> None:
    """These engines and the sender of weights meet, perhaps anew; where engines fetch, only if they need something beside
    what they will fetch."""
    scenario, workers, places = stages.scenario, stages.workers, [1]
    if fetches(scenario):
        await _show(stages, engines)
        if not needs_base(scenario):
            return
    for engine in engines:
        places.append(places[-1] + (1 if fetches(scenario) else engine.parallelism.tensor))
    meeting = (workers.host, workers.new_weight_port(), places[-1])
    joining = [
        stages.switching.joining(engine, *meeting, place) for engine, place in zip(engines, places, strict=False)
    ]
    bare = any(stages.switching.takes_turns(engine) for engine in engines) or not needs_base(scenario)
    await values([*(rank.connect.remote(*meeting, bare=bare) for rank in stages.trainers["actor"]), *joining])


async def _show(stages: Stages, engines: Sequence[Worker]) -> None:
    """Engines are told where weights will lie."""
    workers, folder = stages.workers, stages.folder / FOLDER
    board, *_ = await values([rank.open_weights.remote(workers.host, folder) for rank in stages.trainers["actor"]])
    workers.on_stop.append(lambda: shutil.rmtree(folder, ignore_errors=True))
    await values([workers.actors[one.name].look_at.remote(board, workers.address_of(one.name)) for one in engines])


def circle(stages: Stages) -> list[Worker]:
    """The engines that get weights which are published now."""
    return stages.present() if stages.recovery is None else stages.recovery.circle()


async def sync(
    stages: Stages, step: int, after: Sequence[Any], ahead: Callable[[Sequence[Any]], None] | None
) -> list[Info]:
    """The weights of a step are sent, and every engine has them; where rollouts run a version behind, log-probs are compared
    on a few samples then.

    `after`: what the calls wait for; `ahead` begins what follows of a push, once it is called.
    """
    ranks, engines = stages.trainers["actor"], circle(stages)
    others = after if len(ranks) > 1 else ()
    if fetches(stages.scenario):
        actors = {engine.name: stages.workers.actors[engine.name] for engine in engines}
        infos = await stages.publication.meet(step, ranks, actors, others)
    else:
        calls = [rank.send_weights.remote(step, *others) for rank in ranks]
        calls += [stages.switching.receiving(engine, step, after) for engine in engines]
        if ahead is not None:
            ahead(calls)
        infos = await values(calls)
    if stages.scenario.schedule.mode != "synchronous":
        infos.append({"spans": [], "learning": {"logprob_gap": await _gap(stages, step)}})
    return infos


async def _gap(stages: Stages, step: int) -> float:
    """max |log-prob of the engine - log-prob of the trainer| over a few fresh tokens of every engine that has the weights."""
    late = {stages.scenario.team("actor", "generate")[place].name for place in stages.publication.absent}
    engines = [engine.name for engine in circle(stages) if engine.name not in late]
    probes = [stages.workers.actors[name].probe.remote(step) for name in engines]
    ranks = stages.trainers["actor"]  # every rank takes part in every pass: sharded weights are gathered together
    theirs = await values([rank.logprobs.remote(probe) for probe in probes for rank in ranks])
    samples: list[Samples] = await values(probes)
    return max(largest_gap(one.logprobs, other) for one, other in zip(samples, theirs[:: len(ranks)], strict=True))


def largest_gap(ours: list[Any], theirs: list[Any]) -> float:
    """max |a - b| over two lists of arrays of the same lengths."""
    return max(float(np.max(np.abs(a - b))) for a, b in zip(ours, theirs, strict=True))
