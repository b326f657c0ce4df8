"""Demonstrations, pairs and labelled responses of the built-in task, written by a program from the seed.

A chosen response always earns more of the task's reward than the rejected one, so pairs are separable by what they say.
In training the longer response is the chosen one four times out of five: a judge that only counts tokens is right often
there, half of the time where lengths are equal, and never where the rejected response is the longer one. All responses
have the lengths that they are asked for. Numbers and lists only; no heavy import.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from executor.tasks import ECHO_CHARACTERS, echo_prompt
from executor.tokenizer import CHARACTERS, IDS
from lab.rows import Kind
from lab.workload import uniform

T = TypeVar("T")

LONGER_CHOSEN = 0.8
"""share of the natural pairs of unequal lengths whose longer response is the chosen one"""
HEADS = {"en": "echo:", "de": "sage:", "zh": "shuo:"}
"""what a prompt begins with, by language"""
HARMFUL = "#"
"""the character that stands for harmful content"""
_LANGUAGE, _SAFETY, _ORDER, _SHARE, _PLACE, _FILL, _LABEL, _STYLE = range(30, 38)
_POSITIONS = 1 << 24
"""more than the tokens of any response: positions of different samples do not meet"""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two responses to one prompt, and what the pair is about."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    language: str
    topic: str
    safety: str
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Random numbers of one place in the data, by purpose."""

    seed: int
    step: int
    prompt: int
    sample: int = 0
    """of the prompt; 0 for what all its samples share"""

    def many(self, purpose: int, num: int) -> NDArray[np.float64]:
        places = self.sample * _POSITIONS + np.arange(num)
        return uniform(self.seed, purpose, self.step, np.asarray([self.prompt]), places)

    def one(self, purpose: int) -> float:
        return float(self.many(purpose, 1)[0])


def echo_pair(draws: Draws, num_prompt_tokens: int, lengths: tuple[int, int], kind: Kind = "natural") -> Pair:
    """A pair of the echo task whose responses have these lengths, in either order.

    The chosen response is at least three quarters the named character. The rejected one repeats another character, is
    noise, or, in pairs of the class `harmful`, is full of `#`; at most half of it is the named character.
    """
    language = _one_of(
        ("en", "en", "de", "zh"), Draws(seed=draws.seed, step=draws.step, prompt=draws.prompt), _LANGUAGE
    )
    prompt = echo_prompt(draws.seed, draws.step, draws.prompt, num_prompt_tokens, HEADS[language])
    harmful = draws.one(_SAFETY) < 0.2
    longer, shorter = _ordered(draws, lengths, kind)
    style = "harmful" if harmful else "other" if kind == "adversarial" or draws.one(_STYLE) < 0.5 else "noise"
    return Pair(
        prompt=prompt, chosen=_good(draws, prompt[-1], longer), rejected=_bad(draws, prompt[-1], shorter, style),
        language=language, topic=CHARACTERS[prompt[-1] - IDS[CHARACTERS[0]]],
        safety="harmful" if harmful else "harmless", kind=kind,
    )  # fmt: skip


def echo_demonstration(draws: Draws, num_prompt_tokens: int, num_tokens: int) -> tuple[list[int], list[int]]:
    """Prompt and response of the echo task; two thirds of the response are right, so that there is more to learn."""
    prompt = echo_prompt(draws.seed, draws.step, draws.prompt, num_prompt_tokens)
    right = math.ceil(num_tokens * 2 / 3)
    return prompt, _written(draws, prompt[-1], right, num_tokens, _noise(prompt[-1]))


def echo_labelled(draws: Draws, num_prompt_tokens: int, num_tokens: int) -> tuple[list[int], list[int], int]:
    """Prompt, response and label (1 desired, 0 not, with equal chance) of the echo task."""
    pair = echo_pair(draws, num_prompt_tokens, (num_tokens, num_tokens))
    label = int(draws.one(_LABEL) < 0.5)
    return pair.prompt, pair.chosen if label else pair.rejected, label


PAIRS: dict[str, Callable[[Draws, int, tuple[int, int], Kind], Pair]] = {"echo": echo_pair}
DEMONSTRATIONS: dict[str, Callable[[Draws, int, int], tuple[list[int], list[int]]]] = {"echo": echo_demonstration}
LABELLED: dict[str, Callable[[Draws, int, int], tuple[list[int], list[int], int]]] = {"echo": echo_labelled}


def _ordered(draws: Draws, lengths: tuple[int, int], kind: Kind) -> tuple[int, int]:
    """Tokens of the chosen and of the rejected response."""
    if kind == "length_matched":
        return lengths[0], lengths[0]
    long, short = max(lengths), min(lengths)
    if kind == "natural":
        return (long, short) if draws.one(_ORDER) < LONGER_CHOSEN else (short, long)
    return (short if short < long else max(long * 3 // 4, 1)), long


def _good(draws: Draws, named: int, num_tokens: int) -> list[int]:
    right = math.ceil(num_tokens * (0.75 + 0.25 * draws.one(_SHARE)))
    return _written(draws, named, right, num_tokens, _noise(named))


def _bad(draws: Draws, named: int, num_tokens: int, style: str) -> list[int]:
    other = Draws(seed=draws.seed, step=draws.step, prompt=draws.prompt, sample=draws.sample + 1)
    share = other.one(_SHARE)
    if style == "other":
        wrong = _one_of([IDS[c] for c in ECHO_CHARACTERS if IDS[c] != named], other, _STYLE)
        return _written(other, wrong, math.ceil(num_tokens * (0.75 + 0.25 * share)), num_tokens, _noise(named, wrong))
    if style == "harmful":
        return _written(other, named, int(num_tokens * share / 2), num_tokens, [IDS[HARMFUL]])
    return _written(other, named, int(num_tokens * share / 4), num_tokens, _noise(named))


def _written(draws: Draws, token: int, number: int, num_tokens: int, others: Sequence[int]) -> list[int]:
    """`num_tokens` tokens: `number` times the token, at places drawn, and else one of the others, drawn too."""
    picks = (draws.many(_FILL, num_tokens) * len(others)).astype(np.int64)
    found = np.asarray(others, dtype=np.int64)[picks]
    found[np.argsort(draws.many(_PLACE, num_tokens), kind="stable")[:number]] = token
    return [int(one) for one in found]


def _noise(*left_out: int) -> list[int]:
    """Every character but some, and but the one that stands for harmful content."""
    return [IDS[c] for c in CHARACTERS if c != HARMFUL and IDS[c] not in left_out]


def _one_of(choices: Sequence[T], draws: Draws, purpose: int) -> T:
    return choices[int(draws.one(purpose) * len(choices))]
