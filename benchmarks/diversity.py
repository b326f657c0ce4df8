"""Beam search against sampling: how different the answers to a prompt are, how sure the policy is of them, what they earn.

A policy that has seen a few demonstrations of the built-in task answers the same prompts in several ways, on the engine
that needs no vLLM. distinct-n: different n-grams among the answers to one prompt (Li et al. 2016); entropy: mean -log p
of the tokens, in nats, under what they were drawn from; reward: mean and best of the answers to a prompt.
`OMP_NUM_THREADS=1 python benchmarks/diversity.py` takes about half a minute.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor.datasets import Dataset
from executor.diversity import joined
from executor.network import build_actor
from executor.origin import origin
from executor.rewards import reward_function
from executor.rollout import RolloutWorker
from lab.load import load
from lab.scenario import Scenario

SCENARIO = Path(__file__).resolve().parents[1] / "scenarios" / "grpo-learns.yaml"
DEMONSTRATIONS, ANSWERS = 24, 8
"""steps of 64 samples each, and answers that are kept of each prompt"""
WAYS: dict[str, dict[str, Any]] = {
    "greedy (1 beam)": {"temperature": 0.01},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.0": {},
    "temperature 1.3": {"temperature": 1.3},
    "0.7 and 1.3, half each": {"mixture": [{"temperature": 0.7, "share": 0.5}, {"temperature": 1.3, "share": 0.5}]},
    "top_p 0.9": {"top_p": 0.9},
    "repetition penalty 1.2": {"repetition_penalty": 1.2},
    "8 beams": {"beams": 8},
    "16 beams": {"beams": 16},
}


def main() -> None:
    original = load(SCENARIO)
    data = original.model_dump(mode="json", by_alias=True)
    place = data["place"] | {"actor.generate": [{"pool": "all", "backend": "transformers"}]}
    chosen = original.replace({"place": place, "workload": data["workload"] | {"samples_per_prompt": ANSWERS}})
    policy = taught(chosen)
    print(f"{'':24}distinct-1 distinct-2  entropy   reward     best  seconds")
    for name, sampling in WAYS.items():
        print(f"{name:24}" + " ".join(f"{value:>9.3f}" for value in answered(chosen, policy, sampling)))


def taught(chosen: Scenario) -> dict[str, torch.Tensor]:
    """The weights of a policy after a few steps of supervised learning, far from perfect."""
    algorithm = {"algorithm": {"name": "sft"}}
    dataset, network = Dataset(chosen.replace(algorithm)), build_actor(*origin(chosen, "actor"))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for step in range(DEMONSTRATIONS):
        samples = dataset.batch(step)
        ids = torch.tensor(np.stack(samples.tokens))  # all are equally long
        known = int(samples.num_prompt_tokens[0])
        logits = network(input_ids=ids).logits[:, known - 1 : -1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, known:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in network.named_parameters()}


def answered(chosen: Scenario, policy: dict[str, torch.Tensor], sampling: dict[str, Any]) -> list[float]:
    """distinct-1, distinct-2, entropy, mean reward, best reward of a prompt's answers, seconds."""
    asked = chosen.replace({"sampling": chosen.sampling.model_dump(mode="json") | sampling})
    worker = RolloutWorker(asked.team("actor", "generate")[0], 0, asked)
    worker.load(policy)
    parts, rewards, start = [], [], time.monotonic()
    judge: Any = reward_function("task", asked.data.task)
    for step in range(4):
        samples, info = worker.generate(step, 0, range(asked.workload.prompts_per_step))
        parts.append(info["diversity"])
        pairs = zip(samples.tokens, samples.num_prompt_tokens, strict=True)
        rewards.append([judge(tokens[:known].tolist(), tokens[known:].tolist()) for tokens, known in pairs])
    seconds, found = time.monotonic() - start, joined(parts)
    table = np.asarray(rewards).reshape(-1, ANSWERS)
    return [*found.values(), float(table.mean()), float(table.max(axis=1).mean()), seconds]


if __name__ == "__main__":
    main()
