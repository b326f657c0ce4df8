"""Scenario files: YAML read with line numbers, so that every error says where it is and what would be right."""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from lab.coherence import Incoherent
from lab.errors import InputError
from lab.records import Record
from lab.scenario import Scenario

Keys = tuple[str | int, ...]
R = TypeVar("R", bound=Record)

MAX_DEPTH, MAX_VALUES, MAX_DIGITS = 50, 100_000, 40
_PLAIN = frozenset({"map", "seq", "str", "int", "float", "bool", "null"})


class _Loader(yaml.SafeLoader):
    """YAML with plain values only: `1e-6` is a number, `yes` and dates are text, duplicate keys are refused."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rsplit(":", 1)[1] in ("null", "int")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|false|True|False)$"), list("tfTF"))
_FLOAT = re.compile(r"(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def load(path: str | Path) -> Scenario:
    """The scenario in a file. Raises InputError naming file, line, key and remedy."""
    return read_record(path, Scenario)


def read_record(path: str | Path, record: type[R]) -> R:
    """A record in a file of its own, for example a cluster. Raises InputError naming file, line, key and remedy."""
    return parse_record(_text(Path(path)), record, file=str(path))


def parse(text: str, *, file: str = "scenario") -> Scenario:
    """The scenario in a YAML text; `file` names it in errors. Raises InputError."""
    return parse_record(text, Scenario, file=file)


def parse_record(text: str, record: type[R], *, file: str) -> R:
    """A record in a YAML text; `file` names it in errors. Raises InputError."""
    data, lines = _construct(_compose(text, file), file)
    if not isinstance(data, dict):
        remedy = f"start with `{next(iter(record.model_fields))}: …`"
        raise InputError(file=file, line=1, problem="the file holds no mapping", remedy=remedy)
    try:
        return record.model_validate_json(json.dumps(data), context={"folder": Path(file).parent})
    except ValidationError as error:
        raise _explain(error, record, data, lines, file) from None


@contextmanager
def located(path: str | Path) -> Iterator[None]:
    """Errors that name a key of this file, but no file, get file and line."""
    try:
        yield
    except InputError as error:
        if error.file is None and error.key is not None and not error.key.startswith("-"):
            lines = _construct(_compose(_text(Path(path)), str(path)), str(path))[1]
            error.file, error.line = str(path), _line(lines, tuple(_split(error.key)))
        raise


def dump(scenario: Scenario) -> str:
    """The scenario as YAML that `load` reads back to an equal one."""
    data = scenario.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def json_schema() -> dict[str, Any]:
    """JSON Schema of scenario files, for editors."""
    schema = Scenario.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def decode(content: bytes, *, file: str) -> str:
    """The text of a file; `file` names it in errors. Raises InputError for bytes that are not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        problem = f"byte {error.start} is not UTF-8"
        raise InputError(file=file, line=line, problem=problem, remedy="save the file as UTF-8") from None


def _text(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise InputError(file=str(path), problem="not a regular file", remedy="name an existing file")
    try:
        content = path.read_bytes()
    except OSError as error:
        problem = error.strerror or str(error)
        raise InputError(file=str(path), problem=problem, remedy="name an existing file") from None
    return decode(content, file=str(path))


def _compose(text: str, file: str) -> yaml.Node:
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        problem = f"not valid YAML: {error.problem}"
        raise InputError(
            file=file, line=line, problem=problem, remedy="check indentation, quotes and brackets"
        ) from None
    except yaml.YAMLError as error:
        problem = f"not valid YAML: {str(error).splitlines()[0]}"
        raise InputError(file=file, problem=problem, remedy="remove the character") from None
    except RecursionError:
        raise InputError(file=file, problem="the file is nested too deeply", remedy="write it flat") from None
    if node is None:
        raise InputError(file=file, problem="the file is empty", remedy="start with `name: …`")
    return node


def _construct(node: yaml.Node, file: str) -> tuple[Any, dict[Keys, int]]:
    lines: dict[Keys, int] = {}
    left = [MAX_VALUES]

    def walk(node: yaml.Node, path: Keys, above: tuple[int, ...]) -> Any:
        lines.setdefault(path, node.start_mark.line + 1)
        _refuse_tag(node, path, file)
        left[0] -= 1
        if len(path) > MAX_DEPTH or left[0] < 0:
            problem = f"more than {MAX_DEPTH} levels or {MAX_VALUES} values"
            raise InputError(file=file, line=lines[path], problem=problem, remedy="a file of the lab is far smaller")
        if id(node) in above:
            raise InputError(file=file, line=lines[path], problem="a YAML alias contains itself", remedy="write it out")
        if isinstance(node, yaml.SequenceNode):
            return [walk(item, (*path, i), (*above, id(node))) for i, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return _scalar(node, path, file)
        found: dict[str, Any] = {}
        for key_node, value in node.value:
            _refuse_tag(key_node, path, file)
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise InputError(file=file, line=line, problem="a key is not plain text", remedy="write `key: value`")
            if key in found:
                dotted = _dotted((*path, key))
                raise InputError(file=file, line=line, key=dotted, problem="the key stands twice", remedy="remove one")
            lines[(*path, key)] = line
            found[key] = walk(value, (*path, key), (*above, id(node)))
        return found

    return walk(node, (), ()), lines


def _refuse_tag(node: yaml.Node, path: Keys, file: str) -> None:
    if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.rsplit(":", 1)[1] not in _PLAIN:
        line, problem = node.start_mark.line + 1, f"the YAML tag {node.tag} is not allowed"
        raise InputError(file=file, line=line, key=_dotted(path), problem=problem, remedy="remove the tag")


def _scalar(node: yaml.Node, path: Keys, file: str) -> Any:
    try:
        if len(node.value) > MAX_DIGITS and not node.tag.endswith(":str"):
            raise ValueError(f"more than {MAX_DIGITS} digits")
        return _Loader("").construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        line, problem = (
            node.start_mark.line + 1,
            f"{_short(node.value)} cannot be read: {getattr(error, 'problem', error)}",
        )
        remedy = "write plain text, a number, true, false or null"
        raise InputError(file=file, line=line, key=_dotted(path), problem=problem, remedy=remedy) from None


def _explain(
    error: ValidationError, record: type[BaseModel], data: Any, lines: dict[Keys, int], file: str
) -> InputError:
    """The first error in file order, told in the words of the file."""
    items = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")  # a typo also misses its key
    told = [_tell(item, record, data, lines, file) for item in items if item["type"] == items[0]["type"]]
    return min(told, key=lambda problem: (problem.line is None, problem.line or 0))


def _tell(item: Any, record: type[BaseModel], data: Any, lines: dict[Keys, int], file: str) -> InputError:
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, Incoherent):
        line = _line(lines, tuple(_split(cause.key)))
        return InputError(file=file, line=line, key=cause.key, problem=cause.problem, remedy=cause.remedy)
    kind, value = item["type"], item.get("input")
    path = _in_file(item["loc"], data, absent=kind == "missing")
    problem, remedy = item["msg"].removeprefix("Value error, "), f"see {_dotted(path[:-1]) or 'the file'} in the schema"
    if kind == "extra_forbidden":
        problem, remedy = (
            f"there is no key {path[-1]!r} here",
            _nearest(str(path[-1]), _valid_keys(record, path[:-1], data)),
        )
    elif kind == "missing":
        problem, remedy = "the key is missing", f"add `{path[-1]}: …`"
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        tag, expected = item["ctx"]["discriminator"].strip("'"), item["ctx"].get("expected_tags", "")
        path, problem = (
            (*path, tag),
            "the key is missing" if kind.endswith("found") else f"{item['ctx']['tag']!r} is unknown",
        )
        remedy = f"use one of {expected}" if expected else f"add `{tag}: …`"
    elif kind.endswith("_type") or kind == "int_from_float":
        problem, remedy = f"{_short(value)} is not {_KINDS.get(kind, 'of the right type')}", "correct the value"
    elif "ctx" in item and value is not None:
        problem, remedy = f"{_short(value)}: {_decapitalised(problem)}", "use a value that fits"
    return InputError(file=file, line=_line(lines, path), key=_dotted(path), problem=problem, remedy=remedy)


_KINDS = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number", "bool_type": "true or false",
    "string_type": "text", "list_type": "a list", "tuple_type": "a list", "dict_type": "a mapping", "model_type": "a mapping",
}  # fmt: skip


def _decapitalised(text: str) -> str:
    return text.replace("Input should", "should", 1)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "…"


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


def _valid_keys(record: type[BaseModel], path: Keys, data: Any) -> list[str]:
    """Keys that a mapping of the file may have, unions narrowed by their tag where the file has one."""
    models: list[type[BaseModel]] = [record]
    for part in path:
        data = data[part]
        if isinstance(part, int):
            continue
        fields = [f for m in models for n, f in m.model_fields.items() if part in (n, f.alias)]
        models = [found for field in fields for found in _models(field.annotation)] or models
    for tag in ("name", "dist"):
        chosen = data.get(tag) if isinstance(data, dict) else None
        fits = [
            m for m in models if tag in m.model_fields and chosen in typing.get_args(m.model_fields[tag].annotation)
        ]
        models = fits or models
    return sorted({field.alias or name for m in models for name, field in m.model_fields.items()})


def _nearest(key: str, valid: list[str]) -> str:
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else f"the keys here are {', '.join(valid)}"


def _line(lines: dict[Keys, int], path: Keys) -> int | None:
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path)


def _dotted(path: Keys) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _split(key: str) -> Iterator[str | int]:
    """The path of a dotted key; the keys of `place` hold a dot themselves."""
    for part in re.findall(r"(?:actor|critic|reference|reward)\.(?:generate|train|score)|[^.\[\]]+|\[\d+\]", key):
        yield int(part[1:-1]) if part.startswith("[") else part
