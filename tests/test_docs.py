"""The table of failure cases names tests that exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.projects import ROOT

TABLE = (ROOT / "docs/failure_cases.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("| \n").split(" | ")]
    for line in TABLE.splitlines()
    if line.startswith("| ") and not line.startswith("| case ")
]
NO_TEST = ("by construction", "none")


def named_tests(cell: str) -> list[tuple[str, str, str]]:
    """Return whose tests a proof names: project or ddpgen, file, function."""
    found = []
    owner = ""
    for word, path, name in re.findall(r"(project|ddpgen):|`(tests/[^`]*)::([^`]*)`", cell):
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


def test_the_table_is_found() -> None:
    assert len(ROWS) > 55
    assert sum(len(named_tests(row[2])) for row in ROWS) > 60


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row_names_tests_that_exist(row: list[str]) -> None:
    """Or says that there is none."""
    assert len(row) == 3
    proof = row[2]
    named = named_tests(proof)
    assert len(named) == proof.count("::"), "write `tests/FILE.py::NAME`"
    assert named or proof.startswith(NO_TEST)
    for owner, path, name in named:
        assert owner
        assert name.startswith("test_")
        assert name in functions_of(owner, path), f"{path} has no {name}"


def test_what_does_not_hold_is_not_called_proven() -> None:
    for case, holds, proof in ROWS:
        if holds.startswith("not held"):
            assert proof.startswith("none"), case
