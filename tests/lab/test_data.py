import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lab.errors import InputError
from lab.load import dump, load, parse
from lab.rows import read
from lab.scenario import Scenario
from lab.tokenizing import tokenizer
from lab.workload import Listed, order

PLACES = {"actor.train": {"pool": "all"}, "reward.train": {"pool": "all"}, "reference.score": {"pool": "all"}}
TINY = {"arch": "tiny-llama", "dtype": "float32"}
ROWS: dict[str, list[dict[str, Any]]] = {
    "prompts": [{"prompt": "p" * n} for n in (3, 5, 7, 11)],
    "demonstrations": [{"prompt": "p" * n, "response": "r" * (n + 1)} for n in (3, 5, 7, 11)],
    "preferences": [{"prompt": "p" * n, "chosen": "c" * (n + 1), "rejected": "r" * 2} for n in (3, 5, 7, 11)],
    "labels": [{"prompt": "p" * n, "response": "r" * (n + 1), "label": n > 5} for n in (3, 5, 7, 11)],
}
LEARNS = {"sft": "demonstrations", "reward_model": "preferences", "dpo": "preferences", "kto": "labels"}


def written(folder: Path, algorithm: str, source: str, **said: Any) -> Path:
    """A scenario file and, beside it, its data."""
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[source]))
    each = 2 if source == "preferences" else 1
    whole = {
        "name": "x", "seed": 1, "cluster": "local", "algorithm": {"name": algorithm}, "pools": {"all": "local[0]"},
        "models": {"actor": TINY, "reward": TINY, "reference": {"like": "actor", "dtype": "float32"}},
        "sharing": {"all": {"how": "resident"}}, "place": PLACES, "data": {source: "data.jsonl", "held_out_share": 0.0},
        "workload": {"prompts_per_step": 3, "samples_per_prompt": each},
        "update": {"minibatch_samples": 3 * each, "microbatch_tokens": 4096}, "num_steps": 2,
    }  # fmt: skip
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(whole | said))
    return path


@pytest.mark.parametrize(("algorithm", "source"), LEARNS.items())
def test_the_lengths_of_a_workload_are_those_of_the_rows(tmp_path: Path, algorithm: str, source: str) -> None:
    scenario = load(written(tmp_path, algorithm, source))
    rows = read(tmp_path / "data.jsonl", scenario.data.source, tokenizer(None), max_tokens=None, skip=False).rows  # type: ignore[arg-type]
    for step in range(5):
        chosen = [rows[i] for i in order(1, step, 3, len(rows))]
        assert scenario.workload.prompt_lengths(1, step).tolist() == [len(row.prompt) for row in chosen]
        lengths = scenario.workload.response_lengths(1, step).tolist()
        assert lengths == [[len(response) for response in row.responses] for row in chosen]


def test_a_scenario_with_a_file_is_written_and_read_again_without_it(tmp_path: Path) -> None:
    scenario = load(written(tmp_path, "dpo", "preferences"))
    (tmp_path / "data.jsonl").unlink()
    assert parse(dump(scenario)) == scenario
    assert scenario.replace({"num_steps": 3}).workload == scenario.workload


def test_the_digest_goes_by_what_the_file_holds_and_not_by_where_it_lies(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    first, same = (load(written(tmp_path / name, "dpo", "preferences")) for name in "ab")
    assert first.data.file != same.data.file
    assert first.digest == same.digest
    path = written(tmp_path, "dpo", "preferences")
    (tmp_path / "data.jsonl").write_text((tmp_path / "data.jsonl").read_text().replace('"rr"', '"ss"'))
    assert load(path).digest != first.digest


@pytest.mark.parametrize("algorithm", LEARNS)
@pytest.mark.parametrize("source", ROWS)
def test_data_that_an_algorithm_cannot_use_is_refused(tmp_path: Path, algorithm: str, source: str) -> None:
    path = written(tmp_path, algorithm, source)
    if LEARNS[algorithm] == source:
        assert load(path).data.source == source
        return
    with pytest.raises(InputError) as told:
        load(path)
    assert told.value.file == str(path)
    assert told.value.key == f"data.{source}"
    assert str(told.value.remedy) == f"name a file as `{LEARNS[algorithm]}: FILE.jsonl`"


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ({"data": {"preferences": "data.jsonl", "prompts": "data.jsonl"}}, "data.preferences"),
        ({"data": {"preferences": "data.jsonl", "task": "echo"}}, "data.task"),
        ({"data": {"task": None}}, "data.task"),
        ({"data": {"preferences": "data.jsonl", "on_broken": "ignore"}}, "data.on_broken"),
        ({"data": {"preferences": "data.jsonl", "held_out_share": 0.9}}, "data.held_out_share"),
        ({"workload": {"prompts_per_step": 3, "samples_per_prompt": 4}}, "workload.samples_per_prompt"),
        (
            {
                "workload": {
                    "prompts_per_step": 3,
                    "samples_per_prompt": 2,
                    "prompt_tokens": {"dist": "fixed", "value": 3},
                }
            },
            "workload.prompt_tokens",
        ),
        ({"evaluate": {"every_steps": 1, "samples_per_prompt": 2}}, "data.held_out_share"),
        (
            {"evaluate": {"every_steps": 1, "samples_per_prompt": 4}, "data": {"preferences": "data.jsonl"}},
            "evaluate.samples_per_prompt",
        ),
    ],
)
def test_contradictions_are_told_with_their_key(tmp_path: Path, said: dict[str, Any], key: str) -> None:
    lengths = {"prompt_tokens": {"dist": "fixed", "value": 3}, "response_tokens": {"dist": "fixed", "value": 3}}
    if said.get("data") == {"task": None}:
        said = said | {"workload": {"prompts_per_step": 3, "samples_per_prompt": 2} | lengths}
    path = written(tmp_path, "dpo", "preferences", **said)
    with pytest.raises(InputError) as told:
        load(path)
    assert (told.value.file, told.value.key) == (str(path), key)
    assert told.value.remedy


def test_a_missing_file_is_told_with_the_key_that_names_it(tmp_path: Path) -> None:
    path = written(tmp_path, "dpo", "preferences")
    (tmp_path / "data.jsonl").unlink()
    with pytest.raises(InputError, match=r"data\.preferences") as told:
        load(path)
    assert told.value.file == str((tmp_path / "data.jsonl").absolute())


def test_skipped_lines_are_counted(tmp_path: Path) -> None:
    path = written(tmp_path, "dpo", "preferences", data={"preferences": "data.jsonl", "on_broken": "skip"})
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('{"prompt": \n')
    assert load(path).data.skipped == 1


def test_every_epoch_reads_every_row_once_in_an_order_of_its_own() -> None:
    read_rows = np.concatenate([order(3, step, 6, 10) for step in range(10)]).reshape(-1, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in read_rows.tolist())
    assert len({tuple(epoch) for epoch in read_rows.tolist()}) == len(read_rows)
    assert np.array_equal(order(3, 4, 6, 10, 3), order(3, 4, 6, 10)[:3])


@pytest.mark.parametrize("values", [(5,), (5, 5, 5), (1, 2, 2, 9, 9, 9, 1)])
def test_listed_lengths_are_short_to_write(values: tuple[int, ...]) -> None:
    listed = Listed(dist="listed", values=values)
    assert Listed.model_validate_json(listed.model_dump_json()) == listed
    assert Listed(dist="listed", values=" ".join(map(str, values))) == listed  # type: ignore[arg-type]


def test_a_list_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="not a list of lengths"):
        Listed(dist="listed", values="3 x")  # type: ignore[arg-type]


def test_a_folder_of_weights_beside_the_scenario_is_found_there(tmp_path: Path) -> None:
    models = {"actor": TINY | {"weights": "mine"}, "reference": {"like": "actor", "dtype": "float32"}}
    path = written(tmp_path, "dpo", "preferences", models=models)
    assert load(path).model("actor").weights == "mine"
    (tmp_path / "mine").mkdir()
    assert load(path).model("actor").weights == str(tmp_path / "mine")


def test_a_tasks_data_have_no_file() -> None:
    scenario = load("scenarios/quickstart.yaml")
    assert scenario.data.source is None
    assert scenario.data.about() == {}
    assert isinstance(scenario, Scenario)
    with pytest.raises(ValueError, match="task"):
        _ = scenario.data.file
