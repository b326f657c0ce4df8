"""A reward model that reads passes its report, and planted ones that take a short cut fail it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from executor.datasets import Dataset
from executor.experience import Samples
from executor.judgement import judge
from executor.network import Critic, build_critic
from executor.run import execute
from executor.scoring import pad
from executor.tasks import TASKS
from executor.tokenizer import IDS
from lab import runs
from lab.load import load
from lab.reward_report import report
from lab.scenario import Scenario
from tests.lab.test_data import TINY, written


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    work = {
        "prompts_per_step": 32, "samples_per_prompt": 2, "prompt_tokens": {"dist": "fixed", "value": 12},
        "response_tokens": {"dist": "lognormal", "mean": 12, "p95": 20, "max": 24},
    }  # fmt: skip
    update = {"minibatch_samples": 64, "microbatch_tokens": 4096}
    folder = tmp_path_factory.mktemp("scenario")
    return load(written(folder, "reward_model", "prompts", data={"task": "echo"}, workload=work, update=update))


def by_length(samples: Samples) -> list[float]:
    return [float(length) for length in samples.lengths]


def by_letters(samples: Samples) -> list[float]:
    """The share of a, b, c and d: what a good response looks like, whatever was asked."""
    letters = [IDS[character] for character in "abcd"]
    pairs = zip(samples.tokens, samples.num_prompt_tokens, strict=True)
    return [float(np.isin(tokens[known:], letters).mean()) for tokens, known in pairs]


def by_task(samples: Samples) -> list[float]:
    pairs = zip(samples.tokens, samples.num_prompt_tokens, strict=True)
    return [TASKS["echo"].reward(tokens[:known].tolist(), tokens[known:].tolist()) for tokens, known in pairs]


def test_a_model_planted_to_count_tokens_fails(scenario: Scenario) -> None:
    found = judge(scenario, by_length)
    kinds = found["groups"]["kind"]
    assert kinds["natural"]["accuracy"] > 0.6, "the short cut pays in training"
    assert kinds["length_matched"]["accuracy"] == 0.5
    assert kinds["adversarial"]["accuracy"] == 0.0
    assert found["verdict"] == "fails"


def test_a_model_planted_to_know_the_format_fails(scenario: Scenario) -> None:
    found = judge(scenario, by_letters)
    assert found["groups"]["kind"]["natural"]["accuracy"] > 0.6
    assert found["verdict"] == "fails"


def test_the_reward_of_the_task_passes(scenario: Scenario) -> None:
    found = judge(scenario, by_task)
    assert found["verdict"] == "passes"
    assert found["all"]["accuracy"] == 1.0
    assert {name: sum(one["pairs"] for one in groups.values()) for name, groups in found["groups"].items()} == {
        "kind": 600, "language": 600, "topic": 600, "safety": 600, "length": 600,
    }  # fmt: skip


class Counts(torch.nn.Module):
    """A reward model whose value of a token is the number of tokens up to it."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return attention_mask.cumsum(1).float()


def scores(network: torch.nn.Module, samples: Samples) -> torch.Tensor:
    """One score of each sample [N], at its last token."""
    ids, mask = (torch.from_numpy(part) for part in pad(samples.tokens))
    found: torch.Tensor = network(ids, mask).gather(1, mask.sum(1, keepdim=True) - 1).squeeze(1)
    return found


def trained(scenario: Scenario, steps: int) -> Critic:
    network = build_critic(scenario.spec("reward"), 0, head_std=1.0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(steps):
        optimizer.zero_grad()
        found = scores(network, Dataset(scenario).batch(step))
        (-torch.nn.functional.logsigmoid(found[::2] - found[1::2]).mean()).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    return network


def test_a_network_that_learns_from_the_pairs_passes_and_one_planted_to_count_fails(scenario: Scenario) -> None:
    torch.set_num_threads(1)
    networks = (trained(scenario, 25), Counts())
    with torch.inference_mode():
        reads, counts = (judge(scenario, lambda pairs, n=n: scores(n, pairs).tolist()) for n in networks)
    assert reads["verdict"] == "passes", reads["reasons"]
    assert reads["all"]["accuracy"] >= 0.9
    assert counts["verdict"] == "fails"
    assert counts["prefers_longer"]["accuracy"] == 1.0


def test_of_a_file_the_held_out_pairs_are_judged(tmp_path: Path) -> None:
    scenario = load(
        written(tmp_path, "reward_model", "preferences", data={"preferences": "data.jsonl", "held_out_share": 0.5})
    )
    found = judge(scenario, lambda samples: np.arange(len(samples), 0, -1, dtype=float).tolist())
    assert found["all"] == report(np.ones(2), np.zeros(2), np.full((2, 2), 3), {})["all"]
    assert found["verdict"] == "undecided"


@pytest.mark.real
@pytest.mark.full
def test_a_run_on_a_file_writes_its_report(tmp_path: Path, local_ray: None) -> None:
    """On real workers: the pairs of a file, broken lines left out; the page and the summary tell the verdict."""
    rows = [{"prompt": "p" * (i % 7 + 1), "chosen": "c" * (i % 5 + 2), "rejected": "r" * 4} for i in range(60)]
    path = written(
        tmp_path, "reward_model", "preferences", data={"preferences": "data.jsonl", "on_broken": "skip"},
        models={"reward": TINY}, place={"reward.train": {"pool": "all"}},
    )  # fmt: skip
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "{\n")
    scenario = load(path)
    folder = runs.begin(tmp_path, scenario, "measured")
    timeline = execute(scenario, folder)
    assert (timeline.header.status, timeline.header.error) == ("done", "")
    summary = runs.finish(folder, scenario, timeline)
    assert summary["data"] == scenario.data.about()
    assert summary["data"]["skipped"] == 1
    found = summary["reward_report"]
    assert found["all"]["pairs"] == 6
    assert (found["data"], found["step"]) == (scenario.data.sha256, scenario.num_steps)
    assert f"Reward model: {found['verdict']}" in (folder / "report.html").read_text()
