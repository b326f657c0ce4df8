"""The cache of compiled functions notices every edit."""

import importlib.util
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lab import compiled

ROOT = Path(__file__).parent.parent.parent
HOLDERS = sorted(
    path.relative_to(ROOT)
    for package in ("lab", "profiles", "simulator", "executor")
    for path in (ROOT / package).rglob("*.py")
    if re.search(r"^\s*from lab.compiled import .*(compiled|allocating)|^MARK = ", path.read_text(), re.MULTILINE)
)
"""files that hold compiled functions, and lab/compiled.py itself"""


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[], str]:
    """The name of the cache folder of a copy of these files."""
    for path in (*HOLDERS, Path("simulator/engine.py")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)

    def name() -> str:
        spec = importlib.util.spec_from_file_location("copied", tmp_path / "lab/compiled.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return str(module.cache_folder().name)

    return name


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "\n# another thought\n")


def test_the_copy_has_the_name_of_the_original(folder: Callable[[], str]) -> None:
    assert folder() == compiled.cache_folder.__wrapped__().name == folder()


@pytest.mark.parametrize("name", HOLDERS, ids=str)
def test_an_edit_of_any_file_with_compiled_functions_moves_the_cache(
    folder: Callable[[], str], tmp_path: Path, name: Path
) -> None:
    before = folder()
    edit(tmp_path / name)
    assert folder() != before


def test_other_edits_keep_it(folder: Callable[[], str], tmp_path: Path) -> None:
    before = folder()
    edit(tmp_path / "simulator/engine.py")
    (tmp_path / "simulator/new.py").write_text("x = 1\n")
    assert folder() == before


def test_a_new_file_with_compiled_functions_moves_it(folder: Callable[[], str], tmp_path: Path) -> None:
    before = folder()
    (tmp_path / "profiles/new.py").write_text(f"{compiled.MARK} compiled\n")
    assert folder() != before


def test_another_version_of_the_compiler_moves_it(folder: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = folder()
    monkeypatch.setattr("numba.__version__", "0.0")
    assert folder() != before


def test_the_cache_lies_where_the_labs_data_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAB_DATA_HOME", str(tmp_path))
    assert compiled.cache_folder.__wrapped__().parent == tmp_path / "numba"


def test_compiled_functions_are_found_again_on_disk() -> None:
    """What this run compiled or found is in the folder; the plain function stays at hand."""
    from profiles.interpolate import padded

    assert padded.py_func.__name__ == "padded"  # type: ignore[attr-defined]
    from numpy import zeros

    assert padded(zeros(0), 3.0) == 3.0
    assert any(path.name.startswith("interpolate.padded") for path in compiled.cache_folder().rglob("*.nbi"))
