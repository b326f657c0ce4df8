"""The processes of a run: one Ray actor for each worker of the scenario, all in one placement group."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lab.errors import InputError
from lab.placement import Worker
from lab.scenario import Scenario

HOST = "127.0.0.1"
_GRAIN = 10_000
"""Ray counts CPUs in ten-thousandths"""

GANG_TIMEOUT_S = 60.0
CALLS_AT_ONCE = 8
"""of a scorer that is called by engines and the driver"""

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
    """All actors of a scenario, by worker name. A context: leaving it ends every process that it started."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.actors: dict[str, Any] = {}
        self.weight_port = free_port()
        self._group: PlacementGroup | None = None
        self._ray_folder: str | None = None
        """of the Ray that this run started; None where Ray was running already"""

    def start(self) -> None:
        """Starts Ray where it does not run yet, then every actor at once or none.

        Raises InputError where the cluster has too few CPUs.
        """
        if not ray.is_initialized():
            self._ray_folder = tempfile.mkdtemp(prefix="lab-")  # short: paths of sockets end at 107 bytes
            start_ray(self._ray_folder)
        shares = cpu_shares(self.scenario)
        self._group = _gang(list(shares.values()))
        ports = {role: free_port() for role in ("actor", "critic", "reward")}
        for bundle, (name, share) in enumerate(shares.items()):
            worker = self.scenario.workers[name]
            kind, arguments, variables = _actor(self.scenario, worker, ports)
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            options = {"num_cpus": share, "scheduling_strategy": place, "runtime_env": {"env_vars": variables}}
            options |= {"max_concurrency": CALLS_AT_ONCE} if served(self.scenario, worker) else {}
            self.actors[name] = ray.remote(kind).options(**options).remote(*arguments)

    def team(self, role: str, work: str) -> list[Any]:
        """The actors of one (role, work), in order."""
        return [self.actors[worker.name] for worker in self.scenario.team(role, work)]

    def names(self) -> dict[str, str]:
        """Of the workers by the id of their actor."""
        return {actor._actor_id.hex(): name for name, actor in self.actors.items()}

    def stop(self) -> None:
        """Kills every actor, whatever it does, and ends Ray where `start` began it."""
        for actor in self.actors.values():
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        if self._ray_folder is not None:
            ray.shutdown()
            shutil.rmtree(self._ray_folder, ignore_errors=True)
        self.actors, self._group, self._ray_folder = {}, None, None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _gang(shares: list[float]) -> PlacementGroup:
    """A placement group with all shares or none. Raises InputError where Ray has too few CPUs, or frees too few in time.

    What an earlier run held is given back a moment after its actors are killed, so this waits for it.
    """
    needed, total = sum(shares), ray.cluster_resources().get("CPU", 0.0)
    if needed > total + 1e-6:
        problem = f"the workers need {needed:g} CPUs, Ray has {total:g}"
        raise InputError(key="pools", problem=problem, remedy="name fewer cores, or start Ray with more")
    group = placement_group([{"CPU": share} for share in shares], strategy="PACK")
    try:
        ray.get(group.ready(), timeout=GANG_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        free = ray.available_resources().get("CPU", 0.0)
        problem = f"the workers need {needed:g} CPUs, Ray has {free:g} free"
        raise InputError(key="pools", problem=problem, remedy="end what else runs on Ray") from None
    return group


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


def served(scenario: Scenario, worker: Worker) -> bool:
    """Whether engines hand samples to a worker while its driver waits for another answer of it."""
    return worker.work == "score" and scenario.schedule.scoring == "sample"


def free_port() -> int:
    """A TCP port of this machine that was free a moment ago.

    It lies below those that the system gives to outgoing connections (ip(7), ip_local_port_range), one of which could
    take it before it is used, and above those of Ray's own workers (10002 to 19999). Raises OSError where none is free.
    """
    first = _first_outgoing_port()
    for port in random.SystemRandom().sample(range(first * 5 // 8, first), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise OSError(f"no TCP port between {first * 5 // 8} and {first} is free on {HOST}")


def _first_outgoing_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 32768  # Linux's own


def start_ray(folder: str) -> None:
    """A Ray on this machine alone, with its files in `folder`, which has to have a short name."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # a run tells its first one, without a traceback
    ray.init(
        address="local", num_cpus=len(os.sched_getaffinity(0)), num_gpus=0, include_dashboard=False,
        log_to_driver=False, logging_level=logging.ERROR, _temp_dir=folder,
    )  # fmt: skip


def environment(threads: int) -> dict[str, str]:
    """Variables that a worker's process starts with; it finds the packages where this process found them."""
    here = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join(dict.fromkeys([here, os.getcwd(), *filter(None, sys.path)]))
    return ENVIRONMENT | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": paths}


def _actor(scenario: Scenario, worker: Worker, ports: dict[str, int]) -> tuple[type, tuple[Any, ...], dict[str, str]]:
    """Class, arguments and environment of a worker's actor."""
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
        "MASTER_ADDR": HOST, "MASTER_PORT": str(ports[worker.role]),
    }  # fmt: skip
    return Trainer, (worker, index, len(team), worker.role, scenario, ports[worker.role]), variables
