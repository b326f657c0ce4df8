"""A gang: every worker of a run at once or none, each on the Ray node that stands for its machine, and what is missing where.

Nothing here calls Ray: nodes come in as they are described, and a plan or a message goes out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lab.errors import InputError
from lab.scenario import Scenario

LABEL = "lab.node"
"""of a Ray node (`ray start --labels lab.node=train`): the scenario's group of machines that it is one of"""
ADDRESS = "RAY_ADDRESS"
"""the variable that names a Ray that runs already: host:port, or `auto` for the one on this machine"""
_GRAIN = 10_000
"""Ray counts CPUs in ten-thousandths"""
_ROUNDING = 1e-6
_NAMED = 4
"""workers that a message names"""


def given_address() -> str | None:
    """The Ray that RAY_ADDRESS names; None where a run starts its own on this machine."""
    said = os.environ.get(ADDRESS, "").strip()
    return said if said and said != "local" else None


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A machine as Ray knows it."""

    node_id: str
    address: str
    cpus: float
    """all that it has"""
    labels: Mapping[str, str] = field(default_factory=dict)
    here: bool = False
    """whether this process is on it"""

    def __str__(self) -> str:
        label = f" ({LABEL}={self.labels[LABEL]})" if LABEL in self.labels else ""
        return f"{self.address}{label} has {self.cpus:g} CPUs"


def cpu_shares(scenario: Scenario) -> dict[str, float]:
    """CPUs that each worker claims of Ray: its own devices, or an equal share of those of a pool that is shared.

    Shares are rounded down to what Ray can count, so that a pool's workers never need more than the pool has.
    """
    sizes = {pool: sum(worker.pool == pool for worker in scenario.workers.values()) for pool in scenario.pools}
    shares = {}
    for worker in scenario.workers.values():
        sharing = scenario.sharing.get(worker.pool)
        shared = sharing is not None and sharing.how != "exclusive"
        own = len(scenario.devices[worker.pool]) / sizes[worker.pool] if shared else len(worker.devices)
        shares[worker.name] = int(min(own, len(worker.devices)) * _GRAIN) / _GRAIN
    return shares


def machines(scenario: Scenario) -> dict[str, str]:
    """The machine of each worker: that of its first device."""
    return {name: scenario.hardware.machine_of(worker.devices[0]) for name, worker in scenario.workers.items()}


def mapped(scenario: Scenario, nodes: Sequence[RayNode]) -> dict[str, RayNode]:
    """The Ray node of each machine that has workers; none stands for two.

    `cluster: local` is the node that this process is on. A machine of a cluster that is written out goes to a node with
    its group's name as label where any node has such a label; else the largest machine goes to the largest node.
    Raises InputError saying who finds no place, and what each node has.
    """
    shares, homes = cpu_shares(scenario), machines(scenario)
    needs = {
        machine: sum(shares[name] for name, home in homes.items() if home == machine) for machine in homes.values()
    }
    if scenario.cluster == "local":
        [machine] = needs
        own = [node for node in nodes if node.here]
        return {machine: _fitting(scenario, machine, needs[machine], own, nodes)}
    free = sorted(nodes, key=lambda node: (-node.cpus, not node.here, node.address, node.node_id))
    labelled = any(LABEL in node.labels for node in nodes)
    found: dict[str, RayNode] = {}
    for machine in sorted(needs, key=lambda machine: -needs[machine]):
        group = machine.rpartition("/")[0]
        fits = [node for node in free if not labelled or node.labels.get(LABEL) == group]
        found[machine] = _fitting(scenario, machine, needs[machine], fits, nodes)
        free.remove(found[machine])
    return {machine: found[machine] for machine in needs}


def _fitting(
    scenario: Scenario, machine: str, needed: float, fits: Sequence[RayNode], nodes: Sequence[RayNode]
) -> RayNode:
    """The first node that has what a machine's workers need. Raises InputError where none has."""
    chosen = next((node for node in fits if node.cpus >= needed - _ROUNDING), None)
    if chosen is not None:
        return chosen
    problem = f"{who(scenario, machine)} need {round(needed, 2):g} CPUs on machine {machine}; {there(nodes)}"
    remedy = "name fewer cores, or start Ray with more"
    if any(LABEL in node.labels for node in nodes) and not fits:
        group = machine.rpartition("/")[0]
        problem = (
            f"{who(scenario, machine)} stand on machine {machine}, and no Ray node that is left has {LABEL}={group}; "
        )
        problem, remedy = problem + there(nodes), f"start one with `ray start --labels {LABEL}={group}`"
    elif not fits and scenario.cluster != "local":
        problem = f"{who(scenario, machine)} stand on machine {machine}, and no Ray node is left for it; {there(nodes)}"
        remedy = "start Ray on one more machine, or describe fewer"
    raise InputError(key="pools", problem=problem, remedy=remedy)


def busy(scenario: Scenario, plan: Mapping[str, RayNode], free: Mapping[str, float]) -> InputError:
    """What is told when nodes have enough CPUs, but others hold them. `free`: CPUs by node id."""
    shares, homes = cpu_shares(scenario), machines(scenario)
    parts = []
    for machine, node in plan.items():
        needed = sum(shares[name] for name, home in homes.items() if home == machine)
        left = free.get(node.node_id, 0.0)
        if left < needed - _ROUNDING:
            named = who(scenario, machine)
            parts.append(
                f"{named} need {round(needed, 2):g} CPUs, and of the {node.cpus:g} of {node.address} {left:g} are free"
            )
    problem = "; ".join(parts) or "Ray could not place the workers in time"
    return InputError(key="pools", problem=problem, remedy="end what else runs on Ray")


def who(scenario: Scenario, machine: str) -> str:
    """The workers of a machine, the first few by name."""
    names = [name for name, home in machines(scenario).items() if home == machine]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def there(nodes: Sequence[RayNode]) -> str:
    """What each node has."""
    return "; ".join(str(node) for node in nodes) if nodes else "Ray has no node"
