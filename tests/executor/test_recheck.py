"""Rechecking a step: what a run wrote is what comes out again, and whatever was changed is found."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from executor import records
from executor.algorithms.advantages import ADVANTAGES
from executor.experience import Samples
from executor.recheck import EXACT, Check, _advantages, compared, recheck
from executor.run import execute
from executor.tasks import echo_reward
from lab import runs
from lab.cli import main
from lab.errors import InputError
from lab.scenario import Scenario
from lab.timeline import Timeline, header_of

Make = Callable[..., Scenario]


def judged(chosen: Scenario, seed: int = 0) -> Samples:
    """A step of random responses with what scorers and the algorithm make of them; no reference."""
    rng, number = np.random.default_rng(seed), chosen.workload.samples_per_step
    lengths = rng.integers(1, 20, number)
    tokens = [rng.integers(4, 8, 6 + n) for n in lengths]
    rewards = [echo_reward(row[:6].tolist(), row[6:].tolist()) for row in tokens]
    bare = Samples(
        step=0, policy_version=0, prompts=np.arange(number) // chosen.workload.samples_per_prompt,
        num_prompt_tokens=np.full(number, 6), tokens=tokens,
        logprobs=[rng.normal(-1, 0.1, n).astype(np.float32) for n in lengths],
        columns={"rewards": np.asarray(rewards)}
        | {"values": [rng.normal(size=n).astype(np.float32) for n in lengths]},
    )  # fmt: skip
    batch: Samples = ADVANTAGES[chosen.algorithm.name](bare, chosen.algorithm)
    return batch


def written(root: Path, chosen: Scenario, samples: Samples, **row: float) -> Path:
    """The folder of a run of one step that trained on these samples."""
    folder = runs.begin(root, chosen, "measured")
    records.write(folder, chosen, samples)
    learning = [{"step": 0, "reward": float(samples.columns["rewards"].mean())} | row]
    header = msgspec.structs.replace(header_of(chosen, "measured"), status="done", learning=learning)
    runs.finish(folder, chosen, Timeline.of(header, []))
    return folder


def without_reference(scenario: Make, name: str) -> Scenario:
    return scenario(name, algorithm={"kl_coef": 0.0}, checkpoint={"every_steps": None})


@pytest.mark.parametrize("name", ["grpo-learns", "ppo-tiny"])
def test_what_the_algorithm_computed_comes_out_of_other_formulas(scenario: Make, tmp_path: Path, name: str) -> None:
    chosen = without_reference(scenario, name)
    found = recheck(written(tmp_path, chosen, judged(chosen)), 0, losses=False)
    assert found.matches
    expected = {"rewards", "advantages", "reward"} | ({"returns"} if name == "ppo-tiny" else set())
    assert {check.quantity for check in found.checks} == expected
    by_rule = next(check for check in found.checks if check.quantity == "rewards")
    assert (by_rule.difference, by_rule.allowed) == (0.0, EXACT)


def _one_reward(samples: Samples) -> Samples:
    rewards = samples.columns["rewards"].copy()
    rewards[5] += 1e-9
    return samples.with_columns(rewards=rewards)


def _one_advantage(samples: Samples) -> Samples:
    rows = [row.copy() for row in samples.columns["advantages"]]
    rows[3][-1] += 1e-3
    return samples.with_columns(advantages=rows)


def _one_token(samples: Samples) -> Samples:
    """A response whose last token is no longer, or is now, the character that was asked for."""
    tokens = [row.copy() for row in samples.tokens]
    tokens[0][-1] = tokens[0][5] if tokens[0][-1] != tokens[0][5] else 60
    return replace(samples, tokens=tokens)


@pytest.mark.parametrize(
    ("change", "quantity"), [(_one_reward, "rewards"), (_one_token, "rewards"), (_one_advantage, "advantages")]
)
def test_a_change_of_one_number_is_found(
    scenario: Make, tmp_path: Path, change: Callable[[Samples], Samples], quantity: str
) -> None:
    chosen = without_reference(scenario, "grpo-learns")
    found = recheck(written(tmp_path, chosen, change(judged(chosen))), 0, losses=False)
    assert not found.matches
    assert quantity in {check.quantity for check in found.checks if not check.matches}


def two_parts(prompt: list[int], response: list[int]) -> dict[str, float]:
    return {"first": response[0] / 64, "length": len(response) / 64}


def test_a_changed_part_of_a_reward_is_found(scenario: Make, tmp_path: Path) -> None:
    score = {"pool": "all", "kind": "function", "function": f"{__name__}:two_parts", "threads": 1}
    changes = {"place": {"reward.score": score}, "algorithm": {"kl_coef": 0.0}, "checkpoint": {"every_steps": None}}
    chosen = scenario("grpo-learns", **changes)
    bare = judged(chosen)
    parts = [two_parts([], row[6:].tolist()) for row in bare.tokens]
    columns = {f"reward_{name}": np.asarray([part[name] for part in parts]) for name in ("first", "length")}
    columns["rewards"] = columns["reward_first"] + columns["reward_length"]
    whole: Samples = ADVANTAGES["grpo"](bare.with_columns(**columns), chosen.algorithm)
    assert recheck(written(tmp_path / "a", chosen, whole), 0, losses=False).matches
    columns["reward_length"] = columns["reward_length"] + 0.25
    found = recheck(written(tmp_path / "b", chosen, whole.with_columns(**columns)), 0, losses=False)
    assert [check.quantity for check in found.checks if not check.matches] == ["reward_length"]


def test_a_pair_in_the_wrong_order_is_found() -> None:
    rewards, pairs = np.array([0.5, 0.25, 0.5, 0.75, 0.5, 0.5]), np.arange(6) // 2
    bare = Samples(
        step=0, policy_version=0, prompts=pairs, num_prompt_tokens=np.ones(6, dtype=np.int64),
        tokens=[np.array([1, 2])] * 6, logprobs=[np.zeros(1, np.float32)] * 6, columns={"rewards": rewards},
    )  # fmt: skip
    ordered = ADVANTAGES["dpo"](bare, None)
    any_scenario: Any = SimpleNamespace(algorithm=None)
    [right] = _advantages(any_scenario, ordered, {})
    [wrong] = _advantages(any_scenario, ordered.take([1, 0, 2, 3, 4, 5]), {})
    assert isinstance(right, Check) and right.matches
    assert isinstance(wrong, Check) and not wrong.matches


def test_a_reward_that_the_run_reported_wrongly_is_found(scenario: Make, tmp_path: Path) -> None:
    chosen = without_reference(scenario, "grpo-learns")
    found = recheck(written(tmp_path, chosen, judged(chosen), reward=0.5), 0, losses=False)
    assert [check.quantity for check in found.checks if not check.matches] == ["reward"]


def test_bad_input_is_named(scenario: Make, tmp_path: Path) -> None:
    chosen = without_reference(scenario, "grpo-learns")
    folder = written(tmp_path, chosen, judged(chosen))
    with pytest.raises(InputError, match="no such record"):
        recheck(folder, 7, losses=False)
    with pytest.raises(InputError, match="not a run"):
        recheck(tmp_path / "nowhere", 0, losses=False)
    records.write(folder, chosen, judged(chosen).take(range(10)))
    with pytest.raises(InputError, match="10 samples"):
        recheck(folder, 0, losses=False)


def command(*arguments: object) -> int:
    """The exit status of `lab recheck`."""
    with pytest.raises(SystemExit) as ended:
        main(["recheck", *map(str, arguments)])
    return int(ended.value.code or 0)


def test_the_command_says_what_it_found(scenario: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 where all is the same, 1 where a number differs, 2 where the record cannot be read."""
    chosen = without_reference(scenario, "grpo-learns")
    folder, target = written(tmp_path, chosen, judged(chosen)), tmp_path / "step.jsonl"
    assert command(folder, "--step", 0, "--no-losses", "--export", target) == 0
    assert "all 3 quantities match" in capsys.readouterr().out
    assert len(target.read_text().splitlines()) == chosen.workload.samples_per_step
    records.write(folder, chosen, _one_advantage(judged(chosen)))
    assert command(folder, "--step", 0, "--no-losses", "--json") == 1
    said = json.loads(capsys.readouterr().out)
    assert [check["quantity"] for check in said["checks"] if not check["matches"]] == ["advantages"]
    path = records.path_of(folder, 0)
    path.write_bytes(path.read_bytes()[:-100])
    assert command(folder, "--step", 0, "--no-losses") == 2
    assert str(path) in capsys.readouterr().err
    assert command(folder, "--step", 0, "--export", tmp_path / "step.csv") == 2


@pytest.mark.parametrize(
    ("recorded", "recomputed", "difference"),
    [(1.0, 1.0, 0.0), (0.5, 0.6, 0.1), (100.0, 101.0, 0.01), (1.0, float("nan"), np.inf), (np.inf, np.inf, 0.0)],
)
def test_differences_are_relative_above_one(recorded: float, recomputed: float, difference: float) -> None:
    assert compared("loss", "", recorded, recomputed, 0).difference == pytest.approx(difference)
    assert compared("loss", "", [recorded] * 3, [recomputed] * 2, 0).difference == np.inf


@pytest.mark.real
@pytest.mark.full
def test_a_real_step_is_done_again_bit_for_bit(local_ray: None, scenario: Make, tmp_path: Path) -> None:
    """From the checkpoint before it, and from the first weights; a changed advantage changes the loss."""
    chosen = scenario("ppo-tiny", num_steps=2, checkpoint={"every_steps": 1}, schedule={"mode": "synchronous"})
    folder = runs.begin(tmp_path, chosen, "measured")
    runs.finish(folder, chosen, execute(chosen, folder))
    for step in (1, 0):
        found = recheck(folder, step)
        repeated = {check.quantity: check for check in found.checks if "updates again" in check.how}
        assert {"loss", "kl", "value_loss", "grad_norm", "critic_grad_norm"} <= set(repeated)
        assert {check.difference for check in repeated.values()} == {0.0}
        assert ("step-000000" if step else "first weights") in repeated["loss"].how
        assert found.matches
        assert not found.skipped
    step_of = records.path_of(folder, 1)
    records.write(folder, chosen, _one_advantage(records.read(step_of)))
    changed: dict[str, Any] = {check.quantity: check for check in recheck(folder, 1).checks}
    assert not changed["advantages"].matches
    assert changed["loss"].difference > 0
