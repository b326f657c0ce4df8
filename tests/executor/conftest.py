"""One Ray for all tests that start real parts, and scenarios small enough for them."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.library import model
from lab.load import load
from lab.scenario import Scenario

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


@pytest.fixture(scope="session")
def scenario() -> Callable[..., Scenario]:
    """A shipped scenario with parts of some top-level keys replaced: scenario("quickstart", num_steps=2)."""

    def make(name: str, **changes: Any) -> Scenario:
        original = load(SCENARIOS / f"{name}.yaml")
        data = original.model_dump(mode="json", by_alias=True)
        return original.replace({key: merged(data[key], part) for key, part in changes.items()})

    return make


def merged(old: Any, new: Any) -> Any:
    """`new` over `old` where both are mappings, else `new`."""
    return old | new if isinstance(old, dict) and isinstance(new, dict) else new


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """Ray on this machine, shared by every real test of the session."""
    import ray

    from executor.workers import start_ray

    with tempfile.TemporaryDirectory(prefix="lab-", ignore_cleanup_errors=True) as folder:
        start_ray(folder)
        yield
        ray.shutdown()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny network, not to be changed."""
    from executor.network import build_actor, save

    folder = tmp_path_factory.mktemp("whole")
    save(build_actor(model("tiny-llama"), 0), folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "model"))
