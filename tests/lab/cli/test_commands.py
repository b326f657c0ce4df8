"""The command line as a user meets it: whole processes, exit statuses, messages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LAB = [str(Path(sys.executable).parent / "lab")]
QUICK = Path("scenarios/quickstart.yaml")


def lab(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAB, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=120)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> dict:
    done = lab("simulate", QUICK, "--json", "--out", tmp_path_factory.mktemp("runs"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


KEYS = {
    "schema_version", "scenario", "digest", "origin", "seed", "status", "num_steps", "steps_done", "run_dir", "startup_s",
    "makespan_s", "first_step_s", "step_s", "stages", "pools", "tokens", "samples", "samples_per_s", "response_tokens_per_s",
    "goodput", "lost_s", "checkpoint_s", "mtbf_s", "young_daly_s", "faults", "storage",
    "lag", "packing", "preemptions", "overhead_share", "device_hours", "cost", "bottleneck", "memory", "profiles", "data",
    "reward",
    "logprob_gap_max", "wall_s",
}  # fmt: skip


def test_simulate_prints_the_keys_and_writes_the_folder(simulated: dict) -> None:
    assert set(simulated) == KEYS
    assert simulated["status"] == "done" and simulated["steps_done"] == simulated["num_steps"] == 24
    names = {path.name for path in Path(simulated["run_dir"]).iterdir()}
    assert names == {"run.json", "scenario.yaml", "spans.parquet", "trace.json", "report.html"}


def test_a_second_simulation_is_equal_and_gets_a_folder_of_its_own(simulated: dict) -> None:
    from lab import runs

    folder = Path(simulated["run_dir"])
    again = json.loads(lab("simulate", QUICK, "--json", "--out", folder.parent).stdout)
    assert again["run_dir"] != simulated["run_dir"]
    assert runs.read(Path(again["run_dir"])).digest() == runs.read(folder).digest()


def test_compare_and_report_take_run_folders(simulated: dict, tmp_path: Path) -> None:
    done = lab("compare", simulated["run_dir"], simulated["run_dir"], "--json", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result["step"]) >= {"predicted", "measured", "error", "noise"} and "remainder" in result
    assert result["step"]["error"] == 0 and all(row["error"] in (0, None) for row in result["stages"].values())
    assert Path(result["report"]).exists()
    assert lab("report", simulated["run_dir"]).returncode == 0


def test_people_get_a_table_and_the_folder(tmp_path: Path) -> None:
    done = lab("simulate", QUICK, "--out", tmp_path)
    assert done.returncode == 0
    assert "rollout" in done.stdout and "run folder" in done.stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("seed: 7", "sed: 7"), "did you mean `seed`"),
        (("64 MiB", "64 MX"), "MiB"),
        (("num_steps: 24", "num_steps: x"), "whole number"),
        (("{task: echo}", "{task: echo"), "YAML"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "execute", "run"])
def test_bad_scenarios_exit_with_2_and_one_message(
    tmp_path: Path, command: str, change: tuple[str, str], words: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(QUICK.read_text().replace(*change))
    done = lab(command, path, "--out", tmp_path / "runs")
    assert done.returncode == 2
    assert f"{path}:" in done.stderr and words in done.stderr and "remedy" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_many_seeds_give_intervals_around_the_single_runs(tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text(QUICK.read_text().replace("num_steps: 24", "num_steps: 2"))
    done = lab("simulate", path, "--seeds", "3", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["seeds"] == [7, 8, 9]
    alone = []
    for seed in result["seeds"]:
        path.write_text(path.read_text().replace(f"seed: {seed - 1}\n", f"seed: {seed}\n"))
        alone.append(json.loads(lab("simulate", path, "--json", "--out", tmp_path / "runs").stdout)["makespan_s"])
    found = result["figures"]["makespan_s"]
    assert found["mean"] == pytest.approx(sum(alone) / 3)
    assert min(alone) <= found["low"] < found["high"] <= max(alone)
    assert found["standard_error"] > 0 and "stages.rollout" in result["figures"]
    assert {entry.name for entry in tmp_path.iterdir()} == {"short.yaml", "runs"}, "seeds keep no run folder"


def test_people_get_a_table_of_figures_and_no_bar_outside_a_terminal() -> None:
    done = lab("simulate", QUICK, "--seeds", "2")
    assert done.returncode == 0
    assert "2 seeds" in done.stdout and "90% of seeds" in done.stdout and "step_s" in done.stdout
    assert "2/2" not in done.stdout + done.stderr


@pytest.mark.parametrize("number", ["0", "-3"])
def test_less_than_one_seed_is_one_message(number: str) -> None:
    done = lab("simulate", QUICK, "--seeds", number)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: --seeds: {number} ") and "remedy" in done.stderr


def test_a_mistake_found_in_another_process_is_told_like_one_found_here(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(QUICK.read_text().replace("64 MiB", "1 B"))
    done = lab("simulate", path, "--seeds", "2")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{path}:23: rollout.kv_bytes" in done.stderr and "remedy" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "nowhere.yaml"), ("simulate",), ("lunch",), ("simulate", "scenarios/quickstart.yaml", "--profile", "no-such"),
        ("compare", "nowhere", "nowhere"), ("report", "scenarios"), ("calibrate", "nowhere"), ("simulate", "scenarios"),
        ("simulate", "scenarios/quickstart.yaml", "--cluster", "scenarios/quickstart.yaml"), ("profile", "--arch", "no-such"),
        ("execute", "scenarios/ppo-7b-16gpu.yaml"), ("run", "scenarios/ppo-7b-16gpu.yaml"), ("schema", "nowhere/x.json"),
        ("simulate", "scenarios/quickstart.yaml", "--out", "README.md"),
    ],
)  # fmt: skip
def test_wrong_arguments_exit_with_2(arguments: tuple[str, ...]) -> None:
    done = lab(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_bytes_that_are_no_text_exit_with_2(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(QUICK.read_bytes() + b"\xff\xfe")
    done = lab("simulate", path)
    assert done.returncode == 2 and "UTF-8" in done.stderr and "remedy" in done.stderr


def test_a_profile_of_another_machine_is_said_to_be_one(tmp_path: Path) -> None:
    from profiles.profile import load, shipped

    other = load(shipped()["cpu-core-epyc"])
    source = {"machine": {"cpu": "another", "cores": 512}}
    other.model_copy(update={"name": "other", "source": source}).save(tmp_path / "other.yaml")
    done = lab("simulate", QUICK, "--out", tmp_path / "runs", "--profile", tmp_path / "other.yaml")
    assert done.returncode == 0
    assert "another machine" in done.stderr and "lab profile --quick" in done.stderr


def test_what_cannot_be_executed_is_refused_before_anything_is_predicted(tmp_path: Path) -> None:
    done = lab("run", "scenarios/ppo-7b-16gpu.yaml", "--out", tmp_path / "runs")
    assert done.returncode == 2
    assert "scenarios/ppo-7b-16gpu.yaml:" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_cache_too_small_is_told_with_the_key_that_stands_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(QUICK.read_text().replace("64 MiB", "1 B"))
    done = lab("simulate", path)
    assert done.returncode == 2
    assert f"{path}:23: rollout.kv_bytes" in done.stderr
