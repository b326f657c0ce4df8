"""Readings of devices: bounded in number, whole on disk, none where there are none."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab import devices
from lab.charts import devices as figure
from lab.devices import MAX_MOMENTS, Reading, Readings


def reading(use: float = 0.5, name: str = "core0") -> Reading:
    return Reading(kind="device", name=name, use=use, memory_bytes=1e9)


def test_what_is_written_is_read_and_drawn(tmp_path: Path) -> None:
    kept = Readings()
    for moment in range(3):
        worker = Reading(kind="worker", name="actor.train[0]", use=0.9, memory_bytes=3e8)
        kept.add(float(moment), [reading(moment / 2), worker])
    kept.write(tmp_path / devices.FILE)
    table = devices.read(tmp_path)
    assert table.column("at_s").to_pylist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert [row["use"] for row in table.to_pylist() if row["kind"] == "device"] == [0.0, 0.5, 1.0]
    drawn = figure(table)
    assert drawn is not None
    assert [(trace["name"], trace["yaxis"]) for trace in drawn["data"]] == [
        ("core0", "y1"), ("actor.train[0]", "y2"), ("actor.train[0]", "y3"),
    ]  # fmt: skip
    assert drawn["data"][2]["y"] == [0.3, 0.3, 0.3]
    assert [path.name for path in tmp_path.iterdir()] == [devices.FILE]


def test_moments_are_moved_to_the_run_s_clock(tmp_path: Path) -> None:
    kept = Readings()
    for moment in (0.0, 20.0):
        kept.add(moment, [reading(), reading(name="core1")])
    kept.shift(-20.5)
    kept.add(1.0, [reading()])
    kept.write(tmp_path / devices.FILE)
    assert devices.read(tmp_path).column("at_s").to_pylist() == [-20.5, -20.5, -0.5, -0.5, 1.0]


def test_an_attempt_is_added_to_the_one_before(tmp_path: Path) -> None:
    for at_s in (0.0, 5.0):
        kept = Readings()
        kept.add(at_s, [reading()])
        kept.write(tmp_path / devices.FILE, devices.read(tmp_path))
    assert devices.read(tmp_path).column("at_s").to_pylist() == [0.0, 5.0]


@settings(max_examples=15)
@given(st.integers(1, 4 * MAX_MOMENTS))
def test_memory_is_bounded_and_the_first_moment_stays(number: int) -> None:
    kept = Readings()
    for moment in range(number):
        kept.add(float(moment), [reading()])
    assert 0 < kept.num_moments < MAX_MOMENTS
    moments = kept._rows["device", "core0"][::5]
    assert len(moments) == kept.num_moments
    assert list(moments) == [float(kept.stride * i) for i in range(len(moments))]
    assert moments[-1] > number - 1 - 2 * kept.stride


@pytest.mark.parametrize("content", [None, b"", b"PAR1 and no more"])
def test_a_folder_without_readings_has_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / devices.FILE).write_bytes(content)
    assert devices.read(tmp_path) is None
    assert figure(None) is None


def test_a_disk_that_refuses_leaves_nothing_half_written(tmp_path: Path) -> None:
    kept = Readings()
    kept.add(0.0, [reading()])
    (tmp_path / devices.FILE).mkdir()
    with pytest.raises(OSError):
        kept.write(tmp_path / devices.FILE)
    assert [path.name for path in tmp_path.iterdir()] == [devices.FILE]
