"""SIGKILL from outside: whatever died, and whenever, the run goes on and ends bit for bit as if nothing had happened."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.kills import Kill, campaign
from lab import runs
from lab.scenario import Scenario

pytestmark = pytest.mark.real
Make = Callable[..., Scenario]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Short, for sockets lie below it, whose paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="lk-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def assert_exact(chosen: Scenario, folder: Path, kills: int, seed: int) -> list[Kill]:
    """No kill took more finished steps than lay after the last checkpoint, and nothing else differs."""
    found, wrong, ended = campaign(chosen, folder, kills, seed)
    assert wrong == []
    assert len(found) == kills
    every = chosen.checkpoint.every_steps
    assert every is not None
    assert all(kill.done_again <= every - 1 for kill in found)
    header = runs.read(ended).header
    assert header.status == "done"
    assert [fault["steps"] for fault in header.faults] == [kill.done_again for kill in found]
    assert header.samples["lost"] == sum(kill.done_again for kill in found) * chosen.workload.samples_per_step
    return found


def test_supervised_training_killed_twice(scenario: Make, short_path: Path) -> None:
    """While a checkpoint is written beside the run, and later on."""
    saving = {"every_steps": 1, "blocking": False}
    chosen = scenario("sft-learns", num_steps=30, checkpoint=saving, evaluate={"every_steps": None})
    assert_exact(chosen, short_path, kills=2, seed=3)


@pytest.mark.full
@pytest.mark.parametrize(("name", "every", "blocking"), [
    ("ppo-tiny", 1, True),
    ("quickstart", 4, False),
])  # fmt: skip
def test_a_run_killed_ten_times(scenario: Make, short_path: Path, name: str, every: int, blocking: bool) -> None:
    """Twenty kills in all: of a one-step-off PPO run that saves every step, and of a GRPO run that saves every fourth."""
    changes = {"num_steps": 60, "checkpoint": {"every_steps": every, "blocking": blocking}}
    found = assert_exact(scenario(name, **changes), short_path, kills=10, seed=every)
    assert {kill.moment for kill in found} == {"writing", "training"}
    assert len({kill.victim for kill in found}) > 1
