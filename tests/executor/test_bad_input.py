"""What users get wrong, kind by kind: one message that names the place and a remedy, before anything starts."""

import asyncio
import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
import yaml
from pydantic import ValidationError
from ray.exceptions import ActorDiedError

from executor import run
from executor.checkpoint import Damaged, read_json
from executor.datasets import samples_of
from executor.limits import refuse
from executor.model_folder import problems
from executor.network import build_actor
from executor.resume import resume
from executor.rewards import ByFunction, RewardFailed, reward_function
from executor.stopping import Stopping
from executor.tokenizer import save_tokenizer
from lab import runs
from lab.cli import told as told_by_command
from lab.cli.execute import beside, looked, written
from lab.errors import InputError
from lab.library import model as library_model
from lab.load import load
from lab.scenario import Scenario
from lab.services import RemoteService
from lab.tokenizing import tokenizer

Make = Callable[..., Scenario]
TINY = library_model("tiny-llama")
SCENARIOS = Path(__file__).parents[2] / "scenarios"
FILE = "model.safetensors"
Header = dict[str, Any]
BIG = {"actor": {"arch": "llama-2-70b", "dtype": "float32"}, "reference": {"like": "actor", "dtype": "float32"}}


def rewritten(folder: Path, change: Callable[[Header], Header], more: bytes = b"") -> None:
    """Writes a weights file with another header over the same numbers."""
    held = (folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", held[:8])
    header = json.dumps(change(json.loads(held[8 : 8 + length]))).encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(header)) + header + held[8 + length :] + more)


QUERY, KEY, GATE = (
    f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj")
)
HEADERS: dict[str, tuple[Callable[[Header], Header], str]] = {
    "renamed": (lambda h: {("model.x.weight" if name == GATE else name): h[name] for name in h}, "no part"),
    "turned": (lambda h: h | {GATE: h[GATE] | {"shape": h[GATE]["shape"][::-1]}}, "the architecture has"),
    "overlapping": (lambda h: h | {QUERY: h[QUERY] | {"data_offsets": [0, 65536]}}, "what is before it"),
    "left out": (lambda h: {name: about for name, about in h.items() if name != KEY}, "what is before it"),
    "whole numbers": (lambda h: h | {QUERY: h[QUERY] | {"dtype": "I32"}}, "type I32"),
    "unknown type": (lambda h: h | {QUERY: h[QUERY] | {"dtype": "F99"}}, "type F99"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_weights_that_no_library_could_load_as_meant_are_told(folder: Path, kind: str) -> None:
    change, named = HEADERS[kind]
    rewritten(folder, change)
    assert named in "; ".join(problem for problem, _ in problems(folder, TINY))


def test_bytes_after_the_last_tensor_are_told(folder: Path) -> None:
    rewritten(folder, lambda header: header, b"more")
    assert "the tensors end at byte" in next(problems(folder, TINY))[0]


def test_an_index_that_names_no_text_is_told(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}')
    assert "the index names it" in next(problems(folder, TINY))[0]


@pytest.mark.parametrize(
    "said",
    [
        {"rope_theta": "large"}, {"rms_norm_eps": -1}, {"max_position_embeddings": [8]},
        {"architectures": ["Qwen2ForCausalLM"]},
    ],
)  # fmt: skip
def test_numbers_of_a_config_that_its_shape_does_not_say_are_checked(folder: Path, said: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text()) | said
    (folder / "config.json").write_text(json.dumps(config))
    assert next(iter(said)) in next(problems(folder, TINY))[0]


@pytest.mark.parametrize("ending", [5, ["</s>"], {"content": 5}, True])
def test_an_end_of_sequence_that_is_no_text_is_told(tmp_path: Path, ending: Any) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": ending}))
    with pytest.raises(InputError) as told:
        tokenizer(str(tmp_path))
    assert told.value.key == "eos_token" and told.value.remedy


def asking(folder: Path, *lines: str, **data: Any) -> Path:
    """A scenario beside a file of prompts."""
    (folder / "data.jsonl").write_text("".join(line + "\n" for line in lines))
    said = yaml.safe_load((SCENARIOS / "quickstart.yaml").read_text()) | {"data": {"prompts": "data.jsonl"} | data}
    del said["workload"]["prompt_tokens"]
    said["place"]["reward.score"] |= {"function": "length"}
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(said))
    return path


def test_a_tokenizer_that_cannot_read_a_line_breaks_the_line(tmp_path: Path) -> None:
    named = tmp_path / "tokenizer"
    named.mkdir()
    save_tokenizer(named)
    said = json.loads((named / "tokenizer.json").read_text())
    said["model"]["vocab"] = {"a": 0}
    (named / "tokenizer.json").write_text(json.dumps(said))
    path = asking(tmp_path, '{"prompt": "aaa"}', '{"prompt": "abc"}')
    whole = yaml.safe_load(path.read_text())
    whole["models"]["actor"]["tokenizer"] = "tokenizer"
    path.write_text(yaml.safe_dump(whole))
    with pytest.raises(InputError, match=r"data\.jsonl:2: .*the tokenizer cannot read it"):
        load(path)


@pytest.mark.parametrize("named", ["/nowhere", ""])
def test_a_tokenizer_that_no_data_need_is_there_all_the_same(scenario: Make, tmp_path: Path, named: str) -> None:
    actor = {"arch": "tiny-llama", "dtype": "float32", "tokenizer": named or str(tmp_path)}
    with pytest.raises(InputError) as told:
        refuse(scenario("quickstart", models={"actor": actor}))
    assert told.value.key == "models.actor.tokenizer" and told.value.remedy


def test_a_file_of_broken_lines_names_the_first(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="all 2 lines are broken, line 1: not valid JSON"):
        load(asking(tmp_path, "{", "}", on_broken="skip"))


def test_a_remedy_for_lines_too_long_for_a_pass_is_to_leave_them_out(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "a" * number}) for number in (4, 5, 6, 3000)]
    with pytest.raises(InputError) as told:
        load(asking(tmp_path, *lines))
    assert told.value.key == "update.microbatch_tokens" and "data.max_tokens" in str(told.value.remedy)
    load(asking(tmp_path, *lines, on_broken="skip", max_tokens=100))


def test_an_evaluation_without_rows_is_no_evaluation_of_none(tmp_path: Path) -> None:
    path = asking(tmp_path, '{"prompt": "a"}')
    path.write_text(path.read_text() + "\nevaluate: {every_steps: 1, prompts: 2}\n")
    with pytest.raises(InputError) as told:
        refuse(load(path))
    assert told.value.key == "evaluate.prompts" and "set it to 0" not in str(told.value.remedy)


def test_a_mini_batch_that_tears_pairs_apart_names_its_own_key(scenario: Make) -> None:
    with pytest.raises(ValidationError) as told:
        scenario("dpo-learns", update={"minibatch_samples": 3}, workload={"prompts_per_step": 3})
    assert told.value.errors()[0]["ctx"]["error"].key == "update.minibatch_samples"


@pytest.mark.parametrize("url", ["http://a b/", "http://a/ b", "http://a/\n", "http://ä/", "ftp://a/"])
def test_addresses_that_no_request_can_be_sent_to(url: str) -> None:
    with pytest.raises(ValueError, match="no address"):
        RemoteService(url=url, latency=1.0)


def test_what_does_not_fit_this_machine_at_all_is_refused(scenario: Make) -> None:
    with pytest.raises(InputError) as told:
        refuse(scenario("quickstart", rollout={"kv_bytes": 1e15}))
    assert told.value.key == "rollout.kv_bytes"
    with pytest.raises(InputError) as told:
        refuse(scenario("quickstart", models=BIG, rollout={"kv_bytes": 1e9}))
    assert told.value.key == "models" and told.value.remedy


def test_a_reward_beside_the_scenario_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    (tmp_path / "judge_beside_it.py").write_text("def judge(prompt, response): return 1.0\n")
    beside(tmp_path / "scenario.yaml")
    assert reward_function("judge_beside_it:judge", None)([1], [2]) == 1.0


def test_a_reward_in_the_working_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge_right_here.py").write_text("def judge(prompt, response): return 1.0\n")
    assert reward_function("judge_right_here:judge", None)([1], [2]) == 1.0


def test_a_module_that_ends_the_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "judge_that_exits.py").write_text("import sys\nsys.exit(5)\n")
    with pytest.raises(ValueError, match="SystemExit"):
        reward_function("judge_that_exits:judge", None)


@pytest.mark.parametrize(
    ("name", "arguments"), [("length", {"target": "x"}), ("contains", {"text": 5}), ("length", {"target": np.nan})]
)
def test_arguments_that_a_reward_of_the_library_cannot_work_with(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=name):
        reward_function(name, None, arguments)


def _ends(prompt: list[int], response: list[int]) -> float:
    raise SystemExit(3)


@pytest.mark.parametrize("reward", [lambda p, r: 10**400, lambda p, r: {"a": 1e308, "b": 1e308}, _ends])
def test_rewards_beyond_a_float_and_functions_that_end_the_process(reward: Callable[..., Any]) -> None:
    with pytest.raises(RewardFailed, match=r"mine .* for sample 0 of prompt 0 of step 4"):
        ByFunction("mine", reward).score(samples_of(4, [(0, [1, 2], [3])]), {})


def test_a_disk_without_room_leaves_no_run_behind(
    scenario: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(runs, "write_atomically", full)
    with pytest.raises(InputError, match="No space left") as told:
        runs.begin(tmp_path, scenario("quickstart"), "measured")
    assert told.value.remedy and not list(tmp_path.iterdir())


SPOILT: dict[str, tuple[str, bytes]] = {
    "spans": ("spans.jsonl", b"nonsense\n"),
    "span without fields": ("spans.jsonl", b"{}\n"),
    "bytes": ("spans.jsonl", b"\xff\n"),
    "rows": ("learning.jsonl", b"nonsense\n"),
    "row without a step": ("learning.jsonl", b"{}\n"),
    "list for a row": ("learning.jsonl", b"[]\n"),
    "list for a run": ("run.json", b"[]"),
    "file for checkpoints": ("checkpoints", b""),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_run_folder_that_was_spoilt_is_not_gone_on_with(scenario: Make, tmp_path: Path, kind: str) -> None:
    chosen = scenario("quickstart")
    folder = runs.begin(tmp_path, chosen, "measured")
    name, content = SPOILT[kind]
    (folder / name).write_bytes(content)
    with pytest.raises(InputError) as told:
        resume(chosen, folder)
    assert told.value.key == "--resume" and told.value.remedy
    assert (folder / name).read_bytes() == content, "nothing is lost"


def test_a_run_folder_that_cannot_be_written_is_told(scenario: Make, tmp_path: Path) -> None:
    folder = runs.begin(tmp_path, scenario("quickstart"), "measured")
    (folder / "lock").mkdir()
    with pytest.raises(InputError) as told, runs.locked(folder):
        pass
    assert told.value.remedy


@pytest.mark.parametrize("content", [b"[]", b"5", b"null", b'"text"'])
def test_a_manifest_that_is_no_object_is_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(Damaged, match="no JSON object"):
        read_json(tmp_path / "manifest.json")


class Nodes:
    """A flow of two stages: the first ends, a checkpoint follows it; the second fails while that is written."""

    def __init__(self) -> None:
        about = SimpleNamespace(runs=lambda step: step < 2, workers=())
        self.nodes = {"first": about, "checkpoint": about, "second": about}

    def steps(self, stage: str) -> list[int]:
        return [0, 1]

    def requirements(self, stage: str, step: int) -> list[tuple[str, int]]:
        if stage == "first":
            return [("second", step - 1)] if step else []
        return [("first" if stage == "checkpoint" else "checkpoint", step)]


class Failing:
    """Its stages: the second fails in step 1."""

    production = None

    async def run(self, stage: str, step: int) -> list[Any]:
        if (stage, step) == ("second", 1):
            raise ZeroDivisionError("in step 1")
        return []

    async def settle(self) -> None: ...


class Slow:
    """A store whose checkpoints take a moment, once their step has ended."""

    def __init__(self) -> None:
        self.whole: list[int] = []

    def published(self, step: int) -> None: ...

    async def complete(self, step: int, ended: Any) -> None:
        await ended
        await asyncio.sleep(0.05)
        self.whole.append(step)


def test_a_run_that_fails_completes_the_checkpoints_of_steps_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "finishes", lambda dataflow: "second")
    ledger = SimpleNamespace(
        earlier=SimpleNamespace(first_step=0, kept=()), num_finished=0, issue=lambda stage: None,
        add=lambda stage, step, infos: None,
    )  # fmt: skip
    store: Any = Slow()
    play: Any = run._play
    stopping = Stopping(Nodes())  # type: ignore[arg-type]
    with pytest.raises(ExceptionGroup) as told:
        asyncio.run(play(Nodes(), Failing(), ledger, store, lambda stage, done: None, stopping))
    assert isinstance(told.value.exceptions[0], ZeroDivisionError)
    assert store.whole == [0], "step 1 has not ended"


def test_a_worker_that_died_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    told: Any = run._message
    died = ActorDiedError()
    died.actor_id = "ab12"
    assert told(ExceptionGroup("", [died]), {"ab12": "reward.score[0]"}).startswith(
        "the process of reward.score[0] died"
    )
    begun = ActorDiedError()
    begun._actor_init_failed = True
    begun.error_msg = "raised in its creation task\n  File x\nRuntimeError: no port"
    assert told(begun, {}) == "RuntimeError: no port"
    assert told(KeyError("x"), {}) == "KeyError: 'x'"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EFBIG])
def test_what_a_disk_refuses_ends_a_command_with_one_message(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    def written() -> None:
        raise OSError(number, os.strerror(number), "/there")

    assert told_by_command(written) == 1
    assert capsys.readouterr().err.startswith(f"error: /there: {os.strerror(number)}")
    with pytest.raises(ConnectionRefusedError):
        told_by_command(lambda: (_ for _ in ()).throw(ConnectionRefusedError(errno.ECONNREFUSED, "no disk's")))


def test_a_disk_that_refuses_the_end_of_a_run_does_not_hide_what_ended_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as told, written(tmp_path, "RewardFailed: mine gave nan"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    said = " ".join(capsys.readouterr().err.split())
    assert told.value.exit_code == 1 and "mine gave nan; No space left on device" in said


@pytest.mark.parametrize("said", [{"hidden_act": "no_such"}, {"rope_scaling": {"rope_type": "no_such", "factor": 2.0}}])
def test_a_network_that_cannot_be_built_names_its_folder(folder: Path, said: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text()) | said
    config |= {"rope_parameters": said["rope_scaling"]} if "rope_scaling" in said else {}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"the network in {folder} cannot be built"):
        build_actor(TINY, 0, str(folder))


def test_weights_under_other_names_are_not_replaced_by_random_ones(folder: Path) -> None:
    rewritten(folder, HEADERS["renamed"][0])
    with pytest.raises(ValueError, match="drawn at random"):
        build_actor(TINY, 0, str(folder))


def test_engines_that_looked_for_no_weights_before_the_run_had_ended(scenario: Make) -> None:
    """The run is there, and the command tells of a wrong value: status 2."""
    change = {"weight_sync": {"trigger": "pull", "every": 60.0}, "schedule": {"staleness": {"bound": 9}}}
    chosen = scenario("async-tiny", **change)
    looked(chosen, {"makespan_s": 61.0, "run_dir": "runs/one"})
    with pytest.raises(InputError, match=r"every 60 s, and the run ends at 5 s; it is kept in runs/one") as wrong:
        looked(chosen, {"makespan_s": 5.0, "run_dir": "runs/one"})
    assert (wrong.value.key, wrong.value.remedy) == ("weight_sync.every", "set it lower, or make more steps")
