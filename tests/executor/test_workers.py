"""Gangs of workers: all or nothing, and what an earlier run held is waited for."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executor import gang, nodes, workers
from executor.workers import Workers
from lab.errors import InputError
from lab.scenario import Scenario

Make = Callable[..., Scenario]
CORES = len(os.sched_getaffinity(0))
real = pytest.mark.real


def placed(chosen: Scenario) -> Any:
    """A gang for a scenario's workers."""
    plan = gang.mapped(chosen, nodes.ray_nodes())
    return workers._gang(chosen, plan, gang.cpu_shares(chosen))


@real
def test_a_gang_follows_another_at_once(local_ray: None, scenario: Make) -> None:
    from ray.util.placement_group import remove_placement_group

    for _ in range(5):
        remove_placement_group(placed(scenario("quickstart")))


@real
def test_more_than_there_is_is_refused_at_once(local_ray: None, scenario: Make) -> None:
    node = {"name": "n", "count": 1, "device": "cpu-core", "devices": CORES + 1, "intra": "shared-memory"}
    many = {"cluster": {"sites": [{"nodes": [node]}]}, "pools": {"all": f"n[0:{CORES + 1}]"}}
    with pytest.raises(InputError, match=f"need {CORES + 1} CPUs on machine n/0; .* has {CORES} CPUs") as caught:
        gang.mapped(scenario("quickstart", **many), nodes.ray_nodes())
    assert caught.value.key == "pools"


@real
def test_what_another_holds_is_named_after_a_while(
    local_ray: None, scenario: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.util.placement_group import remove_placement_group

    held = placed(scenario("quickstart"))
    monkeypatch.setattr(workers, "GANG_TIMEOUT_S", 0.5)
    try:
        with pytest.raises(InputError, match="are free"):
            placed(scenario("quickstart"))
    finally:
        remove_placement_group(held)


def test_a_port_is_none_that_an_outgoing_connection_could_take() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [nodes.free_port() for _ in range(50)]
    assert all(19_999 < port < first for port in ports) and len(set(ports)) > 25
    assert len(set(nodes.free_ports(10))) == 10


@pytest.mark.parametrize("address", ["nonsense", "ray://10.0.0.1:10001", "host:", ":1"])
def test_what_is_no_address_is_said(address: str) -> None:
    with pytest.raises(InputError, match="is no address of the form host:port") as caught:
        nodes.join_ray(address)
    assert caught.value.key == "RAY_ADDRESS"


def test_a_ray_that_does_not_answer_is_said(scenario: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{nodes.free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(InputError, match=f"no Ray answers at {address}: Connection refused") as caught:
        Workers(scenario("quickstart"))._connect()
    assert caught.value.remedy is not None and "ray start --head" in caught.value.remedy


def test_the_loopback_s_addresses_are_on_its_interface() -> None:
    assert nodes.interface("127.0.0.2") == "lo"
