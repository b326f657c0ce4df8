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


def sliced_bytes(scenario: Scenario, held: Mapping[str, Footprint]) -> float:
    """The most that workers of one device, by name, need there at once.

    In every turn the workers of its slice work, and the others leave what stays. When a trainer sends all weights to an
    engine that sleeps on its device, the two sets of weights lie there together.
    """
    workers = {name: scenario.workers[name] for name in held}
    slices = {name: slice_of(scenario, worker) for name, worker in workers.items()}
    stay = {name: _stays(scenario, worker, held[name]) for name, worker in workers.items()}
    most = 0.0
    for turn in dict.fromkeys(slices.values()):
        here = [name for name in held if slices[name] in ("", turn)]
        rest = sum(size for name, size in stay.items() if name not in here)
        most = max(most, rest + sum(held[name].peak_bytes for name in here))
        if any(workers[name].role == "actor" and workers[name].work == "train" for name in here):
            loaded = sum(held[name].loaded_bytes for name in here)
            most = max(most, rest + loaded + _arriving(scenario, workers, held, here))
    return most


def _arriving(
    scenario: Scenario, workers: Mapping[str, Worker], held: Mapping[str, Footprint], here: list[str]
) -> float:
    """Weights that come into sleeping engines; adapters wait on the host."""
    if scenario.model("actor").lora is not None:
        return 0.0
    asleep = [name for name in held if name not in here and workers[name].work == "generate"]
    return sum(held[name].resident["weights"] for name in asleep)


def _stays(scenario: Scenario, worker: Worker, held: Footprint) -> float:
    """Bytes of a worker whose turn it is not."""
    how = scenario.sharing[worker.pool].switch
    if how == "sleep" and worker.work != "generate":
        return held.loaded_bytes
    return 0.0 if how == "reload" else sum(held.resident.get(name, 0.0) for name in PROCESS)


def _sum(worker: Worker, held: Footprint, consumers: tuple[str, ...]) -> float:
    return sum(held.resident.get(name, 0.0) for name in consumers) * len(worker.devices)
