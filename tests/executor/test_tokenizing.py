"""Texts read by a folder's tokenizer, which the lab does without transformers, as transformers reads them."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.tokenizer import CHARACTERS, EOS, IDS, build_tokenizer, save_tokenizer
from lab.errors import InputError
from lab.load import load
from lab.tokenizing import tokenizer
from tests.lab.test_data import TINY, written


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(made)
    return made


@given(text=st.text(st.sampled_from(CHARACTERS + "ÄZ"), min_size=1))
def test_a_folder_reads_as_its_library_does(folder: Path, text: str) -> None:
    ours, theirs = tokenizer(str(folder)), build_tokenizer()
    assert ours.vocabulary == len(theirs) == 64
    assert ours.prompt(text) == theirs(text)["input_ids"]
    assert ours.response(text) == [*theirs(text, add_special_tokens=False)["input_ids"], IDS[EOS]]
    assert tokenizer(None).response(text) == ours.response(text)


def test_what_is_wrong_with_a_folder_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="cannot be read"):
        tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert tokenizer(str(tmp_path)).response("a") == [IDS["a"]], "nothing says how sequences end"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": EOS}}))
    assert tokenizer(str(tmp_path)).response("a") == [IDS["a"], IDS[EOS]]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(InputError, match="'</s>' is no token"):
        tokenizer(str(tmp_path))


def test_a_scenario_reads_its_file_with_the_tokenizer_that_it_names(folder: Path, tmp_path: Path) -> None:
    named = {"reward": TINY | {"tokenizer": str(folder)}}
    without = load(written(tmp_path, "reward_model", "preferences", models={"reward": TINY})).workload
    said = load(written(tmp_path, "reward_model", "preferences", models=named)).workload
    assert said.response_tokens == without.response_tokens
    assert [n + 1 for n in said.prompt_tokens.values] == list(without.prompt_tokens.values), "it adds no <bos>"  # type: ignore[union-attr]
