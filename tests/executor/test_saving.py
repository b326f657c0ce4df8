"""Real trainers save to disk and restore from it: at once or beside their next updates, and then go on to the bit."""

import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor import checkpoint
from executor.checkpoint import Rank, folder_of, sealed, staging
from executor.saving import FAILED
from lab.scenario import Scenario
from lab.timeline import Span
from tests.executor.ranks import Ranks
from tests.executor.test_ranks import LORA, samples, scenario_of, trainer_of, weights_of

pytestmark = pytest.mark.real
Make = Callable[..., Scenario]
STEP = 4


@pytest.fixture(scope="module")
def fleets() -> Iterator[dict[int, Ranks]]:
    with Ranks(1) as one, Ranks(2) as two:
        yield {1: one, 2: two}


def about(scenario: Scenario) -> dict[str, Any]:
    return {"step": STEP, "digest": scenario.digest, "attempt": 0}


def save(rank: int, world: int, chosen: Scenario, role: str, root: Path) -> tuple[Any, list[Span]]:
    """Saves and goes on at once: weights when it saved, what the next update says and leaves; and the spans."""
    trainer = trainer_of(rank, world, chosen, role)
    trainer.update(0, samples(0))
    before = weights_of(trainer)
    info = trainer.save(staging(root, STEP, 0), STEP, about(chosen))
    learned = trainer.update(1, samples(1))["learning"]
    trainer.settle()
    return (before, learned, weights_of(trainer)), info["spans"]


def restore(rank: int, world: int, chosen: Scenario, role: str, root: Path) -> tuple[Any, list[Span]]:
    """The same of a trainer that did something else before it was restored."""
    trainer = trainer_of(rank, world, chosen, role)
    trainer.update(5, samples(5))
    spans = trainer.restore(folder_of(root, STEP), STEP + 1)["spans"]
    before = weights_of(trainer)
    learned = trainer.update(1, samples(1))["learning"]
    return (before, learned, weights_of(trainer)), spans


@pytest.mark.parametrize(("ranks", "stage", "role", "lora", "blocking"), [
    (1, 0, "actor", None, True),
    (2, 2, "critic", None, False),
    (1, 0, "actor", LORA, False),
    pytest.param(2, 3, "actor", None, True, marks=pytest.mark.full),
    pytest.param(2, 1, "critic", LORA, False, marks=pytest.mark.full),
])  # fmt: skip
def test_trainers_go_on_from_the_files_to_the_bit(
    fleets: dict[int, Ranks],
    scenario: Make,
    tmp_path: Path,
    ranks: int,
    stage: int,
    role: str,
    lora: Any,
    blocking: bool,
) -> None:
    chosen = scenario_of(scenario, ranks, stage, role, lora, checkpoint={"blocking": blocking})
    written = fleets[ranks].run(save, chosen, role, tmp_path)
    everybody = [Rank(role=role, rank=rank, world=ranks) for rank in range(ranks)]
    size = checkpoint.commit(tmp_path, STEP, 0, everybody, {"step": STEP})
    assert checkpoint.verify(folder_of(tmp_path, STEP), everybody)["digest"] == chosen.digest
    read = fleets[ranks].run(restore, chosen, role, tmp_path)
    for (straight, saving), (resumed, restoring) in zip(written, read, strict=True):
        for ours, theirs in ((straight[0], resumed[0]), (straight[2], resumed[2])):
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
        assert straight[1] == resumed[1]
        assert [span.op for span in saving if span.op] == ["write" if blocking else "snapshot"]
        assert [(span.op, span.stage) for span in restoring] == [("read", "restore"), ("", "restore")]
        assert 0 < restoring[0].bytes < size


def fill_the_disk(rank: int, world: int, chosen: Scenario, root: Path) -> str:
    """No file may become as long as the weights are: the system refuses it, as it does where a disk is full."""
    trainer = trainer_of(rank, world, chosen, "actor")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, most))
    try:
        trainer.save(staging(root, STEP, 0), STEP, about(chosen))
        end = time.monotonic() + 60
        while not chosen.checkpoint.blocking and not (staging(root, STEP, 0) / "actor-0" / FAILED).exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        trainer.settle()
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    return ""


@pytest.mark.parametrize("blocking", [True, False])
def test_a_write_that_the_system_refuses_is_told_and_raised(
    fleets: dict[int, Ranks], scenario: Make, tmp_path: Path, blocking: bool
) -> None:
    chosen = scenario_of(scenario, checkpoint={"blocking": blocking})
    (said,) = fleets[1].run(fill_the_disk, chosen, tmp_path)
    assert "File too large" in said and "model.safetensors" in said
    rank = Rank(role="actor", rank=0, world=1)
    assert sealed(staging(tmp_path, STEP, 0), rank) is None
    if not blocking:
        assert "File too large" in (staging(tmp_path, STEP, 0) / rank.name / FAILED).read_text()
