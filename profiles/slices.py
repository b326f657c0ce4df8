"""Works that take a device in turns: what moves when one gives way to another, and what they need together."""

from __future__ import annotations

from collections.abc import Mapping

from lab.placement import Worker
from lab.scenario import Scenario
from lab.slices import slice_of
from profiles.footprint import Footprint

PROCESS = ("CUDA context", "NCCL buffers")
"""consumers that last as long as the process"""
TRAINED = ("adapters", "optimizer states", "fp32 masters")
"""consumers that a trainer changes, beside weights that are trained in full"""
KEPT = ("weights", *TRAINED)
"""consumers that are brought back when a worker is loaded; what else it needs is made anew"""


def loaded_bytes(worker: Worker, held: Footprint) -> float:
    """Weights and states that a worker needs on all its devices; `held` on one of them."""
    return _sum(worker, held, KEPT)


def trained_bytes(scenario: Scenario, worker: Worker, held: Footprint) -> float:
    """What a trainer has changed since it was loaded; frozen weights under adapters are as they were."""
    adapted = scenario.model(worker.role).lora is not None
    return _sum(worker, held, TRAINED if adapted else KEPT)


def asleep_bytes(scenario: Scenario, worker: Worker, held: Footprint) -> float:
    """Weights that a sleeping engine keeps on the host: none where the next sync brings all of them anew."""
    return _sum(worker, held, KEPT) if scenario.model(worker.role).lora is not None else 0.0


def fullest_turn(scenario: Scenario, held: Mapping[str, Footprint]) -> Mapping[str, Footprint]:
    """What workers of one device, by name, have there when most of it is taken; together their peaks.

    In every turn the workers of its slice work, and the others leave what stays. When a trainer sends all weights to an
    engine that sleeps on its device, the two sets of weights lie there together.
    """
    workers = {name: scenario.workers[name] for name in held}
    slices = {name: slice_of(scenario, worker) for name, worker in workers.items()}
    stays = {name: Footprint(resident=_stays(scenario, worker, held[name])) for name, worker in workers.items()}
    instants = []
    for turn in dict.fromkeys(slices.values()):
        here = {name: held[name] for name in held if slices[name] in ("", turn)}
        instants.append(stays | here)
        if any(workers[name].role == "actor" and workers[name].work == "train" for name in here):
            loaded = {name: Footprint(resident=one.resident) for name, one in here.items()}
            instants.append(stays | _arriving(scenario, workers, held, stays) | loaded)
    return max(instants, key=lambda lying: sum(one.peak_bytes for one in lying.values()), default={})


def _arriving(
    scenario: Scenario,
    workers: Mapping[str, Worker],
    held: Mapping[str, Footprint],
    stays: Mapping[str, Footprint],
) -> dict[str, Footprint]:
    """Engines that sleep while all weights come to them; adapters wait on the host."""
    if scenario.model("actor").lora is not None:
        return {}
    asleep = [name for name, worker in workers.items() if worker.work == "generate"]
    weights = {name: {"weights": held[name].resident["weights"]} for name in asleep}
    return {name: Footprint(resident={**stays[name].resident, **weights[name]}) for name in asleep}


def _stays(scenario: Scenario, worker: Worker, held: Footprint) -> Mapping[str, float]:
    """Consumers of a worker that are there while it is not its turn."""
    how = scenario.sharing[worker.pool].switch
    if how == "sleep" and worker.work != "generate":
        return held.resident
    return {name: held.resident[name] for name in PROCESS if name in held.resident} if how != "reload" else {}


def _sum(worker: Worker, held: Footprint, consumers: tuple[str, ...]) -> float:
    return sum(held.resident.get(name, 0.0) for name in consumers) * len(worker.devices)


def spilled_bytes(scenario: Scenario, step: int) -> float:
    """Of a step's samples on disk: 8 for each token's id, 4 for the log-prob of each response token, 52 beside them."""
    workload, seed = scenario.workload, scenario.seed
    prompts, responses = workload.prompt_lengths(seed, step), workload.response_lengths(seed, step)
    given = float(prompts.sum()) * workload.samples_per_prompt
    return 8.0 * given + 12.0 * float(responses.sum()) + 52.0 * responses.size
