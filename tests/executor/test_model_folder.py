"""Folders with weights as they come: each fault is told before anything starts."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.limits import refuse
from executor.model_folder import problems, read_header
from executor.network import build_critic, save
from lab.errors import InputError
from lab.library import model as library_model
from lab.scenario import Scenario

TINY = library_model("tiny-llama")
WEIGHTS = "model.safetensors"


def told(folder: Path) -> str:
    found = list(problems(folder, TINY))
    assert all(problem and remedy for problem, remedy in found)
    return "; ".join(problem for problem, _ in found)


def test_a_whole_folder_is_fine(folder: Path) -> None:
    assert told(folder) == ""


def edited(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_found(folder: Path, dtype: torch.dtype, bad: float) -> None:
    def spoil(tensors: dict[str, torch.Tensor], value: float) -> dict[str, torch.Tensor]:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        tensors["model.norm.weight"][7] = value
        return tensors

    edited(folder, lambda tensors: spoil(tensors, torch.finfo(dtype).max))
    assert told(folder) == "", "the largest number of a type is one"
    edited(folder, lambda tensors: spoil(tensors, bad))
    assert "model.norm.weight" in told(folder)
    assert "NaN" in told(folder)


def test_a_missing_folder_is_told_with_its_neighbour(folder: Path) -> None:
    assert "no such file" in told(folder.with_name("modal"))
    assert "is no folder" in told(folder / "config.json")


@pytest.mark.parametrize(
    ("gone", "problem"),
    [("config.json", "has no config.json"), (WEIGHTS, "it has no model.safetensors"), ("tokenizer.json", "")],
)
def test_missing_files_are_told(folder: Path, gone: str, problem: str) -> None:
    (folder / gone).unlink()
    assert problem in told(folder)
    assert bool(told(folder)) == bool(problem)


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    assert "pickled weights are not read" in told(folder)


def test_adapters_alone_start_no_network(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapters.safetensors")
    assert "adapters alone start no network" in told(folder)


def test_of_a_checkpoint_only_the_weights_count(folder: Path) -> None:
    save_file({"0.exp_avg": torch.full((3,), torch.nan)}, folder / "optimizer.safetensors")
    assert told(folder) == ""
    save_file({"weight": torch.full((1, 128), torch.nan)}, folder / "value_head.safetensors")
    assert "value_head.safetensors has numbers that are NaN" in told(folder)


def test_a_trunk_without_a_head_can_judge_but_not_write(folder: Path) -> None:
    edited(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})
    assert "it has no LM head" in told(folder)
    assert not list(problems(folder, TINY, writes=False))


def test_a_frozen_reward_has_to_have_learned_to_judge(folder: Path, scenario: Callable[..., Scenario]) -> None:
    """A critic may begin with a new head; a judge with a new head says noise."""
    model = {"arch": "tiny-llama", "dtype": "float32", "weights": str(folder)}
    place = {"reward.score": {"pool": "all", "kind": "model", "threads": 1}}
    chosen = scenario("quickstart", models={"reward": model}, place=place)
    with pytest.raises(InputError, match=r"no value_head\.safetensors") as told_of:
        refuse(chosen)
    assert told_of.value.key == "models.reward.weights"
    refuse(scenario("ppo-tiny", models={"critic": model}))
    save(build_critic(TINY, 0, head_std=1.0), folder)
    refuse(chosen)


def test_a_config_of_another_shape_is_told(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))
    assert "has layers 3, the architecture has 4" in told(folder)
    (folder / "config.json").write_text("{")
    assert "not valid JSON" in told(folder)


def test_weights_of_another_shape_are_told(folder: Path) -> None:
    edited(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if ".2." not in name})
    assert "parameters, the architecture has" in told(folder)


def test_an_embedding_of_another_vocabulary_is_told(folder: Path) -> None:
    edited(folder, lambda tensors: tensors | {"model.embed_tokens.weight": torch.zeros(32, 128)})
    assert "model.embed_tokens.weight" in told(folder)


@pytest.mark.parametrize("cut", [0, 4, 1000, -1])
def test_a_file_that_was_cut_off_is_told(folder: Path, cut: int) -> None:
    held = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(held[:cut])
    assert "no whole safetensors file" in told(folder)


@pytest.mark.parametrize(
    "header", [b"[]", b"{", b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}', b'{"a": 3}']
)
def test_a_header_that_makes_no_sense_is_told(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / WEIGHTS
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    with pytest.raises(InputError, match="no whole safetensors file"):
        read_header(path)


def test_headers_are_read_as_the_library_reads_them(folder: Path) -> None:
    theirs = load_file(folder / WEIGHTS)
    ours = {tensor.name: tensor for tensor in read_header(folder / WEIGHTS)}
    assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == {n: t.shape for n, t in ours.items()}
    some = ours["model.norm.weight"]
    held = np.memmap(some.file, dtype=np.float32, mode="r", offset=some.begin, shape=some.shape)
    assert np.array_equal(held, theirs["model.norm.weight"].numpy())


def test_an_index_names_its_files(folder: Path) -> None:
    names = list(load_file(folder / WEIGHTS))
    (folder / WEIGHTS).rename(folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")}))
    assert told(folder) == ""
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-2.safetensors")}))
    assert "model-2.safetensors" in told(folder)


def test_a_tokenizer_with_more_tokens_than_the_vocabulary_is_told(folder: Path) -> None:
    held = json.loads((folder / "tokenizer.json").read_text())
    held["model"]["vocab"]["Z"] = 64
    (folder / "tokenizer.json").write_text(json.dumps(held))
    assert "has 65 tokens, the model a vocabulary of 64" in told(folder)


def test_a_scenario_is_refused_by_the_key_that_names_the_folder(
    scenario: Callable[..., Scenario], folder: Path
) -> None:
    def named(path: Path) -> Any:
        return scenario(
            "quickstart", models={"actor": {"arch": "tiny-llama", "dtype": "float32", "weights": str(path)}}
        )

    refuse(named(folder))
    (folder / WEIGHTS).unlink()
    with pytest.raises(InputError, match=r"models\.actor\.weights"):
        refuse(named(folder))
