"""What leaves an engine in the middle: one that is played ahead loses and keeps what one played piece by piece does."""

import numpy as np
import pytest

from lab.load import load
from lab.wiring import build
from profiles.cost import CostModel
from profiles.profile import datasheet
from simulator.ahead import AheadRun, fitting
from simulator.fleet import EngineRun
from simulator.world import Process, World

BIG = load("scenarios/ppo-7b-16gpu.yaml").replace({"schedule": {"mode": "asynchronous"}})
SHEETS = {"a100-80g-sxm": datasheet("a100-80g-sxm")}


def ends(kind: type[AheadRun] | type[EngineRun], when: float, loses: bool) -> dict[int, float]:
    """When samples end of an engine that is robbed of all it has, gets others, and is robbed of half of them."""
    world = World(BIG, build(BIG), CostModel(BIG, SHEETS))
    worker = BIG.team("actor", "generate")[0]
    assert fitting(world, worker)
    first, second = world.ledger.issue(0, np.arange(257), 0), world.ledger.issue(1, np.arange(300), 0)
    found: dict[int, float] = {}
    run = kind(world, worker, lambda sample: found.setdefault(sample, world.now), on_dry=lambda: None)

    def rob() -> Process:
        run.submit(first)
        yield world.env.timeout(when)
        before = {sample for sample, _, _ in run.running()}
        if loses:
            assert before <= set(run.lose())
        else:
            run.abort(first)
        assert not run.running()
        yield world.env.timeout(15.0)
        run.resume()
        run.submit(second)
        yield world.env.timeout(3.0)
        run.abort(second[::2])

    world.env.process(rob())
    world.env.run()
    return found


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("when", [0.2, 5.0, 20.0])
def test_an_engine_played_ahead_loses_what_one_played_piece_by_piece_does(when: float, loses: bool) -> None:
    ahead, exact = ends(AheadRun, when, loses), ends(EngineRun, when, loses)
    assert ahead.keys() == exact.keys() and ahead == pytest.approx(exact)
