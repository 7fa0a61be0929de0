"""Two whole projects, file by file: a change of the template shows as the diff that a user gets.

After a wanted change: make snapshots
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

import pytest

from tests.projects import make_project

SNAPSHOTS = Path(__file__).parent / "snapshots"
PROJECTS: dict[str, dict[str, Any]] = {
    "default": {},
    "fullest": {
        "project_name": "Fullest of all", "starter": "text", "nodes": 2, "gpus_per_node": 8,
        "micro_batch_size": 16, "accumulation_steps": 4, "precision": "bf16",
        "checkpoint": "steps", "save_every_steps": 100, "keep_checkpoints": 2,
        "tracker": "tensorboard", "ci": True,
        "launchers": ["ssh", "slurm", "kubernetes", "kubeflow"],
    },
}  # fmt: skip


def as_text(project: Path) -> str:
    """Return all files with their paths and whether they can be started."""
    parts = []
    for path in sorted(p for p in project.rglob("*") if p.is_file()):
        starts = " (executable)" if path.stat().st_mode & 0o100 else ""
        parts.append(f"==== {path.relative_to(project).as_posix()}{starts}\n{path.read_text()}")
    return "".join(parts)


@pytest.mark.parametrize("name", PROJECTS)
def test_the_project_is_as_it_was(tmp_path: Path, name: str) -> None:
    text = as_text(make_project(tmp_path / name, **PROJECTS[name]))
    file = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        file.write_text(text)
    old = file.read_text()
    diff = difflib.unified_diff(
        old.splitlines(), text.splitlines(), "snapshot", "now", lineterm="", n=1
    )
    assert old == text, "make snapshots, if this is wanted:\n" + "\n".join(list(diff)[:80])
