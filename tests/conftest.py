"""What all tests share: an environment of their own, and ddpgen in one call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

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
