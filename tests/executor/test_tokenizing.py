"""Texts read by a folder's tokenizer, which the lab does without transformers, as transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from executor.limits import refuse
from executor.network import build_actor
from executor.rollout import stop_tokens
from executor.saving import _describer, _reader
from executor.tokenizer import CHARACTERS, EOS, IDS, build_tokenizer, save_tokenizer
from lab.errors import InputError
from lab.load import load
from lab.scenario import Scenario
from lab.tokenizing import tokenizer
from tests.executor.conftest import SCENARIOS
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


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of other ids, which ends sequences with 63."""
    made = tmp_path_factory.mktemp("other")
    ids = {character: 62 - i for i, character in enumerate(CHARACTERS)} | {"</s>": 63, "<unk>": 0}
    inner = Tokenizer(models.WordLevel(vocab=ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "tokenizer_class": "Own"}))
    return made


def asking(folder: Path, named: Path | None, **said: Any) -> Scenario:
    """A scenario that asks the prompts of a file, which the tokenizer in `named` reads."""
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": "a" * n}) + "\n" for n in range(1, 20)))
    whole = yaml.safe_load((SCENARIOS / "quickstart.yaml").read_text()) | {"data": {"prompts": "data.jsonl"}}
    actor = whole["models"]["actor"] | ({"tokenizer": str(named)} if named else {})
    whole |= {"models": whole["models"] | {"actor": actor}}
    whole["workload"] = {key: value for key, value in whole["workload"].items() if key != "prompt_tokens"}
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(whole | said))
    return load(path)


def reward(function: str, **arguments: Any) -> dict[str, Any]:
    scores = {"pool": "all", "kind": "function", "function": function, "arguments": arguments}
    said = yaml.safe_load((SCENARIOS / "quickstart.yaml").read_text())["place"]
    return {"place": said | {"reward.score": scores}}


def test_responses_end_as_the_tokenizer_of_the_data_says(folder: Path, other: Path, tmp_path: Path) -> None:
    built_in = IDS[EOS]
    assert stop_tokens(built_in, asking(tmp_path, None)) == (built_in,)
    assert stop_tokens(built_in, asking(tmp_path, folder)) == (built_in,)
    assert stop_tokens(built_in, asking(tmp_path, other)) == (63,), "a network drawn from a seed knows nothing of it"


def test_a_checkpoint_has_the_tokenizer_that_read_the_data(other: Path, tmp_path: Path) -> None:
    chosen, made = asking(tmp_path, other), tmp_path / "checkpoint"
    made.mkdir()
    network = build_actor(chosen.spec("actor"), 0)
    _describer(network, *_reader(chosen, "actor"))(made)
    assert tokenizer(str(made)).response("ab") == tokenizer(str(other)).response("ab") == [62, 61, 63]
    assert json.loads((made / "config.json").read_text())["eos_token_id"] == 63
    assert network.config.eos_token_id == IDS[EOS], "the network itself is left alone"


@pytest.mark.parametrize("function", ["contains", "share", "ended"])
def test_rewards_that_know_characters_are_refused_for_other_tokens(
    folder: Path, other: Path, tmp_path: Path, function: str
) -> None:
    arguments = {} if function == "ended" else {"text": "a"}
    for named in (None, folder):
        refuse(asking(tmp_path, named, **reward(function, **arguments)))
    with pytest.raises(InputError, match="another tokenizer") as told:
        refuse(asking(tmp_path, other, **reward(function, **arguments)))
    assert told.value.key == "place.reward.score.function"
    refuse(asking(tmp_path, other, **reward("length")))
