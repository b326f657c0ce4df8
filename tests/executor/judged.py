"""Samples and scoring workers for tests, as plain objects."""

from collections.abc import Callable
from typing import Any

import numpy as np

from executor.experience import Samples
from executor.scoring import ReferenceWorker, RewardWorker, Scorer
from executor.tasks import TASKS
from lab.scenario import Scenario

Make = Callable[..., Scenario]
MODEL = {"models": {"reward": {"arch": "tiny-llama", "dtype": "float32"}}}
CLOSE = {"abs": 1e-4}


def samples(number: int = 9, *, step: int = 0, per_prompt: int = 1, seed: int = 0) -> Samples:
    """Prompts of the built-in task with random responses of 1 to 29 tokens, each drawn at a temperature of its own."""
    rng = np.random.default_rng(seed)
    responses = rng.integers(1, 30, number)
    prompts = np.repeat(np.arange(-(-number // per_prompt)), per_prompt)[:number]
    texts = [TASKS["echo"].prompt(0, step, int(i), 12) for i in prompts]
    return Samples(
        step=step, policy_version=0, prompts=prompts, num_prompt_tokens=np.full(number, 12),
        tokens=[np.asarray([*text, *rng.integers(4, 64, n)]) for text, n in zip(texts, responses, strict=True)],
        logprobs=[np.zeros(n, dtype=np.float32) for n in responses],
        temperatures=np.linspace(0.5, 1.5, number).astype(np.float32),
    )  # fmt: skip


def scorers(scenario: Scenario, role: str) -> list[Any]:
    """All workers of a role that scores, ready."""
    kind: type[Scorer] = RewardWorker if role == "reward" else ReferenceWorker
    found = [kind(worker, scenario) for worker in scenario.team(role, "score")]
    for worker in found:
        worker.ready()
    return found


def judged_by(make: Make, reward: dict[str, Any], **changes: Any) -> Scenario:
    """The quickstart with this reward."""
    placed = {"reward.score": {"pool": "all", "threads": 1} | reward}
    return make("quickstart", place=placed | changes.pop("place", {}), **changes)
