"""What docs/ says is proven is proven by tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.projects import ROOT

TABLES = [ROOT / f"docs/{name}.md" for name in ("invariants", "failure_cases", "updates")]
CASES = [
    [cell.strip() for cell in line.strip("| \n").split(" | ")]
    for line in (ROOT / "docs/failure_cases.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| case ")
]
NO_TEST = ("by construction", "none")


def named_tests(text: str) -> list[tuple[str, str, str]]:
    """Return whose tests a text names: project or ddpgen, file, function."""
    found = []
    owner = ""
    for word, path, name in re.findall(r"(project|ddpgen):|`(tests/[^`]*)::([^`]*)`", text):
        owner = word or owner
        if path:
            found.append((owner, path, name))
    return found


def functions_of(owner: str, path: str) -> set[str]:
    """Return the names of the functions in a test file, wherever it is kept."""
    folder = ROOT / "template" if owner == "project" else ROOT
    (file,) = [folder / name for name in (path, f"{path}.jinja") if (folder / name).is_file()]
    # Some files of the template hold the name of the package in braces.
    text = re.sub(r"\{\{ *\w+ *\}\}", "package", file.read_text())
    return {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_every_named_test_exists(table: Path) -> None:
    named = named_tests(table.read_text())
    assert len(named) > 10
    for owner, path, name in named:
        assert name.startswith("test_")
        assert name in functions_of(owner, path), f"{table.name}: {path} has no {name}"


def test_the_failure_cases_are_found() -> None:
    assert len(CASES) > 55
    assert sum(len(named_tests(row[2])) for row in CASES) > 60


@pytest.mark.parametrize("row", CASES, ids=lambda row: row[0])
def test_every_failure_case_is_answered(row: list[str]) -> None:
    """By tests, or by a reason why there is none; what does not hold is not called proven."""
    assert len(row) == 3
    _, holds, proof = row
    assert len(named_tests(proof)) == proof.count("::"), "write `tests/FILE.py::NAME`"
    assert named_tests(proof) or proof.startswith(NO_TEST)
    if holds.startswith("not held"):
        assert proof.startswith("none")
