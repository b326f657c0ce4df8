"""The documents are true: what they link to exists, and the commands and files that they name do too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), ROOT / "requirements" / "README.md"])
TREE = re.compile(r"`((?:lab|profiles|simulator|executor|scenarios|tests|requirements|notebooks)/[\w./-]+)`")


def text(document: Path) -> str:
    return document.read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text(document))
    local = [link for link in links if not link.startswith(("http://", "https://"))]
    assert [link for link in local if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document: Path) -> None:
    assert [name for name in TREE.findall(text(document)) if not (ROOT / name).exists()] == []


def test_the_readme_names_exactly_the_commands_that_exist() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", "from lab.cli import app; app()", "--help"],
        cwd=ROOT, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin", "COLUMNS": "200"},
    )  # fmt: skip
    exist = set(re.findall(r"^[│\s]*([a-z]+(?:-[a-z]+)*)  +[A-Z]", answer.stdout, flags=re.MULTILINE))
    rows = [line for line in text(ROOT / "README.md").splitlines() if line.startswith("| `lab ")]
    named = {name for row in rows for name in re.findall(r"`lab ([a-z-]+)", row.split("|")[1])}
    assert exist == named


def test_the_readme_names_exactly_the_scenarios_that_exist() -> None:
    named = set(re.findall(r"^\| `(scenarios/[\w-]+\.yaml)`", text(ROOT / "README.md"), flags=re.MULTILINE))
    assert named == {path.relative_to(ROOT).as_posix() for path in (ROOT / "scenarios").glob("*.yaml")}
