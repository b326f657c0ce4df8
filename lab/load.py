"""Scenario files: YAML read with line numbers, so that every error says where it is and what would be right."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from lab.data import with_file, with_folders
from lab.errors import InputError
from lab.explain import Keys, dotted, explain, line_of, short, split
from lab.records import Record
from lab.scenario import Scenario

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
    folder = Path(file).parent
    try:
        read = with_file(with_folders(data, folder), folder) if record is Scenario else data
        return record.model_validate_json(json.dumps(read), context={"folder": folder})
    except ValidationError as error:
        raise explain(error, record, data, lines, file) from None
    except InputError as error:
        if error.file is None and error.key is not None:  # of this file, and not of one that it names
            error.file, error.line = file, line_of(lines, tuple(split(error.key)))
        raise


@contextmanager
def located(path: str | Path) -> Iterator[None]:
    """Errors that name a key of this file, but no file, get file and line; options and variables are no keys."""
    try:
        yield
    except InputError as error:
        if error.file is None and error.key is not None and not error.key.startswith("-") and not error.key.isupper():
            lines = _construct(_compose(_text(Path(path)), str(path)), str(path))[1]
            error.file, error.line = str(path), line_of(lines, tuple(split(error.key)))
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


def present(path: Path, what: str = "a file") -> Path:
    """A path at which there is something. Raises InputError that names `what` it should be, and the nearest names there."""
    if os.path.lexists(path) and not os.path.exists(path):
        problem = (
            f"a link to {os.readlink(path)}, where there is no such file" if os.path.islink(path) else "out of reach"
        )
        raise InputError(file=str(path), problem=problem, remedy=f"name {what}")
    if not os.path.exists(path):
        beside = os.listdir(path.parent) if os.path.isdir(path.parent) and os.access(path.parent, os.R_OK) else []
        close = difflib.get_close_matches(path.name, beside, n=2)
        near = f"name {what}; near it there is {' and '.join(str(path.parent / name) for name in close)}"
        raise InputError(file=str(path), problem="no such file", remedy=near if close else f"name {what} that exists")
    return path


def content(path: Path, what: str = "a file") -> bytes:
    """The bytes of a file. Raises InputError where there is none, or none that can be read."""
    if present(path, what) and not os.path.isfile(path):
        problem = "this is a folder" if os.path.isdir(path) else "not a regular file"
        raise InputError(file=str(path), problem=problem, remedy=f"name {what}")
    try:
        return path.read_bytes()
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise InputError(file=str(path), problem=problem, remedy="make it readable, or name another file") from None


def _text(path: Path) -> str:
    return decode(content(path), file=str(path))


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
                twice = dotted((*path, key))
                raise InputError(file=file, line=line, key=twice, problem="the key stands twice", remedy="remove one")
            lines[(*path, key)] = line
            found[key] = walk(value, (*path, key), (*above, id(node)))
        return found

    return walk(node, (), ()), lines


def _refuse_tag(node: yaml.Node, path: Keys, file: str) -> None:
    if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.rsplit(":", 1)[1] not in _PLAIN:
        line, problem = node.start_mark.line + 1, f"the YAML tag {node.tag} is not allowed"
        raise InputError(file=file, line=line, key=dotted(path), problem=problem, remedy="remove the tag")


def _scalar(node: yaml.Node, path: Keys, file: str) -> Any:
    try:
        if len(node.value) > MAX_DIGITS and not node.tag.endswith(":str"):
            raise ValueError(f"more than {MAX_DIGITS} digits")
        return _Loader("").construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        line, problem = (
            node.start_mark.line + 1,
            f"{short(node.value)} cannot be read: {getattr(error, 'problem', error)}",
        )
        remedy = "write plain text, a number, true, false or null"
        raise InputError(file=file, line=line, key=dotted(path), problem=problem, remedy=remedy) from None
