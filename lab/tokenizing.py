"""Text to token ids: by the built-in characters, or by the `tokenizer.json` of a model's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.characters import BOS, EOS, IDS, encode
from lab.errors import InputError

FILE = "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """The two ways in which text is read."""

    vocabulary: int
    """one more than the largest id"""
    prompt: Callable[[str], list[int]]
    """begins as the model's sequences begin"""
    response: Callable[[str], list[int]]
    """ends with the end of sequence, where the tokenizer has one"""
    end: int | None
    """the id of that"""


def tokenizer(folder: str | None) -> Tokenizer:
    """The tokenizer of a folder; None: the built-in characters. Raises InputError naming what is wrong with the folder."""
    if folder is None:
        return Tokenizer(
            vocabulary=len(IDS), prompt=lambda text: [IDS[BOS], *encode(text)],
            response=lambda text: [*encode(text), IDS[EOS]], end=IDS[EOS],
        )  # fmt: skip
    inner, ending = _read(Path(folder) / FILE), _ending(Path(folder))
    end = None if ending is None else inner.token_to_id(ending)
    if end is None and ending is not None:
        problem = f"the end of sequence {ending!r} is no token of {FILE}"
        raise InputError(file=str(Path(folder) / "tokenizer_config.json"), key="eos_token", problem=problem)
    return Tokenizer(
        vocabulary=max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        prompt=lambda text: list(inner.encode(text).ids),
        response=lambda text: [*inner.encode(text, add_special_tokens=False).ids, *([] if end is None else [end])],
        end=end,
    )


def _read(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer as Inner
    except ModuleNotFoundError:
        problem = "reading it needs the Python package tokenizers, which is not installed"
        raise InputError(file=str(path), problem=problem, remedy="run `make setup`") from None
    if not path.is_file():
        problem = "there is no such file"
        raise InputError(file=str(path), problem=problem, remedy="name a folder with the model's tokenizer")
    try:
        return Inner.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        problem = f"cannot be read: {error}"
        raise InputError(file=str(path), problem=problem, remedy=f"use the {FILE} of the model") from None


def _ending(folder: Path) -> str | None:
    """The end of sequence that a folder's tokenizer_config.json names."""
    path = folder / "tokenizer_config.json"
    try:
        named = json.loads(path.read_text(encoding="utf-8")).get("eos_token") if path.is_file() else None
    except (ValueError, AttributeError) as error:
        remedy = "use the tokenizer_config.json of the model"
        raise InputError(file=str(path), problem=f"cannot be read: {error}", remedy=remedy) from None
    found = named.get("content") if isinstance(named, dict) else named
    if found is not None and not isinstance(found, str):
        problem, remedy = f"{json.dumps(found)[:40]} is not text", "use the tokenizer_config.json of the model"
        raise InputError(file=str(path), key="eos_token", problem=problem, remedy=remedy)
    return found
