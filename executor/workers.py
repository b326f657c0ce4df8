"""The processes of a run: one Ray actor for each worker of the scenario, all in one placement group."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from executor import gang, leavings, tracing
from executor.clocks import Clocks, align
from executor.gang import RayNode, cpu_shares, given_address
from executor.nodes import (
    HOST,
    free_cpus,
    free_port,
    free_ports,
    interface,
    join_ray,
    on,
    one_host,
    ray_nodes,
    start_ray,
)
from executor.seat import TALK
from lab.placement import Worker
from lab.scenario import Scenario

__all__ = ["HOST", "Workers", "cpu_shares", "environment", "free_port", "start_ray"]
GANG_TIMEOUT_S = 60.0
CALLS_AT_ONCE = 8
"""of a scorer that is called by engines and the driver; of those who are told something while another call runs"""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the actor's own process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM's sampler would compile for 20 s once log-probs are asked for
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    # glibc gives freed memory back after every pass otherwise: ten thousand page faults, a fifth of a pass's time
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


class Workers:
    """All actors of a scenario, by worker name. A context: leaving it ends every process that it started.

    With RAY_ADDRESS the run takes places on the Ray that is there, on several machines where the scenario describes so
    many; without, it starts one on this machine for itself.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.actors: dict[str, Any] = {}
        self.others: dict[str, Any] = {}
        """actors beside the workers, by name: they have no devices of their own, and end with the run"""
        self.on_stop: list[Callable[[], object]] = []
        """called when every process has ended"""
        self.begun: Callable[[str], object] = lambda name: None
        """told of every worker whose process is new"""
        self.weight_port = free_port()
        self.nodes: dict[str, RayNode] = {}
        """by worker name"""
        self._bundles: dict[str, int] = {}
        self._ports: dict[str, int] = {}
        """by role, where the ranks of its trainer meet"""
        self._interfaces: dict[str, str] = {}
        """by node id, where there are several nodes"""
        self._group: PlacementGroup | None = None
        self._place: leavings.Place | None = None
        """with the files of the Ray that this run started; None where Ray was running already"""
        self._names: dict[str, str] = {}
        self._shared = set[Path]()
        """in memory, which processes that were killed may leave behind"""

    def start(self) -> None:
        """Starts Ray where it does not run yet, then every actor at once or none.

        Raises InputError where a machine has too few CPUs, no node stands for it, or RAY_ADDRESS does not answer.
        """
        if not ray.is_initialized():
            self._connect()
        plan = gang.mapped(self.scenario, ray_nodes())
        shares, homes = cpu_shares(self.scenario), gang.machines(self.scenario)
        self.nodes = {name: plan[homes[name]] for name in shares}
        self._bundles = {name: bundle for bundle, name in enumerate(shares)}
        self._group = _gang(self.scenario, plan, shares)
        self._meeting_places()
        for name in shares:
            self.begin(name)

    def _connect(self) -> None:
        address = given_address()
        if address is not None:
            join_ray(address)
            return
        self._place = leavings.Place()
        os.mkdir(self._scratch()["TMPDIR"])
        start_ray(str(self._place.path))

    def _scratch(self) -> dict[str, str]:
        """Where processes put temporary files, which then end with the run, however they do."""
        return {} if self._place is None else {"TMPDIR": str(self._place.path / "tmp")}

    def _meeting_places(self) -> None:
        """Ports at which ranks meet, free on the machine of their first one."""
        variables = environment(threads=1)
        for role in ("actor", "critic", "reward"):
            team = self.scenario.team(role, "train")
            node = self.nodes[team[0].name] if team else None
            self._ports[role] = free_port() if node is None else on(node, variables, free_ports, 1)[0]
        if not one_host(list(self.nodes.values())):
            nodes = {node.node_id: node for node in self.nodes.values()}
            self._interfaces = {name: on(node, variables, interface, node.address) for name, node in nodes.items()}
            self.new_weight_port()

    def new_weight_port(self) -> int:
        """Where the sender of weights listens from now on: a free port of the machine of the actor's first rank."""
        team = self.scenario.team("actor", "train")
        node = self.nodes.get(team[0].name) if team else None
        self.weight_port = free_port() if node is None else on(node, environment(threads=1), free_ports, 1)[0]
        return self.weight_port

    @property
    def host(self) -> str:
        """Where the sender of weights listens: the loopback, or the address of its node where there are several."""
        return self.host_of("actor")

    def host_of(self, role: str) -> str:
        """Where the first rank of a role's trainer is met."""
        team = self.scenario.team(role, "train")
        return self.nodes[team[0].name].address if self._interfaces and team else HOST

    def address_of(self, name: str) -> str:
        """Where others find the process of a worker."""
        return self.nodes[name].address if self._interfaces else HOST

    def begin(self, name: str) -> Any:
        """A fresh process for a worker, in its place; nothing is loaded in it. What had the name before has to be gone."""
        worker = self.scenario.workers[name]
        kind, arguments, variables = _actor(self.scenario, worker, self._ports, self.host_of(worker.role))
        if (lane := self._interfaces.get(self.nodes[name].node_id)) is not None:
            variables |= {"GLOO_SOCKET_IFNAME": lane}
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[name])
        share, variables = cpu_shares(self.scenario)[name], variables | self._scratch()
        options = {"num_cpus": share, "scheduling_strategy": place, "runtime_env": {"env_vars": variables}}
        options |= {"max_concurrency": CALLS_AT_ONCE} if served(self.scenario, worker) else {}
        groups = {TALK: CALLS_AT_ONCE} | ({"news": 1} if listened(self.scenario, worker) else {})
        self.actors[name] = _remote(kind, *groups.items()).options(**options).remote(*arguments)
        self._names[self.actors[name]._actor_id.hex()] = name
        self.begun(name)
        return self.actors[name]

    def beside(self, name: str, kind: type, *arguments: Any, near: str, threads: int = 1) -> Any:
        """An actor that is no worker, on the machine of a role's first trainer rank; `threads`: calls at once."""
        team = self.scenario.team(near, "train")
        place = NodeAffinitySchedulingStrategy(self.nodes[team[0].name].node_id, soft=False) if team else "DEFAULT"
        variables = environment(threads=1) | self._scratch()
        options = {"num_cpus": 0, "scheduling_strategy": place, "runtime_env": {"env_vars": variables}}
        self.others[name] = _remote(kind).options(max_concurrency=threads, **options).remote(*arguments)
        self._names[self.others[name]._actor_id.hex()] = name
        return self.others[name]

    def team(self, role: str, work: str) -> list[Any]:
        """The actors of one (role, work), in order."""
        return [self.actors[worker.name] for worker in self.scenario.team(role, work)]

    def names(self) -> dict[str, str]:
        """Of the workers and what is beside them by the id of their actor, those that were replaced too."""
        return dict(self._names)

    @property
    def addresses(self) -> dict[str, Any]:
        """`nodes`: the address of each worker's machine; empty where there is one."""
        return {"nodes": {name: node.address for name, node in self.nodes.items()}} if self._interfaces else {}

    async def clocks(self) -> Clocks:
        """The workers' clocks against this process's."""
        self._remember()
        return await align(self.actors, {name: node.node_id for name, node in self.nodes.items()})

    def clear(self) -> None:
        """Kills every actor, whatever it does, and gives their places back; `start` begins anew."""
        self._remember()
        for actor in [*self.actors.values(), *self.others.values()]:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self.actors, self.others, self._group = {}, {}, None
        endings, self.on_stop = self.on_stop, []
        for ending in endings:
            ending()

    def _remember(self) -> None:
        """What of shared memory the processes have at this moment."""
        if self._place is not None:
            self._shared |= leavings.shared_by(leavings.family())
            self._place.remember(self._shared)

    def stop(self) -> None:
        """Kills every actor, and ends Ray where `start` began it."""
        self.clear()
        if self._place is not None:
            ray.shutdown()
            self._place.remove()
            leavings.remove(self._shared)
        self._place = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@cache
def _remote(kind: type, *groups: tuple[str, int]) -> Any:
    """The same one every time: Ray keeps a copy of each as long as it runs."""
    return ray.remote(concurrency_groups=dict(groups))(kind) if groups else ray.remote(kind)


def _gang(scenario: Scenario, plan: Mapping[str, RayNode], shares: Mapping[str, float]) -> PlacementGroup:
    """A placement group with all shares or none, each on the node that `plan` has for its worker's machine.

    What an earlier run held is given back a moment after its actors are killed, so this waits for it. Raises InputError
    where too few CPUs are free in time.
    """
    homes = gang.machines(scenario)
    alone = one_host(list(plan.values())) and len(ray_nodes()) == 1
    selectors = None if alone else [{"ray.io/node-id": plan[homes[name]].node_id} for name in shares]
    group = placement_group(
        [{"CPU": share} for share in shares.values()], strategy="PACK", bundle_label_selector=selectors
    )
    try:
        ray.get(group.ready(), timeout=GANG_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        raise gang.busy(scenario, plan, free_cpus()) from None
    return group


def served(scenario: Scenario, worker: Worker) -> bool:
    """Whether engines hand samples to a worker while its driver waits for another answer of it."""
    return worker.work == "score" and scenario.schedule.scoring == "sample"


def listened(scenario: Scenario, worker: Worker) -> bool:
    """Whether the driver waits for news of a worker while it sends it commands."""
    return worker.work == "generate" and scenario.schedule.mode == "asynchronous"


def environment(threads: int) -> dict[str, str]:
    """Variables that a worker's process starts with; it finds the packages where this process found them."""
    here = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join(dict.fromkeys([here, os.getcwd(), *filter(None, sys.path)]))
    return ENVIRONMENT | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": paths} | tracing.asked()


def _actor(
    scenario: Scenario, worker: Worker, ports: Mapping[str, int], host: str
) -> tuple[type, tuple[Any, ...], dict[str, str]]:
    """Class, arguments and environment of a worker's actor; `host`: where ranks of its role meet."""
    from executor.rollout import RolloutWorker
    from executor.scoring import ReferenceWorker, RewardWorker
    from executor.trainer import Trainer

    team = scenario.team(worker.role, worker.work)
    index, variables = team.index(worker), environment(worker.threads)
    if worker.work == "generate":
        return RolloutWorker, (worker, index, scenario), variables
    if worker.work == "score":
        return (RewardWorker if worker.role == "reward" else ReferenceWorker), (worker, scenario), variables
    variables |= {
        "RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(len(team)), "LOCAL_SIZE": str(len(team)),
        "MASTER_ADDR": host, "MASTER_PORT": str(ports[worker.role]),
    }  # fmt: skip
    return Trainer, (worker, index, len(team), worker.role, scenario, ports[worker.role]), variables
