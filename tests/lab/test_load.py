"""Every mistake in a file gets one message with file, line, key and remedy; nothing else gets through."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.errors import InputError
from lab.load import dump, json_schema, load, parse
from lab.scenario import Scenario

SCENARIOS = sorted(Path("scenarios").glob("*.yaml"))
QUICK = Path("scenarios/quickstart.yaml").read_text()

MISTAKES = {
    "unknown key": ("prompts_per_step: 8", "prompt_per_step: 8", "workload.prompt_per_step", "prompts_per_step"),
    "unknown nested key": ("threads: 1}]", "threds: 1}]", "place.actor.generate[0].threds", "threads"),
    "key of another algorithm": ("clip: 0.2", "lam: 0.2", "algorithm.lam", "clip"),
    "wrong unit": ("64 MiB", "64 MX", "rollout.kv_bytes", "MiB"),
    "text for a number": ("num_steps: 24", 'num_steps: "24"', "num_steps", "whole number"),
    "fraction for a count": ("num_steps: 24", "num_steps: 24.5", "num_steps", "whole number"),
    "list for a mapping": ("data: {task: echo}", "data: [echo]", "data", "mapping"),
    "unknown algorithm": ("name: grpo", "name: grpoo", "algorithm.name", "grpo"),
    "unknown distribution": ("dist: fixed", "dist: fixd", "workload.prompt_tokens.dist", "fixed"),
    "out of range": ("lr: 1e-3", "lr: -1e-3", "optimizer.lr", "greater than 0"),
    "not a number": ("lr: 1e-3", "lr: .nan", "optimizer.lr", "finite"),
    "missing key": ("num_steps: 24", "", "num_steps", "add"),
    "unknown mode": ("mode: synchronous", "mode: sync", "schedule.mode", "one_step_off"),
    "unknown model": ("arch: tiny-llama", "arch: tiny-lama", "models.actor.arch", "tiny-llama"),
    "unknown pool": ("pool: all, engines", "pool: al, engines", "place.actor.generate[0].pool", "all"),
    "absent devices": ("local[0:2]", "local[0:999]", "pools.all", "outside"),
    "indivisible batch": ("minibatch_samples: 32", "minibatch_samples: 31", "update.minibatch_samples", "divisor"),
    "micro-batch too small": ("microbatch_tokens: 2048", "microbatch_tokens: 75", "update.microbatch_tokens", "76"),
    "impossible lengths": ("p95: 48", "p95: 480", "workload.response_tokens", "p95"),
    "duplicate key": ("num_steps: 24", "num_steps: 24\nseed: 3", "seed", "remove"),
    "group of one": ("samples_per_prompt: 4", "samples_per_prompt: 1", "workload.samples_per_prompt", "2"),
    "tag": ("seed: 7", "seed: !!python/object/apply:os.getpid []", "seed", "tag"),
    "syntax": ("{task: echo}", "{task: echo", None, "YAML"),
    "seed beyond 32 bits": ("seed: 7", "seed: 5000000000", "seed", "4294967295"),
    "far too many": ("prompts_per_step: 8", "prompts_per_step: 100000000000", "workload.prompts_per_step", "1000000"),
    "too many digits": ("seed: 7", "seed: 0x" + "f" * 5000, "seed", "digits"),
    "merge key": ("seed: 7", "<<: {seed: 7}", "<<", "no key"),
    "key that is a list": ("seed: 7", "? [1]\n: 7", None, "plain text"),
    "alias to itself": ("{task: echo}", "&a {task: *a}", None, "alias"),
    "mean above max": (
        "{dist: lognormal, mean: 28, p95: 48, max: 64}",
        "{dist: lognormal, mean: 28, p95: 48, max: 20}",
        "workload.response_tokens.mean",
        "above the longest, 20",
    ),
    "true as a number": ("zero_stage: 0", "zero_stage: true", "place.actor.train.zero_stage", "0, 1, 2 or 3"),
    "a count beyond any engine": ("max_num_seqs: 32", f"max_num_seqs: {10**30}", "rollout.max_num_seqs", "1000000"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_file_line_key_and_remedy(mistake: str) -> None:
    right, wrong, key, words = MISTAKES[mistake]
    assert QUICK.count(right) == 1
    with pytest.raises(InputError) as caught:
        parse(QUICK.replace(right, wrong), file="my.yaml")
    error = caught.value
    assert error.file == "my.yaml" and error.line and error.remedy
    assert error.key == key or key is None
    assert words in str(error)
    if mistake not in ("missing key", "impossible lengths", "duplicate key", "syntax"):
        place = QUICK[: QUICK.index(right)].count("\n") + 1
        assert abs(error.line - place) <= 1


@pytest.mark.parametrize(
    "content", [b"", b"# nothing\n", b"- 1\n", b"word", b"\xff\xfe\x00", b"name: \x00", b"name: a\xc3", b"\t- x"]
)
def test_a_file_that_is_no_scenario_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load(path)
    assert caught.value.file == str(path) and caught.value.remedy


@pytest.mark.parametrize("path", ["/nowhere/at/all.yaml", "/", "scenarios"])
def test_a_missing_file_is_named(path: str) -> None:
    with pytest.raises(InputError, match=path):
        load(path)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40), st.integers(0, len(QUICK)))
def test_no_text_leads_to_another_error(junk: str, at: int) -> None:
    try:
        assert isinstance(parse(QUICK[:at] + junk + QUICK[at:]), Scenario)
    except InputError as error:
        assert error.problem


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_dumped_scenario_reads_back_equal(path: Path) -> None:
    scenario = load(path)
    again = parse(dump(scenario))
    assert again == scenario and again.digest == scenario.digest


def test_numbers_in_scientific_notation_are_numbers() -> None:
    assert parse(QUICK.replace("lr: 1e-3", "lr: 2e-6")).optimizer.lr == 2e-6


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_schema_accepts_the_scenarios(path: Path) -> None:
    text = path.read_text().replace("1e-3", "0.001").replace("1e-6", "0.000001")  # YAML 1.1 of this reader
    jsonschema.Draft202012Validator(json_schema()).validate(yaml.safe_load(text))


def test_the_schema_on_disk_is_the_one_of_the_code() -> None:
    assert json.loads(Path("scenarios/scenario.schema.json").read_text()) == json_schema()


def test_the_schema_refuses_an_unknown_key() -> None:
    data = yaml.safe_load(QUICK.replace("1e-3", "0.001").replace("seed: 7", "sed: 7"))
    with pytest.raises(jsonschema.ValidationError, match="sed"):
        jsonschema.Draft202012Validator(json_schema()).validate(data)


@pytest.mark.parametrize(
    "text", ["2.13.0+cpu", "1.2.3", "1e3x", "trueish", "1.5 GB", "2026-11-30", "yes", "0x", "1_0.5x"]
)
def test_what_only_begins_like_a_number_is_text(text: str) -> None:
    with pytest.raises(InputError, match="whole number"):
        parse(QUICK.replace("num_steps: 24", f"num_steps: {text}"))


def test_deep_and_endless_files_are_refused_at_once() -> None:
    bomb = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    for one, two in zip("abcdefgh", "bcdefghi", strict=True):
        bomb += f"{two}: &{two} [{', '.join(['*' + one] * 10)}]\n"
    for text in (bomb, "[" * 3000, "a: " + "{b: " * 200 + "1" + "}" * 200):
        with pytest.raises(InputError):
            parse(text)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="regular file"):
        load(tmp_path / "pipe")


def test_errors_that_name_a_key_get_its_file_and_line() -> None:
    from lab.load import located

    with pytest.raises(InputError) as caught, located("scenarios/quickstart.yaml"):
        raise InputError(key="place.actor.train.offload", problem="no")
    assert caught.value.file == "scenarios/quickstart.yaml"
    assert "actor.train" in QUICK.splitlines()[(caught.value.line or 0) - 1]


@pytest.mark.parametrize("key", ["RAY_ADDRESS", "--resume"])
def test_variables_and_options_are_not_looked_for_in_the_file(key: str) -> None:
    from lab.load import located

    with pytest.raises(InputError) as caught, located("scenarios/quickstart.yaml"):
        raise InputError(key=key, problem="nothing answers")
    assert str(caught.value) == f"{key}: nothing answers"
