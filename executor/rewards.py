"""Rewards by functions: a small library, or a user's own, called sample by sample or with all of a batch.

A function gets the token ids of prompt and response and returns a number, or a dict of numbers whose sum is the reward.
One with the attribute `batched` set to true gets the lists of all prompts and all responses, and returns one such value
for each. No heavy import.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from executor.experience import Samples
from executor.tasks import TASKS
from executor.tokenizer import EOS, IDS, encode

Ids = Sequence[int]
Columns = dict[str, Any]
Reward = Callable[..., Any]
"""(prompt, response, arguments by name) -> a number or a dict of numbers; lists of all three where it is `batched`"""
Parts = dict[str, float]
"""components of one reward by name; a reward that has none is one part without a name"""

WHOLE = ""
_SHOWN_IDS = 24
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120
_REPR.maxlist = _REPR.maxdict = 8
_short = _REPR.repr


class RewardFailed(Exception):
    """What scores gave no reward that can be used; the message names it, the sample and what it gave."""


def length(prompt: Ids, response: Ids, *, target: int = 16) -> float:
    """1 - |n - target| / max(n, target) of a response of n tokens: 1 at the target, towards 0 far from it."""
    longest = max(len(response), target)
    return 1.0 - abs(len(response) - target) / longest if longest else 1.0


def contains(prompt: Ids, response: Ids, *, text: str) -> float:
    """1 where the characters of `text` stand in the response one after the other, else 0."""
    wanted, found = encode(text), list(response)
    return float(any(found[i : i + len(wanted)] == wanted for i in range(len(found) - len(wanted) + 1)))


def share(prompt: Ids, response: Ids, *, text: str) -> float:
    """Share of the response's tokens that are one of the characters of `text`; 0 of an empty response."""
    wanted = set(encode(text))
    return sum(token in wanted for token in response) / max(len(response), 1)


def distinct(prompt: Ids, response: Ids, *, n: int = 2) -> float:
    """Different n-grams over all n-grams of the response (distinct-n, Li et al. 2016); 1 where it is shorter than n."""
    grams = [tuple(response[i : i + n]) for i in range(len(response) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def ended(prompt: Ids, response: Ids) -> float:
    """1 where the response's last token is `<eos>`, else 0."""
    return float(bool(len(response)) and response[-1] == IDS[EOS])


LIBRARY: dict[str, Reward] = {
    "length": length, "contains": contains, "share": share, "distinct": distinct, "ended": ended,
}  # fmt: skip
"""by name; `task`, the reward of the scenario's built-in task, is known beside them"""
CHARACTERS_ONLY = ("contains", "share", "ended")
"""those that take token ids for the built-in characters"""


def reward_function(name: str, task: str | None, arguments: Mapping[str, Any] | None = None) -> Reward:
    """The reward that a scenario names: of the built-in task, of the library, or a function `module:name`.

    Raises ValueError where there is none such, or where it takes no (prompt, response) with these arguments.
    """
    found = _found(name, task)
    try:
        inspect.signature(found).bind([], [], **(arguments or {}))
    except TypeError as error:
        given = ", ".join(("prompt", "response", *(f"{key}=…" for key in arguments or {})))
        raise ValueError(f"{name} cannot be called as {name}({given}): {error}") from None
    except ValueError:  # a function of C that does not say what it takes
        pass
    if name in LIBRARY:
        _try(name, found, arguments or {})
    return found


def _try(name: str, function: Reward, arguments: Mapping[str, Any]) -> None:
    """Raises ValueError where a function of the library cannot work with these arguments."""
    try:
        value = function([IDS[EOS]], [IDS[EOS]], **arguments)
    except Exception as error:
        given = ", ".join(f"{key}={_short(value)}" for key, value in arguments.items())
        raise ValueError(f"{name} cannot work with {given}: {type(error).__name__}: {error}") from None
    if not math.isfinite(value):
        raise ValueError(f"{name} gives {value} with these arguments")


def _found(name: str, task: str | None) -> Reward:
    if name == "task":
        if task not in TASKS:
            raise ValueError("the data is of no built-in task, so there is no reward of a task")
        return TASKS[task].reward
    if name in LIBRARY:
        return LIBRARY[name]
    module, _, attribute = name.partition(":")
    importable(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever a user's module may raise while it is imported
        raise ValueError(f"there is no function {name}: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise ValueError(f"{name} is not a function")
    return found  # type: ignore[no-any-return]


def importable(folder: str) -> None:
    """Modules in a folder are found from now on, after all others."""
    if folder not in sys.path:
        sys.path.append(folder)


class ByFunction:
    """Rewards of a function in this process."""

    def __init__(self, name: str, reward: Reward, arguments: Mapping[str, Any] | None = None) -> None:
        self.name, self._reward, self._arguments = name, reward, dict(arguments or {})

    def score(self, samples: Samples, notes: dict[str, Any]) -> Columns:
        """`rewards` and `reward_…`, shape [N] each. Raises RewardFailed for whatever is no finite number."""
        notes |= counted(samples)
        pairs = [
            (row[:prompt].tolist(), row[prompt:].tolist())
            for row, prompt in zip(samples.tokens, samples.num_prompt_tokens, strict=True)
        ]
        return columns([parts(value, self.name, samples, i) for i, value in enumerate(self._values(samples, pairs))],
                       self.name)  # fmt: skip

    def _values(self, samples: Samples, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Any]:
        if getattr(self._reward, "batched", False):
            return self._together(samples, pairs)
        found = []
        for i, (prompt, response) in enumerate(pairs):
            try:
                found.append(self._reward(prompt, response, **self._arguments))
            except (Exception, SystemExit) as error:
                raise _raised(self.name, error, whose(samples, i)) from error
        return found

    def _together(self, samples: Samples, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Any]:
        try:
            found = list(self._reward([pair[0] for pair in pairs], [pair[1] for pair in pairs], **self._arguments))
        except (Exception, SystemExit) as error:
            raise _raised(self.name, error, f"{len(pairs)} samples of step {samples.step}") from error
        if len(found) != len(pairs):
            raise RewardFailed(f"{self.name} gave {len(found)} rewards for {len(pairs)} samples of step {samples.step}")
        return found


def _raised(name: str, error: BaseException, where: str) -> RewardFailed:
    return RewardFailed(f"{name} raised {type(error).__name__}: {error}, for {where}")


def counted(samples: Samples) -> dict[str, Any]:
    """What the span of one call over samples says."""
    tokens = sum(samples.lengths)
    quantities = {"calls": 1.0, "samples": float(len(samples)), "tokens": float(tokens)}
    return {"tokens": tokens, "samples": len(samples), "quantities": quantities}


def whose(samples: Samples, i: int) -> str:
    """Which sample this is, with the token ids of its prompt."""
    prompt = samples.tokens[i][: samples.num_prompt_tokens[i]].tolist()
    ids = " ".join(map(str, prompt[:_SHOWN_IDS])) + (" …" if len(prompt) > _SHOWN_IDS else "")
    return f"sample {samples.indices[i]} of prompt {samples.prompts[i]} of step {samples.step} (prompt's ids: {ids})"


def parts(value: Any, name: str, samples: Samples, i: int) -> Parts:
    """The components of one reward. Raises RewardFailed where it is neither a finite number nor a dict of such."""
    given = value if isinstance(value, Mapping) else {WHOLE: value}
    if not given or not all(isinstance(key, str) for key in given) or (given is value and WHOLE in given):
        raise RewardFailed(f"{name} gave {_short(value)}, whose keys are no names, for {whose(samples, i)}")
    found = {}
    for key, part in given.items():
        if not isinstance(part, Real | np.bool_) or not _is_finite(part):
            what = f"{_short(part)} as {key!r}" if key else _short(part)
            raise RewardFailed(f"{name} gave {what}, which is no finite number, for {whose(samples, i)}")
        found[key] = float(part)
    if not _is_finite(sum(found.values())):
        raise RewardFailed(f"{name} gave {_short(value)}, whose sum is no finite number, for {whose(samples, i)}")
    return found


def _is_finite(value: Any) -> bool:
    """Whether a number is finite as a float too: a whole number may be too large for one."""
    try:
        return math.isfinite(float(value))
    except (OverflowError, ValueError, TypeError):
        return False


def columns(found: Sequence[Parts], name: str) -> Columns:
    """`rewards`, the sums, and a column `reward_…` for each component, all [N]. All samples have the same components."""
    for other in found[1:]:
        if other.keys() != found[0].keys():
            names = [", ".join(sorted(part)) or "a number" for part in (found[0], other)]
            raise RewardFailed(f"{name} gave rewards of different components: {names[0]}, then {names[1]}")
    keys = list(found[0]) if found else []
    table = {key: np.asarray([part[key] for part in found], dtype=np.float64) for key in keys}
    total = np.asarray([math.fsum(part.values()) for part in found], dtype=np.float64)
    return {"rewards": total} | {f"reward_{key}": column for key, column in table.items() if key != WHOLE}
