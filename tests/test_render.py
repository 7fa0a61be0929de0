"""Every combination of answers renders files that are clean in their own language."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.projects import (
    asked,
    combinations,
    digest,
    every_pair,
    files_of,
    make_project,
    package_of,
)

NAMES = {
    "short": {"project_name": "a", "package_name": "a"},
    "long": {"project_name": "A" * 60, "package_name": "p" * 40},
}
SWITCHES: dict[str, list[Any]] = {
    "starter": ["vision", "text"],
    "precision": ["fp32", "bf16", "fp16"],
    "sync_batchnorm": [False, True],
    "checkpoint": ["epoch", "steps", "none"],
    "save_best": [False, True],
    "tracker": ["none", "tensorboard", "wandb", "mlflow"],
    "ci": [False, True],
}
# They fill whole files and meet no other answer but the numbers.
LAUNCHERS = [(), ("ssh", "slurm"), ("kubernetes", "kubeflow")]
NUMBERS: dict[str, int] = {"nodes": 100000, "gpus_per_node": 1024, "micro_batch_size": 1000000}


ALL = combinations(SWITCHES)
FEW = every_pair(SWITCHES)


class Checked:
    """Contents that were found clean. Most files are equal in all combinations."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.python: dict[str, bytes] = {}

    def check(self, path: str, content: bytes, package: str) -> None:
        """Parse a file as what it is; keep Python files for the formatter and the linter."""
        if digest(path.encode() + content) in self.seen:
            return
        self.seen.add(digest(path.encode() + content))
        text = content.decode("utf-8")
        where = f"{path}:\n{text}"
        assert "\r" not in text, where
        assert text == "" or text.endswith("\n"), where
        allowed = r"\$\{\{.*?\}\}" if path.startswith(".github/") else r"(?!)"
        assert not re.search(r"\{\{|\{%|%\}|\{##", re.sub(allowed, "", text)) or (
            path.endswith(".py") and not re.search(r"\{\{ |\{% ", text)
        ), where
        if path.endswith(".py"):
            ast.parse(text)
            self.python[path.replace(package, "package", 1)] = content
        elif path.endswith((".yaml", ".yml")):
            assert all(isinstance(document, dict) for document in yaml.safe_load_all(text)), where
        elif path.endswith(".toml"):
            importlib.import_module("tomllib").loads(text)  # Python 3.11
        elif path.endswith((".sh", ".sbatch")):
            shell_is_clean(text)


def shell_is_clean(text: str) -> None:
    """Let bash and shellcheck read a script."""
    for command in (["bash", "-n"], [shellcheck(), "-"]):
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{text}"


def shellcheck() -> str:
    """Return the shellcheck of the test environment."""
    return str(Path(sys.executable).with_name("shellcheck"))


def check_combinations(tmp_path: Path, answers_list: list[dict[str, Any]], names: str) -> None:
    """Render and check; then format and lint all different Python files together."""
    checked = Checked()
    for number, answers in enumerate(answers_list):
        others: dict[str, Any] = {"launchers": LAUNCHERS[number % 3]}
        others |= NUMBERS if number % 2 else {}
        project = make_project(tmp_path / f"p{number}", **NAMES[names], **others, **asked(answers))
        package = package_of(project)
        assert package == NAMES[names]["package_name"]
        for path, content in files_of(project).items():
            checked.check(path, content, package)
        if number == 0:
            black_and_ruff_are_clean(project)
            continue
        variants = tmp_path / f"p{number}"
        for file in [*variants.rglob("*.py")]:
            original = tmp_path / "p0" / file.relative_to(variants)
            if original.exists() and original.read_bytes() == file.read_bytes():
                file.unlink()
        if any(variants.rglob("*.py")):
            black_and_ruff_are_clean(project)


def black_and_ruff_are_clean(project: Path) -> None:
    """Check with the project's own settings."""
    for tool in (["black", "--check", "--diff", "-q", "."], ["ruff", "check", "--no-cache", "."]):
        done = subprocess.run(
            [sys.executable, "-m", *tool], cwd=project, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("names", ["short", "long"])
def test_some_combinations_are_clean(tmp_path: Path, names: str) -> None:
    check_combinations(tmp_path, FEW, names)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_all_combinations_are_clean(tmp_path: Path, part: int) -> None:
    check_combinations(tmp_path, ALL[part::4], ["short", "long"][part % 2])


def test_every_answer_reaches_the_settings_file(tmp_path: Path) -> None:
    """A question whose answer changes nothing would be a lie."""
    answers = {
        "micro_batch_size": 7, "accumulation_steps": 3, "precision": "bf16",
        "sync_batchnorm": True, "checkpoint": "steps", "save_every_steps": 11,
        "keep_checkpoints": 5, "save_best": False, "tracker": "mlflow",
    }  # fmt: skip
    project = make_project(tmp_path / "p", **answers, nodes=3, gpus_per_node=5)
    written = yaml.safe_load((project / "configs/train.yaml").read_text())
    assert {name: written[name] for name in answers} == answers
    assert '"${NODES:-3}"' in (project / "launch/node.sh").read_text()
    assert '"${PROCESSES:-5}"' in (project / "launch/node.sh").read_text()
    assert "gpus : 5))" in (project / "launch/local.sh").read_text()
