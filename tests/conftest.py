"""What all tests share: an environment of their own, and ddpgen in one call."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import releases
from tests.releases import Release

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


Ddpgen = Callable[..., Result]


@pytest.fixture(autouse=True)
def hermetic(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Give every test an empty home and neutral settings of git and copier; return the home."""
    home = tmp_path_factory.mktemp("home")
    (home / "gitconfig").write_text("[user]\nname = Test\nemail = test@example.org\n")
    (home / "copier-settings.yml").write_text("{}\n")
    for name in list(os.environ):
        if name.startswith(("GIT_", "COPIER_", "DDPGEN_", "CUDA_")) or name in (
            "PYTHONSAFEPATH",
            "PYTHONUNBUFFERED",
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(home / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("COPIER_SETTINGS_PATH", str(home / "copier-settings.yml"))
    monkeypatch.setenv("COPIER_CACHE_DIR", str(home / "cache"))
    # Started processes find ddpgen without an installation too.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield home


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def ddpgen(cwd: Path, capfd: pytest.CaptureFixture[str]) -> Ddpgen:
    """Run ddpgen in this process, in an empty folder, without a terminal."""
    from ddpgen.cli import main

    def call(*argv: object) -> Result:
        capfd.readouterr()
        code = main([str(arg) for arg in argv])
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return call


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ddpgen believe that somebody sits at a terminal."""
    from ddpgen import new

    monkeypatch.setattr(new, "on_terminal", lambda: True)


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """A release 0.1.0: today's template."""
    return releases.first(tmp_path_factory.mktemp("one") / "ddpgen")


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory, one: Release) -> Release:
    """A release 0.2.0 after it."""
    return releases.second(tmp_path_factory.mktemp("two") / "ddpgen", one)


@pytest.fixture(scope="session")
def made_by_one(tmp_path_factory: pytest.TempPathFactory, one: Release) -> Path:
    """A project that 0.1.0 made, with workflows, in git. Tests take copies of it."""
    folder = tmp_path_factory.mktemp("made")
    one.ddpgen("new", "p", "--defaults", "--ci", cwd=folder, env={"HOME": str(folder)})
    return releases.keep(folder / "p", "Start")


@pytest.fixture
def p(made_by_one: Path, cwd: Path) -> Path:
    """A project of 0.1.0 in the working folder."""
    return Path(shutil.copytree(made_by_one, cwd / "p"))


def start(
    argv: Sequence[object], *, cwd: Path, env: Mapping[str, str] | None = None, code: str = ""
) -> subprocess.Popen[str]:
    """Start ddpgen as a process of its own.

    Args:
        argv: Arguments of ddpgen.
        cwd: Where it runs.
        env: Variables that differ from the test's own.
        code: Python to execute in it first.
    """
    program = f"import sys\n{code}\nfrom ddpgen.cli import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, argv)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def tree(folder: Path) -> list[str]:
    """List everything below a folder, hidden things too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def contents(folder: Path) -> dict[str, bytes]:
    """Read all files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
