"""Gangs of workers: all or nothing, and what an earlier run held is waited for."""

import os
from pathlib import Path

import pytest

from executor import workers
from lab.errors import InputError

pytestmark = pytest.mark.real
CORES = len(os.sched_getaffinity(0))


def test_a_gang_follows_another_at_once(local_ray: None) -> None:
    from ray.util.placement_group import remove_placement_group

    for _ in range(5):
        remove_placement_group(workers._gang([CORES / 4] * 4))


def test_more_than_there_is_is_refused_at_once(local_ray: None) -> None:
    with pytest.raises(InputError, match="Ray has") as caught:
        workers._gang([1.0] * (CORES + 1))
    assert caught.value.key == "pools"


def test_what_another_holds_is_named_after_a_while(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.util.placement_group import remove_placement_group

    held = workers._gang([CORES / 2] * 2)
    monkeypatch.setattr(workers, "GANG_TIMEOUT_S", 0.5)
    try:
        with pytest.raises(InputError, match="free"):
            workers._gang([CORES / 2] * 2)
    finally:
        remove_placement_group(held)


def test_a_port_is_none_that_an_outgoing_connection_could_take() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [workers.free_port() for _ in range(50)]
    assert all(19_999 < port < first for port in ports) and len(set(ports)) > 25
