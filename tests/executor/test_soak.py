"""Twenty minutes of random faults: memory stays flat, and nothing is left behind or half-written."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.soak import GROWTH, JUDGED_S, KEPT_BYTES, WARM_S, Memory, Process, lines, soak

SECONDS = float(os.environ.get("SOAK_SECONDS", "1200"))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Short, for sockets lie below it, whose paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ls-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.real
@pytest.mark.full
def test_a_run_survives_random_faults(short_path: Path) -> None:
    found = soak(short_path, SECONDS, seed=1)
    assert found.complaints == [], "\n".join(lines(found))
    assert len(found.struck) > SECONDS / 200
    assert len(found.timeline.header.learning) > SECONDS / 20


def sized(name: str, sizes: Callable[[float], float], seconds: int = 320, begun_s: float = 0.0) -> Process:
    resident = [(begun_s + at, int(sizes(at))) for at in range(0, seconds, 2)]
    return Process(name=name, begun_s=begun_s, resident=resident)


def test_growth_is_that_after_the_warm_up() -> None:
    assert sized("driver", lambda at: 1000 if at >= WARM_S else 100 + at).growth == 0.0
    leaks = sized("driver", lambda at: 1000 + at)
    assert leaks.growth is not None
    assert leaks.growth > 0.03
    assert sized("young", lambda at: 100 + at, seconds=int(WARM_S + JUDGED_S / 2)).growth is None
    assert Memory().processes == {}


def test_an_actor_that_is_still_loading_is_not_judged() -> None:
    loading = sized("python", lambda at: 1000 + at)
    loading.is_actor = True
    assert loading.growth is None


def test_a_worker_is_warm_a_while_after_it_works_and_the_rest_after_the_first_way_back() -> None:
    memory = Memory()
    memory.processes = {pid: sized("python", lambda at: 1000 + at, 400) for pid in (1, 2, 3)}
    memory.processes[2].is_actor = memory.processes[3].is_actor = True
    memory.name({1: "driver", 2: "actor.train[0]"}, 20.0)
    assert [process.judged[0][0] - WARM_S for process in memory.processes.values()] == [0.0, 20.0, 0.0]
    memory.name({1: "driver", 2: "actor.train[0]"}, 30.0)
    memory.name({1: "driver", 3: "actor.train[0]"}, 100.0)
    assert [process.judged[0][0] - WARM_S for process in memory.processes.values()] == [100.0, 20.0, 100.0]
    memory.name({1: "driver", 2: "actor.train[0]"}, 150.0)
    assert memory.processes[1].judged[0][0] - WARM_S == 100.0, "only the first way back is a warm-up"


def test_what_ray_keeps_of_each_process_is_allowed_to_its_servers_alone() -> None:
    memory = Memory()
    memory.processes = {
        1: sized("raylet", lambda at: 15e6 + 1e3 * at, 600), 2: sized("driver", lambda at: 1e8, 600),
        3: sized("worker", lambda at: 1e8, 300, begun_s=300.0), 4: sized("worker", lambda at: 1e8, 590, begun_s=10.0),
    }  # fmt: skip
    raylet, driver = memory.processes[1], memory.processes[2]
    assert memory.allowed(driver) == GROWTH
    assert memory.allowed(raylet) == pytest.approx(GROWTH + KEPT_BYTES / 15.15e6, rel=1e-2), "one was started meanwhile"
