"""The driver's side of the publication, with engines in Ray actors: who has the weights, who is late, and what is told."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from executor.offering import Offering
from executor.publishing import Board, Info, Offered, Publication
from executor.recorder import Recorder
from executor.rollout import RolloutWorker
from executor.workers import HOST, environment
from lab.scenario import Scenario
from lab.timeline import Span
from lab.wiring import build

pytestmark = pytest.mark.real
Make = Callable[..., Scenario]
TIMEOUT_S = 1.5


class Sender:
    """A network in the trainer's place, as an actor: it changes at random, and is offered."""

    def __init__(self, scenario: Scenario) -> None:
        from executor.network import build_actor
        from executor.origin import origin
        from tests.executor.trained import Trained

        self.recorder = Recorder("actor.train[0]", "all")
        self.trained = Trained(build_actor(*origin(scenario, "actor")))
        self.offering = Offering(scenario, 0, 1, self.recorder)

    def open(self, folder: Path) -> Board:
        return self.offering.open(HOST, folder)

    def offer_weights(self, step: int, acknowledged: int, *_: Any) -> Offered:
        self.trained.change(step)
        with self.recorder.stage("weight_sync", step, step + 1) as self._notes:
            return self.offering.offer(step + 1, acknowledged, self.trained)  # type: ignore[arg-type]

    def weights_published(self, absent: list[str]) -> Info:
        return {"spans": self.recorder.take(), "absent": absent}


@dataclass
class Fleet:
    """Two engines and the sender, of one scenario."""

    scenario: Scenario
    engines: dict[str, Any]
    sender: Any
    publication: Publication
    version: int = 0

    def sync(self) -> list[Info]:
        """Publishes the next version."""
        self.version += 1
        return asyncio.run(self.publication.meet(self.version - 1, [self.sender], self.engines))

    def versions(self) -> Any:
        return ray.get(
            [engine.__ray_call__.remote(lambda worker: worker.policy_version) for engine in self.engines.values()]
        )


@pytest.fixture(scope="module")
def fleet(local_ray: None, scenario: Make, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    place = {"actor.generate": [{"pool": "all", "engines": 2, "backend": "transformers"}]}
    sync = {"trigger": "event", "transport": "object_store", "barrier_timeout": TIMEOUT_S}
    chosen = scenario("quickstart", place=place, weight_sync=sync)
    options = {"num_cpus": 0.3, "runtime_env": {"env_vars": environment(threads=1)}}
    team = chosen.team("actor", "generate")
    engines = {w.name: ray.remote(RolloutWorker).options(**options).remote(w, i, chosen) for i, w in enumerate(team)}
    sender = ray.remote(Sender).options(**options).remote(chosen)
    ray.get([engine.ready.remote() for engine in engines.values()])
    board = ray.get(sender.open.remote(tmp_path_factory.mktemp("run") / "weights"))
    ray.get([engine.look_at.remote(board, HOST) for engine in engines.values()])
    yield Fleet(chosen, engines, sender, Publication(chosen, build(chosen)))
    for actor in (*engines.values(), sender):
        ray.kill(actor)


def stages(infos: list[Info]) -> list[Span]:
    return [span for info in infos for span in info["spans"] if not span.op]


def test_all_engines_have_what_was_published_before_anybody_goes_on(fleet: Fleet) -> None:
    infos, version = fleet.sync(), fleet.version
    assert fleet.versions() == [version, version] and fleet.publication.acknowledged == version
    assert fleet.publication.absent == frozenset()
    spans = stages(infos)
    assert sorted(span.span_id for span in spans) == sorted(
        f"weight_sync/{version - 1}/{name}" for name in ("actor.train[0]", *fleet.engines)
    )
    assert all(span.attrs.get("source", "object store") == "object store" for span in spans)


def test_who_is_late_is_named_gives_up_and_comes_again(fleet: Fleet) -> None:
    late = list(fleet.engines)[1]
    before = fleet.version
    busy = fleet.engines[late].__ray_call__.remote(lambda worker: time.sleep(TIMEOUT_S + 1.5))
    start = time.monotonic()
    infos = fleet.sync()
    assert TIMEOUT_S <= time.monotonic() - start < TIMEOUT_S + 1.2
    assert [info["absent"] for info in infos if "absent" in info] == [[late]]
    assert fleet.publication.absent == {1}
    ray.get(busy)
    assert fleet.versions() == [before + 1, before]
    fleet.sync()
    assert fleet.versions() == [before + 2, before + 2] and fleet.publication.absent == frozenset()


def test_where_all_are_late_the_run_cannot_go_on(fleet: Fleet) -> None:
    busy = [engine.__ray_call__.remote(lambda worker: time.sleep(TIMEOUT_S + 1.5)) for engine in fleet.engines.values()]
    with pytest.raises(TimeoutError, match=r"no engine has them 1\.5 s after their publication"):
        fleet.sync()
    ray.get(busy)
