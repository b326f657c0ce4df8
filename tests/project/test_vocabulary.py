"""One word per thing: what the design does not use as a name stays out of files, classes and fields."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lab", "profiles", "simulator", "executor")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

CLASS = re.compile(r"(Manager|Handler|Helper|Factory)$|^(Base|Abstract)[A-Z]|^(Simulator|Executor)$")
NOT_A_CONCEPT = {
    "utils",
    "util",
    "common",
    "core",
    "base",
    "manager",
    "managers",
    "helper",
    "helpers",
    "misc",
}
LIBRARY = {"ray", "vllm", "torch", "deepspeed", "simpy", "plotly", "pandas", "numpy", "streamlit", "typer"}
COUNT = re.compile(r"^n_[a-z]|_count$|^count_of_")
OTHER_UNIT = re.compile(r"_(ms|us|ns|msec|millis|minutes|hours|kb|mb|gb|kib|mib|gib|tflops|gflops)$")


def tree(source: Path) -> ast.Module:
    return ast.parse(source.read_text(encoding="utf-8"))


def at(source: Path, line: int, name: str) -> str:
    return f"{source.relative_to(ROOT)}:{line} {name}"


def fields(node: ast.ClassDef) -> Iterator[tuple[int, str]]:
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.lineno, part.target.id


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    return ((path, node) for path in FILES for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef))


def test_there_is_code_to_look_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)


@pytest.mark.parametrize("name", ["RolloutManager", "BaseCost", "AbstractLink", "Simulator", "PoolFactory"])
def test_the_rule_refuses(name: str) -> None:
    assert CLASS.search(name)


@pytest.mark.parametrize("name", ["Scenario", "Baseline", "Pool", "RolloutWorker", "ExecutorFailed"])
def test_the_rule_allows(name: str) -> None:
    assert not CLASS.search(name)


def test_classes() -> None:
    assert [at(path, node.lineno, node.name) for path, node in classes() if CLASS.search(node.name)] == []


def test_files_are_named_after_concepts_not_after_libraries() -> None:
    parts = {path: {path.stem, *path.relative_to(ROOT).parent.parts} for path in FILES}
    assert [str(path) for path, names in parts.items() if names & (NOT_A_CONCEPT | LIBRARY)] == []


def test_counts_start_with_num() -> None:
    named = ((path, line, name) for path, node in classes() for line, name in fields(node))
    assert [at(*one) for one in named if COUNT.search(one[2])] == []


def test_fields_are_in_seconds_bytes_tokens_and_flops() -> None:
    named = ((path, line, name) for path, node in classes() for line, name in fields(node))
    assert [at(*one) for one in named if OTHER_UNIT.search(one[2])] == []
