"""Many seeds: intervals hold what they say, and do not depend on how many processes play."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.load import load
from lab.metrics import summarise
from profiles.profile import find
from simulator.run import simulate
from simulator.studies.seeds import Interval, many

SCENARIO = load(Path(__file__).resolve().parents[3] / "scenarios" / "quickstart.yaml").replace({"num_steps": 3})
PROFILES = {"cpu-core": find("cpu-core", "cpu-core-epyc")}


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=50))
def test_the_mean_and_nine_tenths_of_the_values_lie_in_the_interval(values: list[float]) -> None:
    found = Interval.of(values)
    assert min(values) <= found.low <= found.high <= max(values)
    assert found.mean == pytest.approx(np.mean(values))
    inside = sum(found.low * (1 - 1e-12) <= value <= found.high * (1 + 1e-12) for value in values)
    assert inside >= 0.9 * len(values) - 2


def test_nothing_has_no_interval() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Interval.of([])


def test_every_seed_is_played_once_and_told() -> None:
    heard: list[int] = []
    found = many(SCENARIO, PROFILES, seeds=[4, 5, 6], processes=2, progress=heard.append)
    alone = [summarise(simulate(SCENARIO.replace({"seed": seed}), PROFILES))["makespan_s"] for seed in (4, 5, 6)]
    assert heard == [1, 2, 3]
    assert found["makespan_s"].mean == pytest.approx(np.mean(alone))
    assert found["makespan_s"].low < found["makespan_s"].high
    assert found == many(SCENARIO, PROFILES, seeds=[4, 5, 6], processes=1)
