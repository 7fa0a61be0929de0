"""What docs/ says is proven is proven by tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.projects import ROOT

TABLES = sorted((ROOT / "docs").glob("*.md"))
NAME = re.compile(r"(project: |ddpgen: |, )?`(tests/[\w/]+\.py)::(\w+)`")


def functions(file: Path) -> set[str]:
    """Return the names of the functions of a file of tests; package names may be Jinja."""
    text = re.sub(r"\{\{ ?package_name ?\}\}", "package", file.read_text())
    return {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}


def named_tests(table: Path) -> list[tuple[str, str, str]]:
    """Return where (project or ddpgen), file and name of each test that a table names."""
    found, where = [], ""
    for mark, file, name in NAME.findall(table.read_text()):
        where = mark.strip(": ,") or where
        found.append((where, file, name))
    return found


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_every_named_test_exists(table: Path) -> None:
    names = named_tests(table)
    assert len(names) > 10
    for where, file, name in names:
        home = ROOT / "template" if where == "project" else ROOT
        path = next((p for p in (home / file, home / f"{file}.jinja") if p.exists()), None)
        assert path, f"{table.name} names {where}: {file}"
        assert name in functions(path), f"{table.name} names {where}: {file}::{name}"
