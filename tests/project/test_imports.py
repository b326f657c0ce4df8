"""Who may import whom, read from the source; and that importing stays light, tried in a fresh process."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "lab": {"lab"},
    "profiles": {"lab", "profiles"},
    "simulator": {"lab", "profiles", "simulator"},
    "executor": {"lab", "executor"},
}
PACKAGES = set(MAY_IMPORT)
WIRING = ("lab/cli/", "lab/ui/")
"""The folders of lab that wire the packages together, as app.py does."""
HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "streamlit")
SLOW_TO_IMPORT = ("pandas", "plotly", "scipy")


def imported(source: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import in a file, those inside functions included."""
    package = source.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            yield node.lineno, ".".join((*start, *([node.module] if node.module else [])))


def is_wiring(source: Path) -> bool:
    return source.relative_to(ROOT).as_posix().startswith(WIRING)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    broken = [
        f"{source.relative_to(ROOT)}:{line} imports {module}"
        for source in sources(package)
        if not is_wiring(source)
        for line, module in imported(source)
        if module.split(".")[0] in PACKAGES - MAY_IMPORT[package]
    ]
    assert sources(package)
    assert broken == []


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_nothing_imports_what_wires_the_packages(package: str) -> None:
    broken = [
        f"{source.relative_to(ROOT)}:{line} imports {module}"
        for source in sources(package)
        if not is_wiring(source)
        for line, module in imported(source)
        if module.split(".")[:2] in (["lab", "cli"], ["lab", "ui"], ["app"])
    ]
    assert broken == []


def test_the_simulator_never_imports_the_real_parts() -> None:
    """Not even inside a function: a prediction needs no engine."""
    broken = [
        f"{source.relative_to(ROOT)}:{line} imports {module}"
        for source in [*sources("simulator"), *(one for one in sources("lab") if not is_wiring(one))]
        for line, module in imported(source)
        if module.split(".")[0] in HEAVY
    ]
    assert broken == []


def test_the_walk_sees_imports_of_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    source = tmp_path / "simulator" / "studies" / "sweep.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        "import executor.run\nfrom executor import run\nfrom .. import world\n"
        "def f():\n    from ...executor.run import execute\n"
    )
    assert [module for _, module in imported(source)] == [
        "executor.run",
        "executor",
        "simulator",
        "executor.run",
    ]


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `statement`."""
    script = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in answer.stdout.splitlines()}


def test_importing_the_packages_loads_nothing_heavy() -> None:
    loaded = loaded_by("import lab, profiles, simulator")
    assert {"lab", "profiles", "simulator"} <= loaded
    assert loaded & {*HEAVY, *SLOW_TO_IMPORT} == set()


def test_importing_every_module_of_the_light_packages_loads_nothing_heavy() -> None:
    names = [
        ".".join(source.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in ("lab", "profiles", "simulator")
        for source in sources(package)
        if not is_wiring(source)
    ]
    assert loaded_by(f"import {', '.join(names)}") & set(HEAVY) == set()


def test_the_command_line_itself_loads_nothing_heavy() -> None:
    assert loaded_by("import lab.cli") & {*HEAVY, *SLOW_TO_IMPORT} == set()


def test_workers_stay_without_the_compiler() -> None:
    """vLLM's engine on a CPU does not start in a process that has llvmlite loaded, which numba needs."""
    loaded = loaded_by("import executor.rollout, executor.run, executor.trainer, executor.scoring, lab.load, lab.runs")
    assert "llvmlite" not in loaded


def test_the_driver_of_a_real_run_loads_no_library_of_its_workers() -> None:
    """Nor do the classes that it starts as workers, before they are `ready` in processes of their own."""
    driver = ("run", "limits", "resume", "records", "recheck", "rollout", "scoring", "trainer")
    loaded = loaded_by(f"import {', '.join(f'executor.{name}' for name in driver)}")
    assert loaded & {"torch", "vllm", "deepspeed", "transformers", "peft"} == set()
