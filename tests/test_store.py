"""The template's history: one bundle, the same everywhere, whole at any moment."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ddpgen import __version__, generate, store
from ddpgen.errors import UserError, show
from ddpgen.questions import template_root

from . import release
from .conftest import ROOT, Ddpgen, contents, start, tree
from .releases import Release, copier_update, edit, git, keep, offline, set_version

BUNDLE = ".ddpgen/template.bundle"
OWN = f"v{__version__}"


def refs(home: Path) -> dict[str, str]:
    """Let git itself list what is in a bundle."""
    listed = git(home, "ls-remote", home / BUNDLE)
    return {name: hash_ for hash_, name in (line.split("\t") for line in listed.splitlines())}


def tags(home: Path) -> dict[str, str]:
    return {
        name.removeprefix("refs/tags/"): hash_
        for name, hash_ in refs(home).items()
        if name.startswith("refs/tags/")
    }


def is_whole(home: Path) -> bool:
    """Tell whether all of a bundle can be fetched."""
    with_git = ["git", "clone", "--quiet", "--mirror", str(home / BUNDLE), str(home / "clone")]
    done = subprocess.run(with_git, capture_output=True)
    shutil.rmtree(home / "clone", ignore_errors=True)
    return done.returncode == 0


def test_sync_prints_the_version_and_nothing_else(ddpgen: Ddpgen, hermetic: Path) -> None:
    result = ddpgen("sync")
    assert (result.code, result.out, result.err) == (0, f"{OWN}\n", "")
    assert sorted(os.listdir(hermetic / ".ddpgen")) == ["lock", "template.bundle"]
    assert set(tags(hermetic)) == {*store.history(), OWN}
    assert refs(hermetic)["HEAD"] == tags(hermetic)[OWN]


def test_a_second_sync_changes_nothing_and_starts_nothing(ddpgen: Ddpgen, hermetic: Path) -> None:
    ddpgen("sync")
    before = (hermetic / BUNDLE).stat()
    process = start(["sync"], cwd=hermetic, env={"PATH": ""})
    assert process.communicate() == (f"{OWN}\n", "")
    after = (hermetic / BUNDLE).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize(
    "env",
    [
        {"GIT_DEFAULT_HASH": "sha256", "GIT_AUTHOR_DATE": "2020-01-01", "TZ": "Asia/Tokyo"},
        {"GIT_DIR": "/nonexistent", "GIT_INDEX_FILE": "/nonexistent", "LANG": "de_DE.UTF-8"},
        {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.autocrlf", "GIT_CONFIG_VALUE_0": "1"},
    ],
)
def test_the_commits_are_the_same_whatever_is_set(
    ddpgen: Ddpgen, hermetic: Path, tmp_path: Path, env: dict[str, str]
) -> None:
    """Git's settings and variables, the time zone and the umask reach nothing."""
    ddpgen("sync")
    (tmp_path / "gitconfig").write_text("[broken")
    other = {"HOME": str(tmp_path), "GIT_CONFIG_GLOBAL": str(tmp_path / "gitconfig"), **env}
    before = os.umask(0o077)
    try:
        process = start(["sync"], cwd=tmp_path, env=other)
        assert process.communicate()[0] == f"{OWN}\n"
    finally:
        os.umask(before)
    assert refs(tmp_path) == refs(hermetic)


def test_wheels_and_other_systems_give_the_same_commits(tmp_path: Path) -> None:
    """No modes, CRLF, compiled files and those of tools: as pip and other systems leave them."""
    odd = tmp_path / "odd"
    shutil.copytree(ROOT / "template", odd / "template")
    shutil.copy(ROOT / "copier.yml", odd)
    for path in odd.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
            path.chmod(0o444)
    for name in ("__pycache__/a.pyc", ".ruff_cache/x", ".DS_Store", "tests/b.pyc"):
        (odd / "template" / name).parent.mkdir(exist_ok=True)
        (odd / "template" / name).write_bytes(b"\0")
    (odd / "copier.yml").chmod(0o644)
    assert store.template_files(odd) == store.template_files(ROOT)
    assert "template/launch/local.sh.jinja" in store.template_files(odd)


def test_what_git_tracks_is_what_is_versioned() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    tracked = git(ROOT, "ls-files", "-z", "template", "copier.yml").split("\0")
    there = {name for name in tracked if name and (ROOT / name).exists()}
    assert there <= set(store.template_files(ROOT))


def test_versions_are_in_order() -> None:
    names = ["v0.1.0", "v0.1.0.post3", "v0.1.0.post1764", "v0.1.1", "v0.2.0", "v0.10.0", "v1.0.0"]
    assert sorted(names[3:] + names[:3], key=store.version) == names


# More than one version


def test_both_versions_stay_whichever_syncs_last(
    one: Release, two: Release, hermetic: Path, tmp_path: Path
) -> None:
    assert one.ddpgen("sync", cwd=tmp_path).stdout == "v0.1.0\n"
    first = tags(hermetic)
    assert two.ddpgen("sync", cwd=tmp_path).stdout == "v0.2.0\n"
    both = tags(hermetic)
    assert set(both) == {"v0.1.0", "v0.2.0"}
    assert both["v0.1.0"] == first["v0.1.0"]
    assert one.ddpgen("sync", cwd=tmp_path).stdout == "v0.1.0\n"
    assert tags(hermetic) == both
    assert refs(hermetic)["HEAD"] == both["v0.2.0"]


def test_a_new_release_brings_all_older_ones(two: Release, hermetic: Path, tmp_path: Path) -> None:
    """The frozen pieces give the commits that history.txt names."""
    two.ddpgen("sync", cwd=tmp_path)
    pins = dict(line.split() for line in (two.root / "tests/history.txt").read_text().splitlines())
    assert tags(hermetic) == pins
    assert set(pins) == {"v0.1.0", "v0.2.0"}


def test_a_template_renders_from_the_bundle_as_from_the_checkout(ddpgen: Ddpgen, cwd: Path) -> None:
    """Dot files and modes included."""
    assert ddpgen("new", "p", "--defaults", "--ci").code == 0
    template = store.export(store.sync(), OWN, cwd / "template")
    (cwd / "q").mkdir()
    shutil.copy(cwd / "p/.copier-answers.yml", cwd / "q")
    generate.render_again(template, cwd / "q", {})
    generate.record(cwd / "q/.copier-answers.yml", _src_path=store.SOURCE, _commit=OWN)
    ours, theirs = contents(cwd / "p"), contents(cwd / "q")
    assert ours == theirs
    modes = [
        {path.relative_to(root): path.stat().st_mode for path in root.rglob("*") if path.is_file()}
        for root in (cwd / "p", cwd / "q")
    ]
    assert modes[0] == modes[1]


@pytest.mark.slow
def test_eight_at_the_same_time(one: Release, two: Release, hermetic: Path, tmp_path: Path) -> None:
    """Eight concurrent syncs of two versions leave one good bundle, with both."""
    for _ in range(3):
        shutil.rmtree(hermetic / ".ddpgen", ignore_errors=True)
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "ddpgen", "sync"],
                cwd=tmp_path,
                env={**offline(), "PYTHONPATH": str((one, two)[number % 2].root)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(8)
        ]
        ended = [(process.communicate(timeout=60), process.returncode) for process in processes]
        assert ended == [((f"v0.{1 + number % 2}.0\n", ""), 0) for number in range(8)]
        assert set(tags(hermetic)) == {"v0.1.0", "v0.2.0"}
        assert is_whole(hermetic)
        assert sorted(os.listdir(hermetic / ".ddpgen")) == ["lock", "template.bundle"]


KILL = """
import os, signal, subprocess
from ddpgen import git, store
left = [{number}]
def count():
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
def counted(function):
    def call(*args, **kwargs):
        count()
        result = function(*args, **kwargs)
        count()
        return result
    return call
git._run = counted(git._run)
for name in ("replace", "fsync"):
    setattr(os, name, counted(getattr(os, name)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", ["nothing", "the old one"])
def test_a_kill_at_any_point_leaves_the_old_or_the_new_one(
    one: Release, two: Release, hermetic: Path, tmp_path: Path, before: str
) -> None:
    """The next sync works, and clears up what was left."""
    if before == "the old one":
        one.ddpgen("sync", cwd=tmp_path)
        kept = (hermetic / BUNDLE).read_bytes()
    seen = set()
    for number in range(1, 99):
        shutil.rmtree(hermetic / ".ddpgen", ignore_errors=True)
        if before == "the old one":
            (hermetic / ".ddpgen").mkdir()
            (hermetic / BUNDLE).write_bytes(kept)
        process = start(
            ["sync"],
            cwd=tmp_path,
            env={"PYTHONPATH": str(two.root)},
            code=KILL.format(number=number),
        )
        process.communicate(timeout=60)
        found = frozenset(tags(hermetic)) if (hermetic / BUNDLE).exists() else None
        seen.add(found)
        assert found is None or is_whole(hermetic)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        assert two.ddpgen("sync", cwd=tmp_path).stdout == "v0.2.0\n"
        assert sorted(os.listdir(hermetic / ".ddpgen")) == ["lock", "template.bundle"]
    assert number > 15
    new = frozenset({"v0.1.0", "v0.2.0"})
    assert seen == {new, None if before == "nothing" else frozenset({"v0.1.0"})}


@pytest.mark.parametrize("how", ["cut", "changed", "no bundle"])
def test_a_damaged_bundle_is_made_anew(ddpgen: Ddpgen, hermetic: Path, how: str) -> None:
    ddpgen("sync")
    good = tags(hermetic)
    content = (hermetic / BUNDLE).read_bytes()
    middle = len(content) // 2
    damaged = {
        "cut": content[:middle],
        "changed": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "no bundle": b"hello\n",
    }
    (hermetic / BUNDLE).write_bytes(damaged[how])
    result = ddpgen("sync")
    assert (result.code, result.out) == (0, f"{OWN}\n")
    assert result.err == f"Note: {show(hermetic / BUNDLE)} was damaged and is made anew.\n"
    assert tags(hermetic) == good
    assert is_whole(hermetic)


def test_ctrl_c_leaves_no_temporary_files(ddpgen: Ddpgen, hermetic: Path) -> None:
    code = (
        "import os, signal\nfrom ddpgen import store\n"
        "def stop(*_): os.kill(os.getpid(), signal.SIGINT)\n"
        "store._fetch_missing = stop\n"
    )
    process = start(["sync"], cwd=hermetic, code=code)
    assert process.communicate()[1] == "\nddpgen: interrupted.\n"
    assert (process.returncode, os.listdir(hermetic / ".ddpgen")) == (130, ["lock"])


# Homes


@pytest.mark.parametrize(
    ("home", "reason"),
    [
        ("", "The template's history is kept in ~/.ddpgen/template.bundle."),
        ("/nonexistent", "The template's history is kept in ~/.ddpgen/template.bundle."),
        ("/dev/null", "The template's history is kept in ~/.ddpgen/template.bundle."),
        ("/proc", "The system says: "),
    ],
)
def test_a_home_that_cannot_be_written(
    ddpgen: Ddpgen, monkeypatch: pytest.MonkeyPatch, home: str, reason: str
) -> None:
    """Read-only or missing home: a clear message, and a way out that works."""
    monkeypatch.setenv("HOME", home)
    result = ddpgen("sync")
    assert (result.code, result.out) == (1, "")
    assert reason in result.err
    assert result.err.splitlines()[2].startswith("Type: export DDPGEN_HOME=FOLDER")
    assert len(result.err.splitlines()) == 3


def test_another_place_for_the_bundle(
    ddpgen: Ddpgen, monkeypatch: pytest.MonkeyPatch, hermetic: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("DDPGEN_HOME", str(tmp_path / "deep/er"))
    assert ddpgen("sync").out == f"{OWN}\n"
    assert sorted(os.listdir(tmp_path / "deep/er")) == ["lock", "template.bundle"]
    assert not (hermetic / ".ddpgen").exists()


def test_a_file_where_the_folder_must_be(ddpgen: Ddpgen, hermetic: Path) -> None:
    (hermetic / ".ddpgen").write_text("mine")
    result = ddpgen("sync")
    assert result.code == 1
    assert "The system says: Not a directory." in result.err
    assert (hermetic / ".ddpgen").read_text() == "mine"


def test_a_home_that_may_only_be_read_but_has_it(ddpgen: Ddpgen, hermetic: Path) -> None:
    if os.geteuid() == 0:
        ddpgen("sync")
        # Root may write anywhere: that nothing is opened for writing is what can be seen here.
        (hermetic / ".ddpgen/lock").unlink()
        assert ddpgen("sync").code == 0
        assert os.listdir(hermetic / ".ddpgen") == ["template.bundle"]


# A template that is not released yet, or was edited


def copy_of(release_: Release, folder: Path) -> Release:
    shutil.copytree(release_.root, folder)
    return Release(folder)


@pytest.mark.slow
def test_an_edited_checkout_is_a_post_release(one: Release, hermetic: Path, tmp_path: Path) -> None:
    """Every state is a version of its own; what was made from one can be updated to the next."""
    checkout = copy_of(one, tmp_path / "checkout")
    one.ddpgen("sync", cwd=tmp_path)
    readme = checkout.root / "template/README.md.jinja"
    edit(readme, lambda text: text + "\nFirst edit.\n")
    first = checkout.ddpgen("sync", cwd=tmp_path).stdout.strip()
    assert first.startswith("v0.1.0.post")
    assert checkout.ddpgen("sync", cwd=tmp_path).stdout.strip() == first
    checkout.ddpgen("new", "p", "--defaults", cwd=tmp_path)
    keep(tmp_path / "p")
    assert f"_commit: {first}\n" in (tmp_path / "p/.copier-answers.yml").read_text()
    edit(readme, lambda text: text.replace("First", "Second"))
    second = checkout.ddpgen("sync", cwd=tmp_path).stdout.strip()
    assert store.version(second) > store.version(first)
    assert copier_update(tmp_path / "p").returncode == 0
    assert "Second edit." in (tmp_path / "p/README.md").read_text()
    # The release itself has not moved, and the first edit, taken up again, is what it was.
    edit(readme, lambda text: text.replace("Second", "First"))
    assert checkout.ddpgen("sync", cwd=tmp_path).stdout.strip() == first
    assert one.ddpgen("sync", cwd=tmp_path).stdout == "v0.1.0\n"
    assert set(tags(hermetic)) == {"v0.1.0", first, second}


@pytest.mark.slow
def test_a_version_before_its_release(one: Release, hermetic: Path, tmp_path: Path) -> None:
    """Today's template is the present version; when it changes, nothing that was made is lost."""
    checkout = copy_of(one, tmp_path / "checkout")
    (checkout.root / "ddpgen/history/v0.1.0.fi").unlink()
    assert checkout.ddpgen("sync", cwd=tmp_path).stdout == "v0.1.0\n"
    before = tags(hermetic)
    edit(checkout.root / "template/README.md.jinja", lambda text: text + "\nMore.\n")
    tag = checkout.ddpgen("sync", cwd=tmp_path).stdout.strip()
    assert tag.startswith("v0.1.0.post")
    assert {**tags(hermetic), tag: ""} == {**before, tag: ""}
    # When it is released, the release has its name, on every machine.
    (checkout.root / "tests/history.txt").write_text("")
    line = release.freeze(checkout.root)
    assert checkout.ddpgen("sync", cwd=tmp_path).stdout == "v0.1.0\n"
    assert f"v0.1.0 {tags(hermetic)['v0.1.0']}" == line


def test_an_unreleased_version_leaves_a_release_of_its_name_alone(
    one: Release, hermetic: Path, tmp_path: Path
) -> None:
    one.ddpgen("sync", cwd=tmp_path)
    released = tags(hermetic)["v0.1.0"]
    checkout = copy_of(one, tmp_path / "checkout")
    (checkout.root / "ddpgen/history/v0.1.0.fi").unlink()
    edit(checkout.root / "template/README.md.jinja", lambda text: text + "\nMore.\n")
    assert checkout.ddpgen("sync", cwd=tmp_path).stdout.startswith("v0.1.0.post")
    assert tags(hermetic)["v0.1.0"] == released


# Releases


def pinned(root: Path) -> dict[str, str]:
    lines = (root / "tests/history.txt").read_text().splitlines()
    return dict(line.split() for line in lines if not line.startswith("#"))


def test_frozen_releases_never_change(tmp_path: Path) -> None:
    """Every release has its piece and its pin, and gives the commit that it always gave."""
    frozen = store.history()
    store.load(tmp_path / "repository", frozen)
    made = {tag: git(tmp_path / "repository", "rev-parse", tag).strip() for tag in frozen}
    assert made == pinned(ROOT)


def test_the_template_is_that_of_its_release(tmp_path: Path) -> None:
    """If this fails: the template has changed since the release; the version must change too."""
    frozen = store.history()
    if OWN not in frozen:
        assert all(store.version(tag) < store.version(OWN) for tag in frozen)
        return
    store.load(tmp_path / "repository", frozen)
    names = git(tmp_path / "repository", "ls-tree", "-r", "-z", "--name-only", OWN).split("\0")
    released = {
        name: subprocess.run(
            ["git", "show", f"{OWN}:{name}"], cwd=tmp_path / "repository", capture_output=True
        ).stdout
        for name in names
        if name
    }
    assert released == store.template_files(template_root())


def test_a_release_is_frozen_once(one: Release, tmp_path: Path) -> None:
    checkout = copy_of(one, tmp_path / "checkout")
    before = contents(checkout.root / "ddpgen/history")
    with pytest.raises(SystemExit, match=r"v0\.1\.0 is not newer than v0\.1\.0, which is frozen"):
        release.freeze(checkout.root)
    set_version(checkout.root, "0.0.9")
    with pytest.raises(SystemExit, match="is not newer"):
        release.freeze(checkout.root)
    assert contents(checkout.root / "ddpgen/history") == before


def test_a_release_holds_what_has_changed(two: Release) -> None:
    """A piece after the first is small, and gives the whole template all the same."""
    first, second = release.frozen(two.root).values()
    assert len(second) < len(first) / 2
    assert b"\nD template/tests/test_evaluation.py.jinja\n" in second


# The template's URL


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/team/ddpgen.git",
        "git+https://example.org/team/ddpgen",
        "git@example.org:team/ddpgen.git",
        "ssh://git@example.org/team/ddpgen.git",
        "git+ssh://git@example.org/team/ddpgen",
        "gh:team/ddpgen",
    ],
)
def test_a_url_for_teams_is_recorded(ddpgen: Ddpgen, cwd: Path, url: str) -> None:
    assert ddpgen("new", "p", "--defaults", "--template-url", url).code == 0
    assert generate.read_record(cwd / "p")["_src_path"] == url


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("../template", "A path"),
        ("/abs/template.git", "A path"),
        ("~/template", "A path"),
        ("", "A path"),
        ("https://example.org/a b.git", "A path"),
        ("https://example.org/x\n.git", "A path"),
        ("https://example.org/team/ddpgen", "copier takes only"),
        ("https://me:secret@example.org/team/ddpgen.git", "It holds a password"),
    ],
)
def test_urls_that_are_refused(ddpgen: Ddpgen, cwd: Path, url: str, why: str) -> None:
    result = ddpgen("new", "p", "--defaults", "--template-url", url)
    assert (result.code, result.out, tree(cwd)) == (1, "", [])
    assert result.err.startswith("ddpgen: --template-url ")
    assert result.err.splitlines()[1].startswith(why)


def test_errors_name_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be kept in"):
        store.sync(tmp_path / "file/store")
    assert stat.S_ISREG((tmp_path / "file").stat().st_mode)
