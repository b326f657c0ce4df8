"""Built-in tasks: prompts of an exact length, and a reward that a program can check. No heavy import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from executor.tokenizer import BOS, IDS, encode
from lab.workload import uniform

Reward = Callable[[Sequence[int], Sequence[int]], float]
"""token ids of the prompt and of the response -> reward"""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Prompts and their reward."""

    prompt: Callable[[int, int, int, int], list[int]]
    """(seed, step, index of the prompt, n) -> n token ids"""
    reward: Reward


ECHO_CHARACTERS = "abcd"
_TASK_STREAM = 5  # apart from the streams of the lengths in lab/workload.py


def echo_prompt(seed: int, step: int, prompt: int, num_tokens: int, first: str = "echo:") -> list[int]:
    """`<bos>echo:cccc…`, or its end where it has to be shorter: the character c, drawn uniformly, always stands last."""
    draw = float(uniform(seed, _TASK_STREAM, step, np.asarray([prompt]), 0)[0])
    named = IDS[ECHO_CHARACTERS[int(draw * len(ECHO_CHARACTERS))]]
    head = [IDS[BOS], *encode(first)]
    return [*head, *[named] * (num_tokens - len(head))] if num_tokens > len(head) else [*head, named][-num_tokens:]


def echo_reward(prompt: Sequence[int], response: Sequence[int]) -> float:
    """Share of the response's tokens that are the named character: at most 1.

    The character is one of four with equal chance, so a policy that ignores the prompt expects at most 1/4.
    """
    return sum(token == prompt[-1] for token in response) / max(len(response), 1)


TASKS = {"echo": Task(prompt=echo_prompt, reward=echo_reward)}
