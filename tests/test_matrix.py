"""What would be too long for a project's own tests, run in a project: see tests/in_project."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.projects import ROOT, make_project, package_of, run

# File -> the least number of tests in it. The matrix has 11 places to die x 3 worlds at least.
FILES = {"test_matrix.py": 33, "test_kills.py": 26}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", FILES)
def test_in_a_project(tmp_path: Path, name: str) -> None:
    project = make_project(tmp_path / "project")
    text = (ROOT / "tests/in_project" / name).read_text()
    (project / "tests" / name).write_text(text.replace("PACKAGE", package_of(project)))
    done = run(project, sys.executable, "-m", "pytest", "-q", f"tests/{name}", timeout_s=1400)
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-500:]
    assert int(passed[1]) >= FILES[name]
