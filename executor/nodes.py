"""Ray as a run finds it: started for this run alone, or running already, on several machines perhaps (RAY_ADDRESS)."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from executor.gang import ADDRESS, RayNode
from lab.errors import InputError

HOST = "127.0.0.1"
_ANSWER_S = 5.0
LOOPBACK = "lo"


def start_ray(folder: str) -> None:
    """A Ray on this machine alone, with its files in `folder`, which has to have a short name."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # a run tells its first one, without a traceback
    ray.init(
        address="local", num_cpus=len(os.sched_getaffinity(0)), num_gpus=0, include_dashboard=False,
        log_to_driver=False, logging_level=logging.ERROR, _temp_dir=folder,
    )  # fmt: skip


def join_ray(address: str) -> None:
    """Connects to a Ray that runs. Raises InputError, after some seconds, where nothing answers there."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    _answers(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _silent(address, line) from None


def _answers(address: str) -> None:
    """Raises InputError where no program listens at host:port, which Ray itself would wait long for."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        problem = f"{address!r} is no address of the form host:port"
        raise InputError(key=ADDRESS, problem=problem, remedy="name a Ray head's, e.g. 10.0.0.1:6379, or unset it")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise _silent(address, error.strerror or str(error)) from None


def _silent(address: str, why: str) -> InputError:
    problem = f"no Ray answers at {address}: {why}"
    return InputError(key=ADDRESS, problem=problem, remedy="start one there with `ray start --head`, or unset it")


def ray_nodes() -> list[RayNode]:
    """The machines of the Ray that this process is connected to."""
    here = ray.get_runtime_context().get_node_id()
    return [
        RayNode(
            node_id=node["NodeID"], address=node["NodeManagerAddress"], cpus=node["Resources"].get("CPU", 0.0),
            labels=node.get("Labels") or {}, here=node["NodeID"] == here,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]  # fmt: skip


def free_cpus() -> dict[str, float]:
    """CPUs that nobody holds, by node id."""
    from ray._private.state import available_resources_per_node

    return {node: float(free.get("CPU", 0.0)) for node, free in available_resources_per_node().items()}


def on(node: RayNode, variables: dict[str, str], function: Any, *arguments: Any) -> Any:
    """What a function returns on a node; in this process where that is there."""
    if node.here:
        return function(*arguments)
    place = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    task = _task(function).options(
        num_cpus=0, scheduling_strategy=place, runtime_env={"env_vars": variables}, max_retries=0
    )
    return ray.get(task.remote(*arguments))


@cache
def _task(function: Any) -> Any:
    """The same one every time: Ray keeps a copy of each as long as it runs."""
    return ray.remote(function)


def interface(address: str) -> str:
    """The network interface of this machine that has an address; the loopback where none has it."""
    if address.startswith("127."):
        return LOOPBACK
    found = [name for name, given in psutil.net_if_addrs().items() if any(one.address == address for one in given)]
    return found[0] if found else LOOPBACK


def free_ports(number: int, host: str = HOST) -> list[int]:
    """Different TCP ports of this machine that were free a moment ago. Raises OSError where there are not so many.

    They lie below those that the system gives to outgoing connections (ip(7), ip_local_port_range), one of which could
    take them before they are used, and above those of Ray's own workers (10002 to 19999).
    """
    first = _first_outgoing_port()
    found: list[int] = []
    for port in random.SystemRandom().sample(range(first * 5 // 8, first), 100 + number):
        if len(found) == number:
            break
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            found.append(port)
    if len(found) < number:
        raise OSError(f"no TCP port between {first * 5 // 8} and {first} is free on {host}")
    return found


def free_port() -> int:
    """One of `free_ports`."""
    return free_ports(1)[0]


def _first_outgoing_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 32768  # Linux's own


def one_host(nodes: Sequence[RayNode]) -> bool:
    """Whether all workers of a run are on one Ray node."""
    return len({node.node_id for node in nodes}) <= 1
