"""What people install: the wheel, made from the sdist, in a clean environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ddpgen import __version__
from tests.projects import ROOT, files_of, make_project, run
from tests.releases import Release, git, keep, make_edits


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build sdist -> wheel."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def build(source: Path, folder: Path) -> Path:
    """Build sdist -> wheel of a checkout."""
    built = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = folder.glob("*.whl")
    return file


def pip(venv: Path, *words: object) -> None:
    """Run the pip of a virtual environment."""
    command = [str(venv / "bin/pip"), "-q", "--disable-pip-version-check", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
    pip(venv, "install", wheel)
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
    synced = subprocess.run([ddpgen, "sync"], capture_output=True, text=True, env=env)
    assert (synced.stdout, synced.stderr) == (f"v{__version__}\n", "")
    packages = subprocess.run([str(venv / "bin/pip"), "list"], capture_output=True, text=True)
    assert "torch" not in packages.stdout


def people(folder: Path, venv: Path) -> dict[str, str]:
    """Return the environment of somebody with a home, a virtual environment and no network."""
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    (home / ".gitconfig").write_text("[user]\nname = Somebody\nemail = somebody@example.org\n")
    return {
        "HOME": str(home),
        "PATH": f"{venv}/bin:/usr/bin:/bin",
        "GIT_ALLOW_PROTOCOL": "file",
        "no_proxy": "*",
    }


def offline(command: str, cwd: Path, env: dict[str, str]) -> str:
    """Run a command; without any network where the system lets us take it away."""
    alone = ["unshare", "--net", "--map-root-user"]
    can = subprocess.run([*alone, "true"], capture_output=True).returncode == 0
    shell = ["bash", "-euc", command]
    done = subprocess.run(
        [*alone, *shell] if can else shell, cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.slow
def test_from_one_installed_wheel_to_the_next(tmp_path: Path, one: Release, two: Release) -> None:
    """new with 0.1.0, edits, 0.2.0 installed: plain copier and ddpgen update give the same tree.

    A teammate with another home and virtual environment can do the same at once.
    """
    wheels = [build(release.root, tmp_path / release.root.parent.name) for release in (one, two)]
    venv, mates = tmp_path / "venv", tmp_path / "mates"
    for place in (venv, mates):
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    pip(venv, "install", wheels[0])
    me, mate = people(tmp_path / "me", venv), people(tmp_path / "mate", mates)
    offline("ddpgen new p --defaults --ci", tmp_path, me)
    p = tmp_path / "p"
    assert files_of(p) == files_of(make_project(tmp_path / "rendered" / "p", ci=True))
    offline("cd p; git init -q; git add -A; git commit -q -m Start", tmp_path, me)
    edits = make_edits(p)
    keep(p, "Mine")
    for name in ("q", "r", "s"):
        shutil.copytree(p, tmp_path / name / "p")
    pip(venv, "install", "--no-deps", wheels[1])
    assert offline("ddpgen sync", tmp_path, me) == "v0.2.0\n"
    assert "latest version is 0.2.0" in offline("copier check-update 2>&1", p, me)
    offline("copier update --defaults --quiet", p, me)
    offline("ddpgen update", tmp_path / "q/p", me)
    # The teammate's home has never seen a ddpgen.
    pip(mates, "install", wheels[1])
    offline("ddpgen update", tmp_path / "r/p", mate)
    offline("copier update --defaults --quiet", tmp_path / "s/p", mate)
    trees = [working_tree(place) for place in (p, *(tmp_path / n / "p" for n in "qrs"))]
    assert trees[1:] == trees[:1] * 3
    for name, text in edits.items():
        assert text in (p / name).read_text(), name
    assert "torch.set_grad_enabled(True)" in (p / "p/train.py").read_text()
    assert git(p, "status", "--short").splitlines() == [
        " M .copier-answers.yml", " M configs/train.yaml", " M launch/local.sh", " M p/config.py",
        " M p/train.py", " D tests/test_evaluation.py", "?? docs/",
    ]  # fmt: skip
    done = run(p, sys.executable, "-m", "pytest", "-q", timeout_s=500)
    assert done.returncode == 0, done.stdout[-3000:]


def working_tree(folder: Path) -> dict[str, bytes]:
    """Read a project without git's own files."""
    return {
        name: content
        for name, content in files_of(folder).items()
        if not name.startswith((".git/", "tests/__pycache__"))
    }
