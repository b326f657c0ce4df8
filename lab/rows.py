"""Data in JSON Lines: one JSON object a line, read into token ids. A broken line is told with its number.

Fields by kind of file:

| kind             | fields                                              |
|------------------|-----------------------------------------------------|
| `prompts`        | `prompt`                                            |
| `demonstrations` | `prompt`, `response`                                |
| `preferences`    | `prompt`, `chosen`, `rejected`                      |
| `labels`         | `prompt`, `response`, `label` (true or 1: desired)  |

All but `label` are texts. `language`, `topic`, `safety` and `kind` (natural, length_matched or adversarial) are read
where a line has them, for reports; other fields are left alone, as are empty lines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lab.errors import InputError
from lab.tokenizing import Tokenizer
from lab.workload import uniform

Source = Literal["prompts", "demonstrations", "preferences", "labels"]
FIELDS: dict[Source, tuple[str, ...]] = {
    "prompts": ("prompt",),
    "demonstrations": ("prompt", "response"),
    "preferences": ("prompt", "chosen", "rejected"),
    "labels": ("prompt", "response"),
}
"""texts that a line must have, the prompt first"""
ATTRIBUTES = ("language", "topic", "safety", "kind")
Kind = Literal["natural", "length_matched", "adversarial"]
"""of a pair. natural: as in training; length_matched: both equally long; adversarial: the rejected one is longer, and well
formed"""
KINDS: tuple[Kind, ...] = ("natural", "length_matched", "adversarial")
MAX_ROWS = 1_000_000
_HELD_OUT_STREAM = 39


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line."""

    line: int
    """from 1"""
    prompt: list[int]
    responses: list[list[int]]
    """one, or chosen and rejected; none in a file of prompts"""
    label: int | None = None
    about: dict[str, str] = field(default_factory=dict)
    """attributes by name"""

    @property
    def num_tokens(self) -> int:
        """Of the longest sequence."""
        return len(self.prompt) + max(map(len, self.responses), default=0)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A file that was read."""

    rows: list[Row]
    sha256: str
    """of the file's bytes"""
    skipped: dict[int, str]
    """broken lines by number, and what is wrong with each"""

    def split(self, share: float, seed: int) -> tuple[list[Row], list[Row]]:
        """Rows to train on, and the share that never is, drawn by the seed; at least one of each where share > 0.

        Rows of one prompt stay together, so that no held-out prompt is trained on: fewer are held out where they do not
        fit the share, and none where all rows have the same prompt.
        """
        number = min(max(round(len(self.rows) * share), int(share > 0)), len(self.rows) - 1)
        drawn = np.argsort(uniform(seed, _HELD_OUT_STREAM, 0, np.arange(len(self.rows)), 0), kind="stable").tolist()
        groups: dict[int, list[int]] = {}
        names = [hash(tuple(row.prompt)) for row in self.rows]
        for i in drawn:
            groups.setdefault(names[i], []).append(i)
        apart = set[int]()
        for group in groups.values():
            apart.update(group if len(apart) + len(group) <= number else ())
        if number and not apart and len(groups) > 1:
            fewest: list[int] = min(groups.values(), key=len)
            apart.update(fewest)
        return (
            [row for i, row in enumerate(self.rows) if i not in apart],
            [row for i, row in enumerate(self.rows) if i in apart],
        )


class _Broken(ValueError):
    """What is wrong with a line, and the field."""

    def __init__(self, problem: str, key: str | None = None, remedy: str = "correct the line") -> None:
        super().__init__(problem)
        self.problem, self.key, self.remedy = problem, key, remedy


def read(path: Path, source: Source, tokenizer: Tokenizer, *, max_tokens: int | None, skip: bool) -> Rows:
    """The rows of a file in its order.

    Raises InputError naming file and line of the first broken one (`skip`: they are left out instead), and for a file
    that is missing, unreadable, or has no row.
    """
    from lab.load import content

    held = content(path, "a JSON Lines file")
    rows, broken = [], {}
    for number, line in _lines(held):
        try:
            rows.append(_row(number, line, source, tokenizer, max_tokens))
        except _Broken as error:
            if not skip:
                remedy = f"{error.remedy}, or set `data.on_broken: skip`"
                raise InputError(
                    file=str(path), line=number, key=error.key, problem=error.problem, remedy=remedy
                ) from None
            broken[number] = error.problem
        if len(rows) > MAX_ROWS:
            raise InputError(
                file=str(path), line=number, problem=f"more than {MAX_ROWS} rows", remedy="use a part of it"
            )
    if not rows:
        said = (
            f"all {len(broken)} lines are broken, line {min(broken)}: {broken[min(broken)]}"
            if broken
            else "the file is empty"
        )
        remedy = f"write lines like {json.dumps(dict.fromkeys(FIELDS[source], '…'), ensure_ascii=False)}"
        raise InputError(file=str(path), problem=said, remedy=remedy)
    return Rows(rows=rows, sha256=hashlib.sha256(held).hexdigest(), skipped=broken)


def _lines(held: bytes) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, by number; a byte order mark is left out."""
    for number, line in enumerate(held.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _row(number: int, line: bytes, source: Source, tokenizer: Tokenizer, max_tokens: int | None) -> Row:
    found = _object(line)
    prompt, *responses = (_text(found, name) for name in FIELDS[source])
    if len(responses) == 2 and responses[0] == responses[1]:
        raise _Broken("chosen and rejected are the same", "rejected")
    try:
        read = [tokenizer.prompt(prompt), *(tokenizer.response(text) for text in responses)]
    except Exception as error:  # plain ones, for example where there is no token for what is unknown
        raise _Broken(f"the tokenizer cannot read it: {error}") from None
    row = Row(
        line=number, prompt=read[0], responses=read[1:],
        label=_label(found) if source == "labels" else None, about=_about(found),
    )  # fmt: skip
    if not row.prompt or not all(row.responses):
        raise _Broken("the tokenizer makes no token of a text")
    if max_tokens is not None and row.num_tokens > max_tokens:
        raise _Broken(f"{row.num_tokens} tokens, at most {max_tokens} are taken", remedy="shorten it")
    return row


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _Broken(f"byte {error.start} of the line is not UTF-8", remedy="save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise _Broken(f"not valid JSON: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise _Broken(f"not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise _Broken("not a JSON object", remedy='write an object, {"prompt": "…"}')
    return found


def _text(found: dict[str, Any], name: str) -> str:
    value = found.get(name)
    if name not in found:
        raise _Broken("the field is missing", name, f'add "{name}": "…"')
    if not isinstance(value, str):
        raise _Broken(f"{json.dumps(value)[:40]} is not text", name, "write a text in quotes")
    if not value.strip():
        raise _Broken("the text is empty", name, "write a text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # half of a pair of \u escapes
        raise _Broken("the text has a character that is not Unicode", name) from None
    return value


def _label(found: dict[str, Any]) -> int:
    label = found.get("label")
    if "label" not in found:
        raise _Broken("the field is missing", "label", 'add "label": true where the response is desired, else false')
    if label not in (0, 1) or isinstance(label, float):
        raise _Broken(f"{json.dumps(label)[:40]} is no label", "label", "write true or false")
    return int(label)


def _about(found: dict[str, Any]) -> dict[str, str]:
    about = {name: found[name] for name in ATTRIBUTES if found.get(name) is not None}
    for name, value in about.items():
        if not isinstance(value, str):
            raise _Broken(f"{json.dumps(value)[:40]} is not text", name, "write a text in quotes")
    if (kind := about.get("kind")) is not None and kind not in KINDS:
        raise _Broken(f"{kind[:40]!r} is unknown", "kind", f"use one of {', '.join(KINDS)}")
    return about
