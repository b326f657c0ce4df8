"""`lab calibrate` on files: what it fits, what it refuses, and how it says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.measurement import Measurement, write_jsonl
from profiles.profile import load

ROOT = Path(__file__).resolve().parents[3]


def lab(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from lab.cli import main; main()", *map(str, arguments)]
    variables = os.environ | {"LAB_DATA_HOME": str(folder)}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=variables)


def measured(op: str, **sizes: list[float]) -> list[Measurement]:
    """Points of an op that takes 10 ms and 1 µs for each unit of every quantity."""
    rows = [dict(zip(sizes, values, strict=True)) for values in zip(*sizes.values(), strict=True)]
    return [Measurement(op=op, quantities=row, seconds=0.01 + 1e-6 * sum(row.values())) for row in rows]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A file that determines `checkpoint` but not `weight_sync`, and one that adds what is missing."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    write_jsonl(measured("checkpoint", bytes=[1e3, 1e5]) + measured("weight_sync", bytes=[1e4, 1e4]), first)
    write_jsonl(measured("weight_sync", bytes=[8e4]), second)
    return first, second


def test_what_the_data_do_not_determine_is_left_out_named_and_stored(tmp_path: Path, files: tuple[Path, Path]) -> None:
    done = lab(tmp_path, "calibrate", files[0], "--output", tmp_path / "p.yaml")
    assert done.returncode == 0, done.stderr
    assert "not determined: weight_sync: all points have the same bytes (10000); measure a second one" in done.stdout
    profile = load(tmp_path / "p.yaml")
    assert set(profile.ops) == {"checkpoint"} and profile.notes[0].startswith("weight_sync:")
    assert profile.ops["checkpoint"].residual_p90 < 1e-6
    assert profile.source["calibrated_with"] == [str(files[0])]


def test_earlier_measurements_beside_the_profile_cover_what_is_missing(
    tmp_path: Path, files: tuple[Path, Path]
) -> None:
    files[0].rename(tmp_path / "p.measurements.jsonl")
    done = lab(tmp_path, "calibrate", files[1], "--output", tmp_path / "p.yaml", "--json")
    assert done.returncode == 0, done.stderr
    ops = json.loads(done.stdout)["ops"]
    assert set(ops) == {"checkpoint", "weight_sync"}
    assert ops["weight_sync"]["coefficients"]["bytes"] == pytest.approx(1e-6)


def test_data_that_determine_nothing_exit_with_2_and_name_the_measurement(
    tmp_path: Path, files: tuple[Path, Path]
) -> None:
    done = lab(tmp_path, "calibrate", files[1], "--output", tmp_path / "p.yaml")
    assert done.returncode == 2 and not (tmp_path / "p.yaml").exists()
    assert "nothing can be fitted: weight_sync: all points have the same bytes" in done.stderr


def test_a_step_log_is_fitted_for_a_named_device(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    lines = [
        f"step:{i} - timing_s/gen:{2 + i} - timing_s/step:{2 + i} - perf/total_num_tokens:{1000 * i}" for i in (1, 2, 4)
    ]
    log.write_text("\n".join(lines))
    assert lab(tmp_path, "calibrate", log).returncode == 2
    assert "--device" in lab(tmp_path, "calibrate", log, "--device", "abacus").stderr
    done = lab(tmp_path, "calibrate", log, "--device", "h100-80g-sxm", "--output", tmp_path / "p.yaml")
    assert done.returncode == 0, done.stderr
    profile = load(tmp_path / "p.yaml")
    assert profile.device == "h100-80g-sxm" and "machine" not in profile.source
    assert profile.ops["gen_stage"].coefficients == pytest.approx({"each": 2.0, "tokens": 1e-3}, rel=1e-6)


def test_a_log_that_does_not_add_up_exits_with_2_and_one_message(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("step:1 - timing_s/gen:3 - timing_s/ref:1 - timing_s/step:9 - perf/total_num_tokens:5\n")
    done = lab(tmp_path, "calibrate", log, "--device", "h100-80g-sxm")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{log}:1: timing_s/step: the stages add up to 4 s (gen 3, ref 1), the step took 9 s" in done.stderr


@pytest.mark.parametrize("command", ["calibrate", "report"])
@pytest.mark.parametrize("name", ["none", "none.jsonl", "none.csv", "none/deep"])
def test_a_source_that_is_not_there_is_called_missing(tmp_path: Path, command: str, name: str) -> None:
    from lab.cli.calibrate import points
    from lab.cli.report import report
    from lab.errors import InputError

    with pytest.raises(InputError, match="no such file") as caught:
        points(tmp_path / name) if command == "calibrate" else report(tmp_path / name)
    assert caught.value.file == str(tmp_path / name) and caught.value.remedy


def test_a_profile_of_a_device_that_the_scenario_lacks_exits_with_2(tmp_path: Path) -> None:
    done = lab(tmp_path, "simulate", "scenarios/quickstart.yaml", "--profile", "l40s", "--out", tmp_path)
    assert done.returncode == 2 and "is of l40s, and the scenario uses cpu-core" in done.stderr
    assert not list(tmp_path.glob("quickstart*"))
