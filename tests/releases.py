"""Releases for tests: this checkout as 0.1.0, and a 0.2.0 that differs from it as releases do.

The edits are made in a copy of today's template, so that the tests outlive its changes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests import release
from tests.projects import ROOT

PARTS = ("ddpgen", "template", "tests", "copier.yml", "pyproject.toml", "README.md", "LICENSE")
IDENTITY = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
KNOB = '''    log_first_step: bool = False
    """Write the metrics of the first step too."""

'''


@dataclass(frozen=True)
class Release:
    """A checkout of ddpgen of some version."""

    root: Path

    def ddpgen(
        self, *argv: object, cwd: Path, code: int = 0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run its ddpgen without network and without a terminal; check the exit code."""
        done = subprocess.run(
            [sys.executable, "-m", "ddpgen", *map(str, argv)],
            cwd=cwd,
            env={**offline(), "PYTHONPATH": str(self.root), **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done


def offline() -> dict[str, str]:
    """Return an environment in which git reaches no other machine."""
    return {**os.environ, "GIT_ALLOW_PROTOCOL": "file", "PYTHONDONTWRITEBYTECODE": "1"}


def first(folder: Path) -> Release:
    """Make 0.1.0: this checkout, frozen."""
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(
                source, folder / part, ignore=shutil.ignore_patterns("__pycache__", "v*.fi")
            )
        else:
            shutil.copy(source, folder / part)
    set_version(folder, "0.1.0")
    (folder / "tests/history.txt").write_text("")
    release.freeze(folder)
    return Release(folder)


def second(folder: Path, before: Release) -> Release:
    """Make 0.2.0 from 0.1.0.

    A fix in the loop, a new knob, a changed script, a new file in a new folder, a removed file, a
    renamed question, and changes of the files that are the user's.
    """
    shutil.copytree(before.root, folder, ignore=shutil.ignore_patterns("__pycache__"))
    set_version(folder, "0.2.0")
    template = folder / "template"
    package = template / "{{ package_name }}"
    edit(package / "train.py", into_function("train_step", "    torch.set_grad_enabled(True)\n"))
    edit(package / "config.py", before_line(r"    def __post_init__\b.*", KNOB))
    edit(
        template / "configs/train.yaml.jinja",
        before_line("# Checkpoints and logs", "log_first_step: false\n\n"),
    )
    edit(
        template / "launch/local.sh.jinja",
        before_line(r"exec torchrun .*", "# Since 0.2.0: one more line.\n"),
    )
    (template / "docs").mkdir()
    (template / "docs/changes.md.jinja").write_text("# What is new in {{ project_name }}\n")
    (template / "tests/test_evaluation.py.jinja").unlink()
    for path in template.glob("*is_*/*.py"):
        edit(path, lambda text: f"{text}\n# Since 0.2.0: another line.\n")
    rename_question(folder, "tracker", "experiment_tracker")
    release.freeze(folder)
    return Release(folder)


def set_version(folder: Path, version: str) -> None:
    """Set the version of a checkout."""
    path = folder / "ddpgen/__init__.py"
    path.write_text(re.sub(r'__version__ = ".+"', f'__version__ = "{version}"', path.read_text()))


def edit(path: Path, change: Callable[[str], str]) -> None:
    """Change a file; it must really change."""
    old = path.read_text()
    new = change(old)
    assert new != old, path
    path.write_text(new)


def before_line(pattern: str, added: str) -> Callable[[str], str]:
    """Put lines before the first line that matches."""
    return lambda text: re.sub(rf"(?m)^(?={pattern}$)", lambda _: added, text, count=1)


def into_function(name: str, added: str) -> Callable[[str], str]:
    """Put lines before the last `return` of a function."""

    def change(text: str) -> str:
        start = text.index(f"def {name}(")
        end = text.find("\ndef ", start)
        place = text.rindex("\n    return ", start, end) + 1
        return text[:place] + added + text[place:]

    return change


def rename_question(folder: Path, old: str, new: str) -> None:
    """Rename a question as a release does: the new one takes the old answer as its default."""
    edit(
        folder / "copier.yml",
        lambda text: re.sub(
            rf"(?ms)^{old}:\n(.*?)^  default: (\w+)\n",
            rf"{new}:\n\1  default: '{{{{ {old} | default(''\2'') }}}}'\n",
            text,
        ),
    )
    for path in (folder / "template").rglob("*.jinja"):
        text = path.read_text()
        path.write_text(
            re.sub(
                r"\{\{.*?\}\}|\{%.*?%\}",
                lambda found: re.sub(rf"\b{old}\b", new, found[0]),
                text,
            )
        )


def git(folder: Path, *words: object, **env: str) -> str:
    """Run git as a person would, with the settings of the tests."""
    command = ["git", *IDENTITY, *map(str, words)]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def keep(folder: Path, message: str = "A change") -> Path:
    """Commit all that is in a project."""
    if not (folder / ".git").exists():
        git(folder, "init", "-q", "--template=")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return folder


def copier_update(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run plain `copier update`."""
    return subprocess.run(
        [sys.executable, "-m", "copier", "update", "--defaults", "--quiet", *options],
        cwd=project,
        env=offline(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


MINE = 'def mine() -> int:\n    """Mine."""\n    return 1\n'


def make_edits(project: Path) -> dict[str, str]:
    """Edit every file that invites it, as people do; return a text of each by its path."""
    package = project.name
    edit(project / package / "train.py", lambda text: f"{text}\n\n{MINE}")
    edit(project / package / "model.py", lambda text: f"{text}\n\n{MINE}")
    edit(project / package / "data.py", lambda text: f"{text}\n\n{MINE}")
    settings = project / "configs/train.yaml"
    edit(settings, lambda text: re.sub(r"(?m)^epochs: .*$", "epochs: 7", text))
    edit(settings, lambda text: re.sub(r"(?m)^learning_rate: .*$", "learning_rate: 0.01", text))
    edit(settings, lambda text: re.sub(r"(?m)^log_every_steps: .*$", "log_every_steps: 3", text))
    edit(
        project / "launch/local.sh",
        before_line(r"CONFIG=.*", "export MINE=1\n"),
    )
    edit(project / "launch/node.sh", lambda text: text.replace("29500", "29555"))
    edit(project / "README.md", lambda text: f"{text}\n## Mine\n")
    toml = project / "pyproject.toml"
    edit(toml, lambda text: re.sub(r"(?m)^version = .*$", 'version = "7.0"', text))
    edit(toml, lambda text: re.sub(r"(?m)^    # Your own$", '    # Your own\n    "einops",', text))
    edit(project / ".gitignore", lambda text: f"{text}/mine/\n")
    workflow = project / ".github/workflows/tests.yml"
    edit(workflow, lambda text: re.sub(r"timeout-minutes: \d+", "timeout-minutes: 77", text))
    (project / "tests/test_mine.py").write_text('"""Mine."""\n')
    (project / "notes").mkdir()
    (project / "notes/mine.bin").write_bytes(b"\0\1\r\n\xff")
    return {
        f"{package}/train.py": MINE,
        f"{package}/model.py": MINE,
        f"{package}/data.py": MINE,
        "configs/train.yaml": "\nlearning_rate: 0.01\n",
        "launch/local.sh": "\nexport MINE=1\n",
        "launch/node.sh": "29555",
        "README.md": "\n## Mine\n",
        "pyproject.toml": '"einops"',
        ".gitignore": "/mine/\n",
        ".github/workflows/tests.yml": "timeout-minutes: 77",
        "tests/test_mine.py": "Mine",
    }
