"""What validation found wrong in a file, told in the words of the file: line, key, value, and what would be right."""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from lab.coherence import Incoherent
from lab.errors import InputError, WrongValue

Keys = tuple[str | int, ...]
Told = tuple[Keys, str, str]
"""path, problem, remedy"""

EXAMPLES = {"ns": "20 ms", "B": "64 MiB", "B/s": "5 GB/s", "FLOP/s": "1 TFLOP/s"}
"""of a quantity, by the first unit that its error lists"""
SHOWN = 60
"""characters of a value that an error repeats"""


def explain(
    error: ValidationError, record: type[BaseModel], data: Any, lines: dict[Keys, int], file: str
) -> InputError:
    """The first error in file order, told in the words of the file."""
    items = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")  # a typo also misses its key
    told = [_tell(item, record, data, lines, file) for item in items if item["type"] == items[0]["type"]]
    return min(told, key=lambda problem: (problem.line is None, problem.line or 0))


def _tell(item: Any, record: type[BaseModel], data: Any, lines: dict[Keys, int], file: str) -> InputError:
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, Incoherent):
        line = line_of(lines, tuple(split(cause.key)))
        return InputError(file=file, line=line, key=cause.key, problem=cause.problem, remedy=cause.remedy)
    if isinstance(cause, WrongValue):
        path, problem, remedy = _placed(cause, _in_file(item["loc"], data, absent=False), data)
    else:
        path, problem, remedy = _told(item, record, data)
    return InputError(file=file, line=line_of(lines, path), key=dotted(path), problem=problem, remedy=remedy)


def _placed(cause: WrongValue, above: Keys, data: Any) -> Told:
    """A validator's own finding; its value is repeated where the file has it, it is short and the words lack it."""
    path = (*above, *cause.path)
    value = value_at(data, path)
    said = short(value)
    told = isinstance(value, Mapping | list) or value is None or said.endswith("…") or said in cause.problem
    return path, cause.problem if told else f"{said}: {cause.problem}", cause.remedy


def _told(item: Any, record: type[BaseModel], data: Any) -> Told:
    kind = item["type"]
    path = _in_file(item["loc"], data, absent=kind == "missing")
    if kind == "extra_forbidden":
        remedy = _nearest_key(str(path[-1]), _valid_keys(record, path[:-1], data))
        return path, f"there is no key {path[-1]!r} here", remedy
    if kind == "missing":
        return path, "the key is missing", f"add `{path[-1]}: …`"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _tag(item, kind, path)
    value = value_at(data, path)
    if kind == "value_error":
        return _by_validator(item["msg"].removeprefix("Value error, "), path, value, record, data)
    wanted = _wanted(kind, _fields(record, path, data))
    if kind == "finite_number":
        return path, f"{short(value)} is not a finite number", f"write {wanted}"
    if kind.endswith("_type") or kind == "int_from_float":
        return path, f"{short(value)} is not {_KINDS.get(kind, 'of the right type')}", f"write {wanted}"
    problem = item["msg"].replace("Input should", "should", 1)
    return path, f"{short(value)}: {problem}", _within(kind, value, item.get("ctx", {}), wanted)


def _tag(item: Any, kind: str, path: Keys) -> Told:
    tag, expected = item["ctx"]["discriminator"].strip("'"), item["ctx"].get("expected_tags", "")
    problem = "the key is missing" if kind.endswith("found") else f"{item['ctx']['tag']!r} is unknown"
    return (*path, tag), problem, f"use one of {expected}" if expected else f"add `{tag}: …`"


_KINDS = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number", "bool_type": "true or false",
    "string_type": "text", "list_type": "a list", "tuple_type": "a list", "dict_type": "a mapping", "model_type": "a mapping",
}  # fmt: skip
_WRITTEN = {"a list": "a list, `[…]`", "a mapping": "a mapping, `key: value`"}


def _wanted(kind: str, fields: Sequence[FieldInfo]) -> str:
    """What a field takes, with its range."""
    noun = _KINDS.get(kind) or (
        "a whole number" if any(_holds(field.annotation, int) for field in fields) else "a number"
    )
    if noun not in ("a number", "a whole number"):
        return _WRITTEN.get(noun, noun)
    return " ".join(part for part in (noun, _range(fields)) if part)


def _range(fields: Sequence[FieldInfo]) -> str:
    """`from 1 to 10`, `above 0`, `of 0 or more`, …; empty where every number will do."""
    limit: dict[str, Any] = {}
    for field in fields:
        for part in _constraints([*field.metadata, field.annotation]):
            limit |= {name: getattr(part, name) for name in ("ge", "gt", "le", "lt") if hasattr(part, name)}
    low = f"above {limit['gt']:g}" if "gt" in limit else ""
    high = f"at most {limit['le']}" if "le" in limit else f"below {limit['lt']}" if "lt" in limit else ""
    if "ge" in limit and "le" in limit:
        return f"from {limit['ge']} to {limit['le']}"
    if "ge" in limit and not high:
        return f"of {limit['ge']} or more"
    return " and ".join(part for part in (low or (f"of at least {limit['ge']}" if "ge" in limit else ""), high) if part)


def _constraints(parts: Iterable[Any]) -> Iterator[Any]:
    """The constraints in metadata and, below unions, in annotations."""
    for part in parts:
        yield from _constraints(part.metadata) if isinstance(part, FieldInfo) else [part]
        if not isinstance(part, FieldInfo) and (inner := typing.get_args(part)):
            yield from _constraints(inner)


def _holds(annotation: Any, kind: type) -> bool:
    return annotation is kind or any(_holds(inner, kind) for inner in typing.get_args(annotation))


def _within(kind: str, value: Any, limits: Mapping[str, Any], wanted: str) -> str:
    """The remedy for a value of the right type that is not allowed."""
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", str(limits["expected"]))
        close = _close(str(value), allowed)
        return f"did you mean {close[0]}?" if close else f"use one of {', '.join(allowed)}"
    if kind == "string_pattern_mismatch":
        return f"write text that matches {limits['pattern']}"
    for name, words in (("min_length", "give at least"), ("max_length", "give at most")):
        if name in limits:
            return f"{words} {limits[name]}{' characters' if isinstance(value, str) else ''}"
    return f"write {wanted}"


def _by_validator(problem: str, path: Keys, value: Any, record: type[BaseModel], data: Any) -> Told:
    """What a validator said of a value; of a mapping, at the one of its keys that is meant."""
    mentioned = _mentioned(problem, value) if isinstance(value, dict) else []
    if len(mentioned) == 1:
        path, value = (*path, mentioned[0]), value[mentioned[0]]
    elif not mentioned and path:
        mentioned = [str(path[-1])]
    plain = isinstance(value, dict | list) or value is None or _said(problem, value)
    return path, problem if plain else f"{short(value)}: {problem}", _right(problem, value, mentioned)


def _said(problem: str, value: Any) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(str(value))}(?![\w.]*\w)", problem) is not None if str(value) else False


def _mentioned(problem: str, mapping: Mapping[str, Any]) -> list[str]:
    """Keys of a mapping that a message is about: one whose text it quotes, else those that it names."""
    quoted = [key for key, value in mapping.items() if isinstance(value, str) and repr(value) in problem]
    return quoted if len(quoted) == 1 else [key for key in mapping if re.search(rf"\b{re.escape(key)}\b", problem)]


def _right(problem: str, value: Any, mentioned: Sequence[str]) -> str:
    """What to do about a validator's finding: the nearest name, the unit, the range or the keys to change."""
    if meant := re.search(r"did you mean ([^?]+)\?", problem):
        return f"write {meant[1]}"
    if units := re.search(r"with one of the units ([^,]+)", problem):
        return f"write a number with a unit, for example `{EXAMPLES.get(units[1], '1 ' + units[1])}`"
    if problem.endswith("is negative"):
        return "write 0 or more"
    if names := re.search(r"\b(?:has|are|none of) ([\w.-]+(?:, [\w.-]+)+)$", problem):
        close = _close(str(value), names[1].split(", "))
        return f"the nearest are {', '.join(close)}" if close else "use one of these"
    return f"change {' or '.join(f'`{key}`' for key in mentioned)}" if mentioned else "correct what it names"


def _close(word: str, names: Iterable[str]) -> list[str]:
    """At most four names like a word, best first: those that begin with it or hold it, else those of similar spelling."""
    names, low = list(names), word.lower()
    holding = [name for name in names if len(low) > 1 and low in name.lower()]
    similar = difflib.get_close_matches(low, [name.lower() for name in names], n=4)
    return sorted(holding, key=lambda name: not name.lower().startswith(low))[:4] or [
        name for match in similar for name in names if name.lower() == match
    ]


def nearest(word: str, names: Iterable[str], what: str) -> str:
    """A remedy for an unknown name: the nearest ones, or all (`what` says of what, in the plural)."""
    known = list(names)
    close = _close(word, known)
    return f"did you mean {' or '.join(close)}?" if close else f"the {what} are {', '.join(known)}"


def _nearest_key(key: str, valid: list[str]) -> str:
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else f"the keys here are {', '.join(valid)}"


def short(value: Any) -> str:
    """A value as an error repeats it."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "…"


def value_at(data: Any, path: Keys) -> Any:
    """What the file holds at a path; None where it holds nothing."""
    for part in path:
        inside = part in data if isinstance(data, dict) else isinstance(data, list) and part in range(len(data))
        if not inside:
            return None
        data = data[part]
    return data


def _in_file(loc: Keys, data: Any, *, absent: bool) -> Keys:
    """A pydantic location without the union tags and class names that the file does not have; the last part is kept if `absent`."""
    path: list[str | int] = []
    for position, part in enumerate(loc):
        last = position == len(loc) - 1
        inside = (isinstance(data, dict) and part in data) or (isinstance(data, list) and isinstance(part, int))
        if inside:
            data = data[part] if isinstance(data, dict) or int(part) < len(data) else None
        if inside or (absent and last):
            path.append(part)
    return tuple(path)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The record types inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models(argument)


def _fields(record: type[BaseModel], path: Keys, data: Any) -> list[FieldInfo]:
    """The fields that the last key of a path may be, unions narrowed by their tag; empty for a key of a free mapping."""
    models, found = [record], list[FieldInfo]()
    for part in path:
        if isinstance(part, str):
            fits = _tagged(models, data)
            found = [f for m in fits for n, f in m.model_fields.items() if part in (n, f.alias)]
            models = [inner for field in found for inner in _models(field.annotation)] or fits
        data = value_at(data, (part,))
    return found


def _tagged(models: list[type[BaseModel]], data: Any) -> list[type[BaseModel]]:
    """Those record types whose tag is the one that the file has; all where none is."""
    for tag in ("name", "dist"):
        chosen = data.get(tag) if isinstance(data, dict) else None
        fits = [
            m for m in models if tag in m.model_fields and chosen in typing.get_args(m.model_fields[tag].annotation)
        ]
        models = fits or models
    return models


def _valid_keys(record: type[BaseModel], path: Keys, data: Any) -> list[str]:
    """Keys that a mapping of the file may have, unions narrowed by their tag where the file has one."""
    models: list[type[BaseModel]] = [record]
    for part in path:
        data = data[part]
        if isinstance(part, int):
            continue
        fields = [f for m in models for n, f in m.model_fields.items() if part in (n, f.alias)]
        models = [found for field in fields for found in _models(field.annotation)] or models
    return sorted({field.alias or name for m in _tagged(models, data) for name, field in m.model_fields.items()})


def line_of(lines: dict[Keys, int], path: Keys) -> int | None:
    """The line of a path, or of what holds it where the file lacks it."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path)


def dotted(path: Keys) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def split(key: str) -> Iterator[str | int]:
    """The path of a dotted key; the keys of `place` hold a dot themselves."""
    for part in re.findall(r"(?:actor|critic|reference|reward)\.(?:generate|train|score)|[^.\[\]]+|\[\d+\]", key):
        yield int(part[1:-1]) if part.startswith("[") else part
