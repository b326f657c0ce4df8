"""Twenty minutes of random faults: memory stays flat, and nothing is left behind or half-written."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.soak import Memory, Process, lines, soak

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


def test_growth_is_that_after_the_warm_up() -> None:
    warming = [(float(at), 100 + at) for at in range(0, 60, 2)]
    flat = Process(name="driver", begun_s=0.0, resident=warming + [(float(at), 1000) for at in range(60, 200, 2)])
    assert flat.growth == 0.0
    leaks = Process(name="driver", begun_s=0.0, resident=[(float(at), 1000 + at) for at in range(0, 200, 2)])
    assert leaks.growth is not None and leaks.growth > 0.05
    assert Process(name="young", begun_s=0.0, resident=warming).growth is None
    assert Memory().processes == {}
