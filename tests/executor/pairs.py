"""A real engine, and a network of this process that plays the trainer's part of the weight sync."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch

from executor.experience import Samples
from executor.transfer import WeightSender
from lab.scenario import Scenario
from lab.timeline import Span

EVERY = tuple(range(8))


@dataclass
class Pair:
    """An engine and the network that it should hold."""

    scenario: Scenario
    engine: Any
    network: Any
    sender: WeightSender
    version: int = 0

    def generate(self, step: int, prompts: tuple[int, ...] = EVERY) -> tuple[Samples, list[Span]]:
        samples, info = ray.get(self.engine.generate.remote(step, self.version, prompts))
        return samples, info["spans"]

    def change(self) -> None:
        """A training step's worth of change, much larger than one."""
        with torch.no_grad():
            for parameter in self.network.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)

    def sync(self, **how: bool) -> list[Span]:
        received = self.engine.receive_weights.remote(self.version, **how)
        self.sender.send(self.network.named_parameters())
        self.version += 1
        return ray.get(received)["spans"]

    def gap(self, samples: Samples) -> float:
        """max |log-prob of the engine - log-prob of the network| over all response tokens."""
        worst = 0.0
        for tokens, prompt, theirs in zip(samples.tokens, samples.num_prompt_tokens, samples.logprobs, strict=True):
            ids = torch.tensor(tokens)
            with torch.no_grad():
                logits = self.network(input_ids=ids[None]).logits[0, prompt - 1 : -1]
            ours = torch.log_softmax(logits / self.scenario.sampling.temperature, -1)
            chosen = ours.gather(-1, ids[prompt:, None]).squeeze(-1).numpy()
            worst = max(worst, float(np.abs(chosen - theirs).max()))
        return worst
