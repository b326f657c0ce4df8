"""What a fault can hit in a scenario, and what it takes with it. Machines are called `train/0`, as in the network."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lab.coherence import Incoherent
from lab.library import device as library_device

if TYPE_CHECKING:
    from lab.faults import Fault
    from lab.scenario import Scenario

_WORKS = {"worker_lost": ("generate",), "trainer_lost": ("train",), "scorer_lost": ("score",)}
BUFFER = "buffer"
"""the one target of buffer_lost"""


def targets(scenario: Scenario, kind: str) -> tuple[str, ...]:
    """Everything that a fault of a kind can hit."""
    if kind == "buffer_lost":
        return (BUFFER,)
    if kind == "link_degraded":
        return tuple(_links(scenario))
    if kind == "node_lost":
        return tuple(_machines(scenario))
    works = _WORKS.get(kind, ("generate", "train", "score"))
    workers = tuple(worker.name for worker in scenario.workers.values() if worker.work in works)
    return workers + (tuple(_machines(scenario)) if kind == "preempted" else ())


def hit(scenario: Scenario, fault: Fault) -> tuple[str, ...]:
    """The targets of one entry: the one it names, or every one of its kind. Raises Incoherent without a key of its own.

    A preemption that names nothing takes machines, not workers.
    """
    known = targets(scenario, fault.kind)
    if fault.target is None:
        return tuple(_machines(scenario)) if fault.kind == "preempted" else known
    if fault.target not in known:
        shown = ", ".join(known[:12]) + (", …" if len(known) > 12 else "")
        remedy = f"it can hit {shown}" if known else "remove the fault"
        raise Incoherent("target", f"{fault.kind} cannot hit {fault.target!r}: there is none", remedy)
    return (fault.target,)


def taken(scenario: Scenario, target: str) -> tuple[str, ...]:
    """The workers that go with a worker or a machine."""
    machine_of = scenario.hardware.machine_of
    return tuple(
        worker.name
        for worker in scenario.workers.values()
        if target == worker.name or target in {machine_of(device) for device in worker.devices}
    )


def covering(scenario: Scenario, worker: str) -> list[Fault]:
    """The entries of a scenario's faults by which a worker, or the buffer, may be lost, in their order."""
    if worker == BUFFER:
        return [fault for fault in scenario.faults if fault.kind == "buffer_lost"]
    return [
        fault
        for fault in scenario.faults
        if fault.kind not in ("straggler", "link_degraded", "buffer_lost")
        and any(worker in taken(scenario, target) for target in hit(scenario, fault))
    ]


def loses_engines(scenario: Scenario) -> bool:
    """Whether an engine may be lost."""
    return any(covering(scenario, worker.name) for worker in scenario.team("actor", "generate"))


def rolls_back(scenario: Scenario, kind: str, target: str) -> bool:
    """Whether a fault takes trained state away, so that the run goes back to a checkpoint."""
    lossy = kind in ("trainer_lost", "node_lost", "preempted")
    return lossy and any(scenario.workers[name].work == "train" for name in taken(scenario, target))


def _machines(scenario: Scenario) -> list[str]:
    """Machines that somebody works on."""
    machine_of = scenario.hardware.machine_of
    return list(dict.fromkeys(machine_of(d) for worker in scenario.workers.values() for d in worker.devices))


def _links(scenario: Scenario) -> Iterator[str]:
    """Links as `kind place`, those of all devices in use, and `kind` for all of one kind."""
    cluster = scenario.hardware
    machines = [f"{node.name}/{i}" for node in cluster.nodes for i in range(node.count)]
    for devices in scenario.devices.values():
        yield from (f"device {device}" for device in devices)
        yield from (
            f"host {device}" for device in devices if library_device(cluster.node_of(device).device).kind == "gpu"
        )
    yield from (f"port {machine}" for machine in machines)
    for site in cluster.sites:
        yield f"spine {site.name}"
        if math.isfinite(site.storage.total_bandwidth):
            yield f"storage {site.name}"
    yield from (f"storage {machine}" for machine in machines)
    for wan in cluster.wan:
        (a, b) = wan.between
        yield from (f"wan {a}>{b}", f"wan {b}>{a}")


def check_faults(scenario: Scenario) -> None:
    """Raises Incoherent for a fault that cannot happen or from which there is no way back."""
    for i, fault in enumerate(scenario.faults):
        key = f"faults[{i}]"
        try:
            found = hit(scenario, fault)
        except Incoherent as error:
            raise Incoherent(f"{key}.{error.key}", error.problem, error.remedy) from None
        _way_back(scenario, key, fault)
        if any(rolls_back(scenario, fault.kind, target) for target in found):
            _restorable(scenario, f"{key} ({fault.kind})")
        if fault.kind == "preempted" and fault.duration is None:
            raise Incoherent(
                f"{key}.duration", "a preemption that never ends", "say how long it takes: `duration: 10 min`"
            )


def _way_back(scenario: Scenario, key: str, fault: Fault) -> None:
    engines = [worker.name for worker in scenario.team("actor", "generate")]
    takers = [name for name in engines if name not in spares(scenario)]
    if fault.spare is not None and (fault.spare not in engines or fault.spare == fault.target):
        raise Incoherent(f"{key}.spare", f"{fault.spare!r} is no other engine", f"the engines are {', '.join(engines)}")
    if fault.kind == "worker_lost" and fault.way_back == "reassign" and len(takers) < 2:
        raise Incoherent(f"{key}.recovery", "there is no other engine to take over", "set it to restart")
    if engines and not takers:
        raise Incoherent(f"{key}.spare", "every engine is a spare", "leave one that works")


def spares(scenario: Scenario) -> frozenset[str]:
    """Engines that stand idle until they replace another."""
    return frozenset(fault.spare for fault in scenario.faults if fault.spare is not None)


def _restorable(scenario: Scenario, what: str) -> None:
    keep = scenario.checkpoint.keep
    if scenario.checkpoint.every_steps is None:
        problem = f"{what} needs a checkpoint to restart from"
        raise Incoherent("checkpoint.every_steps", problem, "set it, for example to 10")
    if keep is not None and not keep.recovery and not keep.latest:
        problem = f"{what} needs the last checkpoint, which would be deleted"
        raise Incoherent("checkpoint.keep.recovery", problem, "set it to true")
