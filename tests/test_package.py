"""What people install: the wheel, made from the sdist, in a clean environment."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ddpgen import __version__
from tests.projects import ROOT, files_of, make_project


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build sdist -> wheel."""
    folder = tmp_path_factory.mktemp("dist")
    built = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = folder.glob("*.whl")
    return file


@pytest.mark.slow
def test_the_archives_hold_the_whole_template(wheel: Path) -> None:
    template = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "template").rglob("*")
        if path.is_file() and not {"__pycache__", ".ruff_cache", ".mypy_cache"} & set(path.parts)
    }
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        in_sdist = {name.split("/", 1)[1] for name in archive.getnames() if "/template" in name}
    assert template <= in_sdist
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    in_wheel = {name.removeprefix("ddpgen/_template/") for name in names if "/_template/" in name}
    assert in_wheel == template | {"copier.yml"}


@pytest.mark.slow
def test_the_installed_wheel_writes_the_same_project(wheel: Path, tmp_path: Path) -> None:
    """From a clean virtual environment: also pip's byte-compiled templates must not come along."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin/pip"), "install", "-q", "--disable-pip-version-check", str(wheel)]
    installed = subprocess.run(pip, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    expected = make_project(tmp_path / "checkout" / "p")
    ddpgen = str(venv / "bin/ddpgen")
    (tmp_path / "wheel").mkdir()
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    version = subprocess.run([ddpgen, "--version"], capture_output=True, text=True, env=env)
    assert version.stdout.strip().endswith(__version__)
    written = subprocess.run(
        [ddpgen, "new", "p", "--defaults", "--yes"],
        cwd=tmp_path / "wheel", env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert written.returncode == 0, written.stderr
    project = tmp_path / "wheel" / "p"
    assert files_of(project) == files_of(expected)
    modes = [
        {p.relative_to(root): p.stat().st_mode for p in root.rglob("*")}
        for root in (project, expected)
    ]
    assert modes[0] == modes[1]
    packages = subprocess.run([str(venv / "bin/pip"), "list"], capture_output=True, text=True)
    assert "torch" not in packages.stdout
