"""`lab fit-memory`: tables for a person, numbers for a program, and one message for a wrong file."""

import json
from pathlib import Path

import pytest

from lab.cli import main

MINIMAL = "scenarios/minimal-8gpu.yaml"


def test_it_tells_a_person_what_makes_the_minimal_system_fit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit-memory", MINIMAL])
    told = capsys.readouterr().out
    assert ended.value.code == 0
    for text in ("minimal-8gpu fits", "adapters (LoRA) of actor and critic", "int8 weights of the reward", "KV cache"):
        assert text in told


def test_its_numbers_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit-memory", MINIMAL, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] and set(told["pools"]) == {"rollout", "train", "frozen"}
    for pool in told["pools"].values():
        assert sum(row["bytes"] for row in pool["consumers"]) == pytest.approx(pool["peak_bytes"])


def test_it_names_the_least_that_would_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tight.yaml"
    file.write_text(Path(MINIMAL).read_text().replace(", lora: {rank: 16}", ""))
    with pytest.raises(SystemExit) as ended:
        main(["fit-memory", str(file)])
    told = capsys.readouterr().out
    assert ended.value.code == 0 and "does NOT fit" in told and "least that fits:" in told


def test_a_wrong_file_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(Path(MINIMAL).read_text().replace("int8", "int7"))
    with pytest.raises(SystemExit) as ended:
        main(["fit-memory", str(file)])
    assert ended.value.code == 2 and "int7" in capsys.readouterr().err


def test_check_tells_by_its_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tight.yaml"
    file.write_text(Path(MINIMAL).read_text().replace(", lora: {rank: 16}", ""))
    for path, status in ((MINIMAL, 0), (str(file), 1)):
        for more in ([], ["--json"]):
            with pytest.raises(SystemExit) as ended:
                main(["fit-memory", path, "--check", *more])
            assert ended.value.code == status
    capsys.readouterr()


def test_json_names_keys_as_the_file_spells_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit-memory", MINIMAL, "--json"])
    pools = json.loads(capsys.readouterr().out)["pools"].values()
    keys = {row["key"] for pool in pools for row in (*pool["possible"], *pool["taken"])}
    assert "place.actor.train.zero_stage" in keys or "place.actor.train.offload" in keys
    assert not any("_train" in key or "_score" in key for key in keys)


def test_host_memory_of_what_is_offloaded_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit-memory", "scenarios/ppo-7b-16gpu.yaml"])
    assert "of host memory on a machine" in capsys.readouterr().out
