"""Held-out points of the local profile: predicted by the profile, skipped with a reason where there are none."""

from pathlib import Path

import numpy as np
import pytest

from lab.measurement import HELD_OUT, Measurement, write_jsonl
from profiles.fit import fit
from profiles.profile import local_profile_path, local_source
from simulator.studies.accuracy import Unavailable, errors
from simulator.studies.this_machine import this_machine


def points(source: str, slower: float = 1.0, neighbours: int = 0) -> list[Measurement]:
    """Optimizer steps that cost 1 ms and 2 ns a parameter, at sizes that differ by `source`."""
    random = np.random.default_rng(len(source))
    return [
        Measurement(
            op="optimizer",
            quantities={"passes": 1.0, "parameters": size},
            seconds=slower * (1e-3 + 2e-9 * size),
            source=source,
            spread=0.04,
            neighbours=neighbours,
        )
        for size in random.uniform(1e5, 1e7, 12).tolist()
    ]


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAB_DATA_HOME", str(tmp_path))
    path = local_profile_path("cpu-core")
    path.parent.mkdir(parents=True)
    return path


def kept(path: Path, *groups: list[Measurement], source: dict | None = None) -> None:
    measurements = [point for group in groups for point in group]
    write_jsonl(measurements, path.with_suffix(".measurements.jsonl"))
    fit(measurements, name="local", source=source or local_source()).save(path)


def test_points_that_follow_the_fitted_law_have_no_error(local: Path) -> None:
    kept(local, points("measured"), points(HELD_OUT))
    part = this_machine()
    assert len(part.judged) == 12 and {row.quantity for row in part.rows} == {"optimizer"}
    assert max(abs(row.error or 0) for row in part.rows) < 1e-6
    assert any("2.0%" in note for note in part.notes)


def test_held_out_points_change_nothing_but_their_errors(local: Path) -> None:
    kept(local, points("measured"), points(HELD_OUT, slower=2.0))
    line = errors(this_machine().rows)
    assert line is not None and line.bias == pytest.approx(-0.5, abs=1e-6)


def test_points_beside_busy_cores_are_not_judged(local: Path) -> None:
    kept(local, points("measured"), points(HELD_OUT), points(HELD_OUT, neighbours=1))
    assert this_machine().excluded == {"unfitted": 0, "busy": 12}


def test_without_a_profile_it_is_skipped(local: Path) -> None:
    with pytest.raises(Unavailable, match="no profile of its own"):
        this_machine()


def test_another_machines_profile_is_not_judged(local: Path) -> None:
    kept(local, points("measured"), points(HELD_OUT), source={"machine": {"cpu": "another", "cores": 1}})
    with pytest.raises(Unavailable, match="another machine"):
        this_machine()


def test_a_profile_without_held_out_points_is_skipped(local: Path) -> None:
    kept(local, points("measured"))
    with pytest.raises(Unavailable, match="no held-out points"):
        this_machine()
    local.with_suffix(".measurements.jsonl").unlink()
    with pytest.raises(Unavailable, match="is absent"):
        this_machine()
