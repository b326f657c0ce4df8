"""The shape of the repository: top level, package list, sizes of files and functions."""

from __future__ import annotations

import ast
import statistics
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lab", "profiles", "simulator", "executor")
TOP_LEVEL = {
    *PACKAGES, "app.py", "scenarios", "tests", "notebooks", "benchmarks", "docs", "requirements",
    "pyproject.toml", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LOG.md",
    "Makefile", ".ci", ".gitignore",
}  # fmt: skip
MUST_EXIST = {*PACKAGES, "app.py", "scenarios", "README.md", "ARCHITECTURE.md", "LOG.md", "Makefile", ".ci"}
MAX_LINES = 400
MAX_FUNCTION_LINES = 60


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def functions(source: Path) -> Iterator[tuple[str, int]]:
    """(name, number of lines below the signature and the docstring) of every function in a file."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            start = body[0].lineno if body else node.end_lineno
            yield (
                f"{source.relative_to(ROOT)}:{node.lineno} {node.name}",
                (node.end_lineno or 0) - (start or 0) + 1,
            )


def tracked() -> set[str]:
    """Names at the top level that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if answer.returncode:
        pytest.skip(f"not a git checkout: {answer.stderr.strip()}")
    return {line.split("/")[0] for line in answer.stdout.splitlines()}


def test_nothing_unexpected_at_the_top_level() -> None:
    assert tracked() - TOP_LEVEL == set()
    assert MUST_EXIST - tracked() == set()


def test_pyproject_lists_every_package_on_disk() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    found = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in python_files(*PACKAGES)}
    assert sorted(listed) == sorted(found)


def test_every_folder_of_code_is_a_package() -> None:
    without = {path.parent for path in python_files(*PACKAGES)} - {
        path.parent for path in python_files(*PACKAGES) if path.name == "__init__.py"
    }
    assert without == set()


def test_tests_are_no_packages() -> None:
    assert [path for path in python_files("tests") if path.name == "__init__.py"] == []


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(*PACKAGES, "tests")}
    assert {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_functions_are_short() -> None:
    lengths = dict(pair for source in python_files(*PACKAGES) for pair in functions(source))
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}
    assert statistics.median(lengths.values()) < 10


def test_scenarios_come_with_their_schema() -> None:
    assert (ROOT / "scenarios" / "scenario.schema.json").is_file()
    assert (ROOT / "scenarios" / "quickstart.yaml").is_file()


def test_notebooks_are_stored_without_outputs() -> None:
    import nbformat

    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    with_output = [
        path.name
        for path in notebooks
        if any(cell.get("outputs") or cell.get("execution_count") for cell in nbformat.read(path, as_version=4).cells)
    ]
    assert notebooks
    assert with_output == []
