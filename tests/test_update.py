"""Updates: what people wrote stays, what the template fixed arrives, and all can be undone."""

from __future__ import annotations

import fnmatch
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpgen import generate, questions, update

from .conftest import Ddpgen, start
from .releases import (
    Release,
    before_line,
    copier_update,
    edit,
    git,
    keep,
    make_edits,
    offline,
    set_version,
)
from .test_safety import python_for

ANSWERS = ".copier-answers.yml"


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Read all of a project but git's own files: modes, contents, links and empty folders."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if name.parts[0] != ".git":
            is_file = path.is_file() and not path.is_symlink()
            content = path.read_bytes() if is_file else os.fsencode(os.path.realpath(path))
            found[name.as_posix()] = (path.lstat().st_mode, content if is_file else b"")
    return found


def undo(result: subprocess.CompletedProcess[str], folder: Path) -> None:
    """Paste the command that takes an update back."""
    command = result.stdout.splitlines()[-1]
    assert " checkout -q HEAD -- ." in command
    subprocess.run(["bash", "-ec", command], cwd=folder, check=True)


def unmerged(folder: Path) -> str:
    return git(folder, "ls-files", "--unmerged")


# From one release to the next


def test_an_update_and_plain_copier_give_the_same_tree(two: Release, p: Path, cwd: Path) -> None:
    """Edits in train.py, data.py, model.py, a launch script and more; the template's changes."""
    edits = make_edits(p)
    keep(p)
    before = tree(p)
    q = Path(shutil.copytree(p, cwd / "q" / "p"))
    result = two.ddpgen("update", "p", cwd=cwd)
    # Plain copier needs one ddpgen command, and that was it.
    plain = copier_update(q)
    assert (plain.returncode, plain.stdout) == (0, ""), plain.stderr
    assert tree(p) == tree(q)
    assert git(p, "status", "--short") == git(q, "status", "--short")
    for name, text in edits.items():
        assert text in (p / name).read_text(), name
    assert "torch.set_grad_enabled(True)" in (p / "p/train.py").read_text()
    assert "log_first_step" in (p / "p/config.py").read_text()
    assert "# Since 0.2.0: one more line." in (p / "launch/local.sh").read_text()
    assert (p / "docs/changes.md").read_text() == "# What is new in p\n"
    assert not (p / "tests/test_evaluation.py").exists()
    for name in ("p/model.py", "p/data.py", "notes/mine.bin"):
        assert tree(p)[name] == before[name]
    assert result.stderr == ""
    assert result.stdout == (
        "p, template v0.1.0 -> v0.2.0:\n"
        "  changed   .copier-answers.yml\n"
        "  changed   configs/train.yaml\n"
        "  new       docs/changes.md\n"
        "  changed   launch/local.sh\n"
        "  changed   p/config.py\n"
        "  changed   p/train.py\n"
        "  removed   tests/test_evaluation.py\n"
        "  answer    experiment_tracker = none (new)\n"
        "  answer    tracker = none (not asked any more)\n"
        "\n"
        "To see it, and to take all of it back:\n"
        "  git -C p diff\n"
        "  git -C p checkout -q HEAD -- . && git -C p clean -fdqx -- docs\n"
    )
    undo(result, cwd)
    assert tree(p) == before
    assert git(p, "status", "--short") == ""


@pytest.mark.slow
def test_a_renamed_question_keeps_its_answer(two: Release, p: Path, cwd: Path) -> None:
    two.ddpgen("set", "tracker=wandb", "p", cwd=cwd)
    keep(p)
    two.ddpgen("update", "p", cwd=cwd)
    assert generate.read_project_answers(p)["experiment_tracker"] == "wandb"
    assert "\ntracker: wandb\n" in (p / "configs/train.yaml").read_text()


def test_an_update_with_other_answers(two: Release, p: Path, cwd: Path) -> None:
    """Keys are those of the new template."""
    refused = two.ddpgen("update", "p", "--set", "tracker=wandb", cwd=cwd, code=1)
    assert refused.stderr.startswith("ddpgen: tracker is no question.\n")
    assert refused.stderr.endswith("Did you mean experiment_tracker?\n")
    options = ("--set", "experiment_tracker=wandb", "--set", "nodes=3")
    result = two.ddpgen("update", "p", *options, cwd=cwd)
    assert "  answer    nodes = 3 (was 1)\n" in result.stdout
    assert generate.read_project_answers(p)["nodes"] == 3
    assert "\ntracker: wandb\n" in (p / "configs/train.yaml").read_text()


@pytest.mark.slow
def test_an_update_without_anything_new(two: Release, p: Path, cwd: Path) -> None:
    two.ddpgen("update", "p", cwd=cwd)
    keep(p)
    before = tree(p)
    result = two.ddpgen("update", cwd=p)
    assert result.stdout == "p has the template v0.2.0 and these answers. Nothing to change.\n"
    assert tree(p) == before
    assert copier_update(p).returncode == 0
    assert tree(p) == before


@pytest.mark.slow
def test_deleted_files_stay_deleted_and_own_files_stay(two: Release, p: Path, cwd: Path) -> None:
    """Deleted or user-owned files come back: they do not."""
    for name in ("launch/local.sh", "p/data.py", "p/probe.py", "configs/debug.yaml"):
        (p / name).unlink()
    (p / "p/model.py").write_text("# all mine\n")
    (p / "docs").mkdir()
    (p / "docs/mine.md").write_text("mine\n")
    keep(p)
    result = two.ddpgen("update", "p", cwd=cwd)
    for name in ("launch/local.sh", "p/data.py", "p/probe.py", "configs/debug.yaml"):
        assert not (p / name).exists(), name
    assert (p / "p/model.py").read_text() == "# all mine\n"
    assert (p / "docs/mine.md").read_text() == "mine\n"
    assert (p / "docs/changes.md").exists()
    # docs was there before: only the new file in it is taken back.
    assert result.stdout.endswith("git -C p clean -fdqx -- docs/changes.md\n")


def test_an_edited_file_that_the_template_removed_is_named(
    two: Release, p: Path, cwd: Path
) -> None:
    edit(p / "tests/test_evaluation.py", lambda text: text + "\n# mine\n")
    mine = (p / "tests/test_evaluation.py").read_bytes()
    keep(p)
    result = two.ddpgen("update", "p", cwd=cwd)
    assert not (p / "tests/test_evaluation.py").exists()
    lines = result.stdout.splitlines()
    place = lines.index("Nothing is left of your edits in these files. To have one as it was:")
    assert lines[place + 1] == "  git -C p checkout HEAD -- tests/test_evaluation.py"
    subprocess.run(["bash", "-ec", lines[place + 1]], cwd=cwd, check=True, capture_output=True)
    assert (p / "tests/test_evaluation.py").read_bytes() == mine


@pytest.mark.slow
def test_a_removed_file_that_nobody_edited_needs_no_word(two: Release, p: Path, cwd: Path) -> None:
    assert "your edits" not in two.ddpgen("update", "p", cwd=cwd).stdout


# Conflicts


@pytest.fixture
def conflict(p: Path) -> Path:
    """A project whose owner has changed the line that an answer changes."""
    edit(p / "configs/train.yaml", lambda text: text.replace("precision: fp32", "precision: fp16"))
    return keep(p)


def test_a_conflict_is_an_error_that_names_the_file(
    one: Release, conflict: Path, cwd: Path
) -> None:
    before = tree(conflict)
    result = one.ddpgen("set", "precision=bf16", "p", cwd=cwd, code=1)
    assert result.stderr.endswith(
        "ddpgen: A conflict is left in configs/train.yaml.\n"
        "You and the template changed the same lines. Both stand there, between <<<<<<< and "
        ">>>>>>>.\n"
        "Type: git -C p add configs/train.yaml, after choosing; or the last command above, to take "
        "all of it back\n"
    )
    assert "  conflict  configs/train.yaml\n" in result.stdout
    text = (conflict / "configs/train.yaml").read_text()
    assert re.search(r"<<<<<<< .*\nprecision: fp16\n=======\nprecision: bf16\n>>>>>>> ", text)
    # git does not commit it by accident.
    commit = subprocess.run(["git", "commit", "-m", "x"], cwd=conflict, capture_output=True)
    assert commit.returncode != 0
    assert git(conflict, "status", "--short").splitlines() == [
        " M .copier-answers.yml", "UU configs/train.yaml",
    ]  # fmt: skip
    undo(result, cwd)
    assert tree(conflict) == before
    assert git(conflict, "status", "--short") == ""


@pytest.mark.slow
def test_a_conflict_is_that_of_plain_copier(one: Release, conflict: Path, cwd: Path) -> None:
    q = Path(shutil.copytree(conflict, cwd / "q" / "p"))
    one.ddpgen("set", "precision=bf16", "p", cwd=cwd, code=1)
    assert copier_update(q, "--data", "precision=bf16").returncode == 0
    assert tree(conflict) == tree(q)
    assert unmerged(conflict) == unmerged(q) != ""


@pytest.mark.slow
def test_a_solved_conflict_can_be_committed(one: Release, conflict: Path, cwd: Path) -> None:
    one.ddpgen("set", "precision=bf16", "p", cwd=cwd, code=1)
    again = one.ddpgen("update", "p", cwd=cwd, code=1)
    assert "changes that are not committed: " in again.stderr
    text = (conflict / "configs/train.yaml").read_text()
    text = re.sub(r"<<<<<<<.*\n.*\n=======\n(.*\n)>>>>>>>.*\n", r"\1", text)
    (conflict / "configs/train.yaml").write_text(text)
    keep(conflict)
    assert "Nothing to change" in one.ddpgen("update", "p", cwd=cwd).stdout


SETTINGS = {
    "untracked files are not shown": "[status]\nshowUntrackedFiles = no\n",
    "commits are signed": "[commit]\ngpgsign = true\n[user]\nsigningkey = none\n",
    "a hook fails": "[core]\nhooksPath = {hooks}\n",
    "line ends are changed": "[core]\nautocrlf = true\nsafecrlf = true\n",
    "a watching program": "[core]\nfsmonitor = {hooks}/pre-commit\n",
    "an odd first branch": "[init]\ndefaultBranch = x/y\ntemplateDir = {hooks}\n",
    "other diffs": "[diff]\nnoprefix = true\nexternal = false\n[merge]\nconflictStyle = zdiff3\n",
    "no modes": "[core]\nfileMode = false\n",
    "aliases and colors": "[color]\nui = always\n[status]\nshort = true\nbranch = true\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_git_settings_of_the_user_change_nothing(
    one: Release, conflict: Path, cwd: Path, hermetic: Path, name: str
) -> None:
    """Git identity, signing, hooks: an update is the same, and so is its conflict."""
    q = Path(shutil.copytree(conflict, cwd / "q" / "p"))
    expected = one.ddpgen("set", "precision=bf16", "tracker=wandb", "p", cwd=cwd / "q", code=1)
    hooks = hermetic / "hooks"
    hooks.mkdir()
    for hook in ("pre-commit", "post-checkout", "post-index-change", "reference-transaction"):
        (hooks / hook).write_text(f"#!/bin/sh\ntouch {hermetic}/PWNED\nexit 1\n")
        (hooks / hook).chmod(0o755)
    # The second is where git looks when nobody names another place.
    for config in ("gitconfig", ".gitconfig"):
        (hermetic / config).write_text(SETTINGS[name].replace("{hooks}", str(hooks)))
    result = one.ddpgen("set", "precision=bf16", "tracker=wandb", "p", cwd=cwd, code=1)
    assert (result.stdout, result.stderr) == (expected.stdout, expected.stderr)
    assert tree(conflict) == tree(q)
    assert not (hermetic / "PWNED").exists()
    for config in ("gitconfig", ".gitconfig"):
        (hermetic / config).write_text("")
    assert unmerged(conflict) == unmerged(q) != ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [
        {"GIT_DIR": "/nonexistent", "GIT_WORK_TREE": "/nonexistent"},
        {"GIT_INDEX_FILE": "/nonexistent/index", "GIT_OBJECT_DIRECTORY": "/nonexistent"},
        {"GIT_AUTHOR_DATE": "nonsense", "GIT_EXTERNAL_DIFF": "false", "GIT_PAGER": "false"},
        {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "status.showUntrackedFiles",
         "GIT_CONFIG_VALUE_0": "no"},
        {"COPIER_SETTINGS_PATH": "/nonexistent", "LC_ALL": "C", "PYTHONWARNINGS": "error"},
    ],
)  # fmt: skip
def test_variables_of_git_and_copier_change_nothing(
    one: Release, conflict: Path, cwd: Path, env: dict[str, str]
) -> None:
    """As in a hook of git's, where some of them are set."""
    one.ddpgen("set", "precision=bf16", "p", cwd=cwd, code=1, env=env)
    assert unmerged(conflict) != ""


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["", "defaults: {experiment_tracker: mlflow}\n", "[broken"])
def test_copier_settings_of_the_user_change_nothing(
    two: Release, p: Path, cwd: Path, hermetic: Path, settings: str
) -> None:
    (hermetic / "copier-settings.yml").write_text(settings)
    two.ddpgen("update", "p", cwd=cwd)
    assert generate.read_project_answers(p)["experiment_tracker"] == "none"


# Dry runs


@pytest.mark.slow
def test_a_dry_run_shows_the_diff_and_changes_nothing(two: Release, p: Path, cwd: Path) -> None:
    make_edits(p)
    keep(p)
    before = tree(p)
    commands = (["update", "p", "--dry-run"], ["set", "precision=bf16", "p", "--dry-run"])
    for words in commands:
        result = two.ddpgen(*words, cwd=cwd)
        assert result.stderr.endswith("\nNothing was changed.\n")
        assert tree(p) == before
        assert git(p, "status", "--short") == ""
        # The diff is what git can apply.
        applied = Path(shutil.copytree(p, cwd / words[0] / "p"))
        patch = cwd / words[0] / "patch"
        patch.write_text(result.stdout)
        git(applied, "apply", patch)
        two.ddpgen(*words[:-1], cwd=cwd)
        assert tree(applied) == tree(p)
        git(p, "reset", "-q", "--hard")
        git(p, "clean", "-fdq")


# What is refused


def refused(result: subprocess.CompletedProcess[str], what: str, why: str, fix: str) -> None:
    assert (result.returncode, result.stdout) == (1, "")
    lines = result.stderr.splitlines()
    assert len(lines) == 3, result.stderr
    assert lines[0].startswith(f"ddpgen: {what}"), result.stderr
    assert lines[1].startswith(why), result.stderr
    assert lines[2].startswith(fix), result.stderr


def nothing(project_: Path) -> None:
    """Change nothing."""


def no_git(project_: Path) -> None:
    shutil.rmtree(project_ / ".git")


def no_commit(project_: Path) -> None:
    no_git(project_)
    git(project_, "init", "-q")


def a_change(project_: Path) -> None:
    edit(project_ / "README.md", lambda text: text + "x\n")


def a_staged_change(project_: Path) -> None:
    a_change(project_)
    git(project_, "add", "-A")


def a_new_file(project_: Path) -> None:
    (project_ / "new.txt").write_text("x")
    git(project_, "config", "status.showUntrackedFiles", "no")


def no_answers(project_: Path) -> None:
    (project_ / ANSWERS).unlink()
    keep(project_)


def answers(text: str) -> Callable[[Path], None]:
    def write(project_: Path) -> None:
        (project_ / ANSWERS).write_text(text)
        keep(project_)

    return write


def replaced(old: str, by: str) -> Callable[[Path], None]:
    def write(project_: Path) -> None:
        edit(project_ / ANSWERS, lambda text: re.sub(f"(?m)^{old}$", by, text))
        keep(project_)

    return write


def ignored_answers(project_: Path) -> None:
    git(project_, "rm", "-q", "--cached", ANSWERS)
    (project_ / ".gitignore").write_text(f"{ANSWERS}\n")
    keep(project_)


PRECONDITIONS: dict[str, tuple[Callable[[Path], None], str, str, str]] = {
    "not a repository": (no_git, "p is not in a git repository.", "An update is merged by git",
                         "Type: git -C p init && git -C p add -A && git -C p commit -m Start"),
    "nothing committed": (no_commit, "p has changes that are not committed: ", "They could not",
                          "Type: git -C p add -A && git -C p commit -m Before, or git -C p stash"),
    "a change": (a_change, "p has changes that are not committed: README.md.", "They could not",
                 "Type: git -C p add -A && git -C p commit -m Before, or git -C p stash -u"),
    "a staged change": (a_staged_change, "p has changes that are not committed: README.md.",
                        "They could", "Type: git -C p add"),
    "a new file that is not shown": (a_new_file, "p has changes that are not committed: new.txt.",
                                     "They could not", "Type: git -C p add -A"),
    "no answers file": (no_answers, "p is no project of ddpgen.", f"There is no {ANSWERS}",
                        "Type: ddpgen update PATH, with the folder of a project; "),
    "an answers file that is none": (answers("hello\n"), "", "It holds no answers.",
                                     f"Type: git checkout HEAD -- {ANSWERS}"),
    "a broken answers file": (answers("[broken\n"), "", "while parsing",
                              f"Type: git checkout HEAD -- {ANSWERS}"),
    "binary answers": (answers("\x00\x01"), "", "", f"Type: git checkout HEAD -- {ANSWERS}"),
    "another template": (answers("_commit: v1.0\n_src_path: gh:a/b\nname: x\n"),
                         "p is no project of ddpgen.",
                         f"{ANSWERS} belongs to another template: gh:a/b.",
                         "Type: ddpgen update PATH"),
    "an odd version": (replaced("_commit: .*", "_commit: 794993b"),
                       "The template's version in ", "An update needs to know",
                       f"Type: git log -p {ANSWERS}"),
    "a version that nobody knows": (replaced("_commit: .*", "_commit: v0.1.0.post17"),
                                    "The template v0.1.0.post17, from which p was made, is not "
                                    "known here.", "", "Type: ddpgen sync"),
    "a newer version": (replaced("_commit: .*", "_commit: v0.9.0"),
                        "p has the template v0.9.0, which is newer than this ddpgen's: v0.2.0.",
                        "An older ddpgen cannot know it.",
                        "Type: python -m pip install --upgrade ddpgen"),
    "an ignored answers file": (ignored_answers, f"git does not keep {ANSWERS} of p.", "What git",
                                "Type: git -C p add --force"),
    "another package by hand": (replaced("package_name: .*", "package_name: other"),
                                "p has no folder other.", f"{ANSWERS} names it as the package.",
                                "Type: git -C p log"),
}  # fmt: skip


@pytest.mark.parametrize("case", PRECONDITIONS)
def test_preconditions(two: Release, p: Path, cwd: Path, case: str) -> None:
    """Update preconditions: one clear reason each, and nothing has changed."""
    prepare, what, why, fix = PRECONDITIONS[case]
    prepare(p)
    before = tree(p)
    status = git(p, "status", "--short") if (p / ".git").exists() else ""
    refused(two.ddpgen("update", "p", cwd=cwd, code=1), what, why, fix)
    if case not in ("a version that nobody knows", "a newer version"):
        fix = fix.replace("ddpgen update PATH", "ddpgen set KEY=VALUE PATH")
        refused(two.ddpgen("set", "nodes=2", "p", cwd=cwd, code=1), what, why, fix)
    assert tree(p) == before
    assert (git(p, "status", "--short") if (p / ".git").exists() else "") == status


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("nonexistent", "nonexistent is no folder."),
        ("p/README.md", "p/README.md is no folder."),
        (".", ". is no project of ddpgen."),
    ],
)
def test_paths_that_are_no_project(two: Release, p: Path, cwd: Path, path: str, what: str) -> None:
    result = two.ddpgen("update", path, cwd=cwd, code=1)
    assert result.stderr.startswith(f"ddpgen: {what}\n")


@pytest.mark.slow
def test_an_older_ddpgen_says_so(one: Release, two: Release, p: Path, cwd: Path) -> None:
    """Also where the bundle has the newer version: what this ddpgen asks is of its own."""
    two.ddpgen("update", "p", cwd=cwd)
    keep(p)
    before = tree(p)
    for words in (["update", "p"], ["set", "nodes=2", "p"]):
        refused(
            one.ddpgen(*words, cwd=cwd, code=1),
            "p has the template v0.2.0, which is newer than this ddpgen's: v0.1.0.",
            "An older ddpgen cannot know it.",
            "Type: python -m pip install --upgrade ddpgen",
        )
    assert tree(p) == before


def test_without_git(two: Release, p: Path, cwd: Path) -> None:
    """git absent: a clear reason. A program of that name in the working folder is not started."""
    (cwd / "git").write_text("#!/bin/sh\ntouch PWNED\n")
    (cwd / "git").chmod(0o755)
    for path in ("", ".", "/nonexistent"):
        refused(
            two.ddpgen("update", "p", cwd=cwd, code=1, env={"PATH": path}),
            "git is not found.",
            "Updates are merged with it",
            "Type: the command again when git is installed",
        )
    assert not (cwd / "PWNED").exists()


@pytest.mark.slow
def test_a_project_of_another_user(two: Release, p: Path, cwd: Path) -> None:
    """git refuses it, and says how to trust it; that works."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a project away")
    for path in (p, p / ".git"):
        os.chown(path, pwd.getpwnam("nobody").pw_uid, -1)
    result = two.ddpgen("update", "p", cwd=cwd, code=1)
    refused(
        result,
        "git does not trust p: it belongs to another user.",
        "Settings in it",
        f"Type: git config --global --add safe.directory {p}, if you trust it",
    )
    git(cwd, "config", "--global", "--add", "safe.directory", p)
    two.ddpgen("update", "p", cwd=cwd)


SETTLED = {
    "package_name=other": "package_name = other is not possible any more: it is p.",
    "starter=text": "starter = text is not possible any more: it is vision.",
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTLED)
def test_what_is_settled_cannot_change(two: Release, p: Path, cwd: Path, setting: str) -> None:
    for words in (["update", "p", "--set", setting], ["set", setting, "p"]):
        result = two.ddpgen(*words, cwd=cwd, code=1)
        assert result.stderr.startswith(f"ddpgen: {SETTLED[setting]}\n")
    same = setting.split("=")[0] + "=" + ("p" if "package" in setting else "vision")
    assert "Nothing to change" in two.ddpgen("set", same, "p", cwd=cwd).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("nmae=x", "nmae is no question."),
        ("is_vision=true", "is_vision cannot be set."),
        ("precision=fp8", "precision = fp8 is not possible."),
        ("nodes=0", "nodes = 0 is not possible."),
        ("nodes=two", "nodes = two is not possible."),
        ("project_name={{ 7*7 }}", "project_name = {{ 7*7 }} is not possible."),
        ("save_every_steps=7", "save_every_steps = 7 has no meaning here."),
    ],
)
def test_answers_that_are_refused(
    one: Release, p: Path, cwd: Path, setting: str, message: str
) -> None:
    before = tree(p)
    for words in (["update", "p", "--set", setting], ["set", setting, "p"]):
        result = one.ddpgen(*words, cwd=cwd, code=1)
        assert result.stderr.startswith(f"ddpgen: {message}\n"), result.stderr
        assert len(result.stderr.splitlines()) == 3
    assert tree(p) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["set"], "KEY=VALUE... [PATH] is missing."),
        (["set", "p"], "KEY=VALUE is missing."),
        (["update", "p", "q"], "Got unexpected extra argument (q)"),
    ],
)
def test_wrong_usage(ddpgen: Ddpgen, words: list[str], message: str) -> None:
    result = ddpgen(*words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"ddpgen: {message}")
    assert len(result.err.splitlines()) == 3


# Other places and people


@pytest.mark.slow
def test_another_machine(two: Release, p: Path, cwd: Path, tmp_path: Path) -> None:
    """Template path in the answers file: moved, another home, from a subfolder; then plain copier.

    The folder of the first release is not needed, nor is the bundle of the first home.
    """
    elsewhere = tmp_path / "else where" / "it's"
    elsewhere.parent.mkdir()
    p.rename(elsewhere)
    home = tmp_path / "home"
    home.mkdir()
    env = {"HOME": str(home), "GIT_CONFIG_GLOBAL": os.devnull}
    text = (elsewhere / ANSWERS).read_text()
    assert "_src_path: ~/.ddpgen/template.bundle\n" in text
    q = Path(shutil.copytree(elsewhere, tmp_path / "q"))
    result = two.ddpgen("update", "configs", cwd=elsewhere, env=env)
    assert "_src_path: ~/.ddpgen/template.bundle\n" in (elsewhere / ANSWERS).read_text()
    assert "_commit: v0.2.0\n" in (elsewhere / ANSWERS).read_text()
    for name, content in tree(elsewhere).items():
        assert not any(str(x).encode() in content[1] for x in (home, tmp_path, cwd)), name
    plain = subprocess.run(
        [sys.executable, "-m", "copier", "update", "--defaults", "--quiet"],
        cwd=q, env={**offline(), **env}, capture_output=True, text=True,
    )  # fmt: skip
    assert plain.returncode == 0, plain.stderr
    assert tree(q) == tree(elsewhere)
    undo(result, elsewhere)
    assert git(elsewhere, "status", "--short") == ""


@pytest.mark.slow
def test_no_home_is_needed(two: Release, p: Path, cwd: Path) -> None:
    """Read-only or missing home: an update goes on without, and says so."""
    for home in ("/nonexistent", "", "/proc"):
        result = two.ddpgen("update", "p", cwd=cwd, env={"HOME": home, "XDG_CONFIG_HOME": home})
        assert result.stderr.startswith("Note: "), result.stderr
        assert result.stderr.endswith("This update goes on without.\n")
        assert len(result.stderr.splitlines()) == 1
        assert "p/train.py" in result.stdout
        undo(result, cwd)
    assert not Path("/nonexistent").exists()
    assert not Path("/.ddpgen").exists()


@pytest.mark.slow
def test_nobody_without_a_home_updates(two: Release, p: Path) -> None:
    """As in a container: another user, no home, only the project may be written, ddpgen not."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    user = pwd.getpwnam("nobody")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.chmod(0o755)
        shutil.copytree(two.root, place / "ddpgen")
        shutil.copytree(p, place / "p")
        for path in [place / "p", *(place / "p").rglob("*")]:
            os.chown(path, user.pw_uid, user.pw_gid)
        libraries = f"{place}/ddpgen:{sysconfig.get_path('purelib')}"
        env = {**offline(), "HOME": "/nonexistent", "PYTHONPATH": libraries}
        env |= {"GIT_CONFIG_GLOBAL": os.devnull, "COPIER_SETTINGS_PATH": ""}
        python = python_for(user, env)
        if python is None:
            pytest.skip("nobody may start no Python that finds ddpgen's libraries")
        done = subprocess.run(
            [python, "-m", "ddpgen", "update", place / "p"],
            user=user.pw_uid, group=user.pw_gid, extra_groups=[], cwd="/", env=env,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert (place / "p/docs/changes.md").stat().st_uid == user.pw_uid
        assert "torch.set_grad_enabled(True)" in (place / "p/p/train.py").read_text()


@pytest.mark.slow
def test_a_part_of_a_larger_repository(two: Release, p: Path, cwd: Path) -> None:
    """Nested in a bigger repo: only the project's part must be clean, and only that is undone."""
    mono = cwd / "mono"
    (mono / "parts").mkdir(parents=True)
    shutil.rmtree(p / ".git")
    p.rename(mono / "parts/p")
    edits = make_edits(mono / "parts/p")
    (mono / "other.txt").write_text("old\n")
    keep(mono)
    before = tree(mono / "parts")
    (mono / "other.txt").write_text("not committed\n")
    (mono / "new.txt").write_text("not committed\n")
    result = two.ddpgen("update", "mono/parts/p", cwd=cwd)
    for name, text in edits.items():
        assert text in (mono / "parts/p" / name).read_text(), name
    assert (mono / "parts/p/docs/changes.md").exists()
    undo(result, cwd)
    assert tree(mono / "parts") == before
    assert (mono / "other.txt").read_text() == (mono / "new.txt").read_text() == "not committed\n"
    # A conflict is noted at the right place.
    edit(
        mono / "parts/p/configs/train.yaml",
        lambda text: text.replace("precision: fp32", "precision: fp16"),
    )
    keep(mono)
    two.ddpgen("set", "precision=bf16", cwd=mono / "parts/p", code=1)
    assert "UU parts/p/configs/train.yaml\n" in git(mono, "status", "--short")


@pytest.mark.slow
def test_a_worktree(two: Release, p: Path, cwd: Path) -> None:
    git(p, "worktree", "add", "-q", cwd / "tree" / "p")
    result = two.ddpgen("update", "tree/p", cwd=cwd)
    assert "torch.set_grad_enabled(True)" in (cwd / "tree/p/p/train.py").read_text()
    undo(result, cwd)
    assert git(cwd / "tree/p", "status", "--short") == git(p, "status", "--short") == ""


@pytest.mark.slow
def test_a_url_for_teams_works_offline(one: Release, two: Release, cwd: Path) -> None:
    """The project names a public repository; ddpgen's own update needs no network for it."""
    url = "git+https://example.org/team/ddpgen"
    one.ddpgen("new", "t", "--defaults", "--template-url", url, cwd=cwd)
    keep(cwd / "t")
    two.ddpgen("update", "t", cwd=cwd)
    record = generate.read_record(cwd / "t")
    assert (record["_src_path"], record["_commit"]) == (url, "v0.2.0")
    assert "torch.set_grad_enabled(True)" in (cwd / "t/t/train.py").read_text()


# Files of all kinds


@pytest.mark.slow
def test_modes(one: Release, two: Release, cwd: Path) -> None:
    """Executable bit: also under umask 077. Who may read a file stays as it was."""
    before = os.umask(0o077)
    try:
        one.ddpgen("new", "m", "--defaults", cwd=cwd)
        keep(cwd / "m")
        (cwd / "m/p").mkdir(exist_ok=True)
        os.umask(0o022)
        (cwd / "m/launch/local.sh").chmod(0o770)
        os.umask(0o077)
        two.ddpgen("update", "m", cwd=cwd)
    finally:
        os.umask(before)
    modes = {name: mode & 0o777 for name, (mode, _) in tree(cwd / "m").items()}
    assert modes["launch/local.sh"] == 0o770
    assert modes["m/train.py"] == 0o600
    assert modes["docs/changes.md"] == 0o600
    assert modes["docs"] == 0o700


@pytest.mark.slow
def test_a_file_that_git_ignores_is_not_replaced(two: Release, p: Path, cwd: Path) -> None:
    edit(p / ".gitignore", lambda text: text + "docs/\n")
    keep(p)
    (p / "docs").mkdir()
    (p / "docs/changes.md").write_text("mine, and nowhere else\n")
    before = tree(p)
    refused(
        two.ddpgen("update", "p", cwd=cwd, code=1),
        "The template has new files where something of yours is: docs/changes.md.",
        "It is a link or a file that git ignores",
        "Type: the same again when it is moved away",
    )
    assert tree(p) == before


@pytest.mark.slow
def test_nothing_is_written_through_links(two: Release, p: Path, cwd: Path) -> None:
    outside = cwd / "outside"
    outside.mkdir()
    (p / "configs").rename(outside / "configs")
    (p / "configs").symlink_to(outside / "configs")
    (p / "launch/local.sh").rename(outside / "local.sh")
    (p / "launch/local.sh").symlink_to(outside / "local.sh")
    keep(p)
    before = tree(outside)
    two.ddpgen("update", "p", cwd=cwd)
    assert tree(outside) == before
    assert (p / "configs").is_symlink()
    assert (p / "launch/local.sh").is_symlink()
    assert "torch.set_grad_enabled(True)" in (p / "p/train.py").read_text()


@pytest.mark.slow
def test_a_link_where_a_new_folder_must_be(two: Release, p: Path, cwd: Path) -> None:
    (cwd / "outside").mkdir()
    (p / "docs").symlink_to(cwd / "outside")
    keep(p)
    before = tree(p)
    result = two.ddpgen("update", "p", cwd=cwd, code=1)
    assert "where something of yours is: docs.\n" in result.stderr
    assert tree(p) == before
    assert os.listdir(cwd / "outside") == []


@pytest.mark.slow
def test_types_of_answers_stay(ddpgen: Ddpgen, two: Release, one: Release, cwd: Path) -> None:
    """Version typed as float: texts that look like something else stay texts, after updates too."""
    for name in ("3.10", "no", "0123", "1e3"):
        shutil.rmtree(cwd / "p", ignore_errors=True)
        one.ddpgen("new", "p", "--defaults", "--project-name", name, cwd=cwd)
        keep(cwd / "p")
        two.ddpgen("update", "p", "--set", "nodes=2", cwd=cwd)
        answers_ = generate.read_project_answers(cwd / "p")
        assert (answers_["project_name"], answers_["nodes"]) == (name, 2)


def third(one_: Release, folder: Path, change: Callable[[str], str]) -> Release:
    """Make a 0.3.0 with another copier.yml."""
    release = Release(Path(shutil.copytree(one_.root, folder)))
    set_version(release.root, "0.3.0")
    edit(release.root / "copier.yml", change)
    return release


@pytest.mark.slow
def test_a_choice_that_is_gone_is_told(one: Release, p: Path, cwd: Path, tmp_path: Path) -> None:
    """Removed answers: what the template does not take any more becomes the default, aloud."""
    one.ddpgen("set", "precision=fp16", "p", cwd=cwd)
    keep(p)
    release = third(one, tmp_path / "3", lambda text: re.sub(r"(?m)^    .*: fp16\n", "", text))
    result = release.ddpgen("update", "p", cwd=cwd)
    assert "  answer    precision = fp32 (was fp16)\n" in result.stdout
    assert "\nprecision: fp32\n" in (p / "configs/train.yaml").read_text()


@pytest.mark.slow
def test_an_answer_that_is_none(two: Release, p: Path, cwd: Path) -> None:
    """The answers file was edited by hand, and the template never took that."""
    replaced("precision: fp32", "precision: fp8")(p)
    before = tree(p)
    refused(
        two.ddpgen("update", "p", cwd=cwd, code=1),
        f"precision = fp8 in {ANSWERS} is not possible.",
        "'fp8' is not in",
        f"Type: git log -p {ANSWERS}, and write it as it was",
    )
    assert tree(p) == before


@pytest.mark.slow
def test_odd_files_of_people(two: Release, p: Path, cwd: Path) -> None:
    """Names and contents that git or copier cannot merge are left alone, or named."""
    names = ["ünï 中.txt", 'it\'s "q".txt', "new\nline", "-rf", "a.rej", os.fsdecode(b"\xff.x")]
    for name in names:
        (p / name).write_bytes(b"mine\n\xff\0")
    (p / "launch/local.sh").write_bytes(b"\0 mine")
    keep(p)
    before = tree(p)
    result = two.ddpgen("update", "p", cwd=cwd)
    after = tree(p)
    assert {name: after[name] for name in names} == {name: before[name] for name in names}
    assert "torch.set_grad_enabled(True)" in (p / "p/train.py").read_text()
    lines = result.stdout.splitlines()
    place = lines.index("Nothing is left of your edits in these files. To have one as it was:")
    assert lines[place + 1] == "  git -C p checkout HEAD -- launch/local.sh"
    undo(result, cwd)
    assert tree(p) == before


@pytest.mark.slow
def test_an_edit_that_the_template_took_over_is_no_conflict(
    two: Release, p: Path, cwd: Path
) -> None:
    edit(p / "launch/local.sh", before_line(r"exec torchrun .*", "# Since 0.2.0: one more line.\n"))
    keep(p)
    result = two.ddpgen("update", "p", cwd=cwd)
    assert (p / "launch/local.sh").read_text().count("# Since 0.2.0: one more line.\n") == 1
    assert "your edits" not in result.stdout


# Setting answers


OTHER: dict[str, list[str]] = {
    "project_name": ["project_name=Another name"],
    "nodes": ["nodes=3"],
    "gpus_per_node": ["gpus_per_node=4"],
    "micro_batch_size": ["micro_batch_size=8"],
    "accumulation_steps": ["accumulation_steps=2"],
    "precision": ["precision=bf16"],
    "sync_batchnorm": ["sync_batchnorm=yes"],
    "checkpoint": ["checkpoint=none"],
    "save_every_steps": ["checkpoint=steps", "save_every_steps=50"],
    "keep_checkpoints": ["keep_checkpoints=7"],
    "save_best": ["save_best=no"],
    "tracker": ["tracker=wandb"],
    "launchers": ["launchers=ssh,slurm"],
    "ci": ["ci=no"],
}


def test_every_answer_is_toggled() -> None:
    names = {question.name for question in questions.visible()}
    assert set(OTHER) | set(update._SETTLED) == names


@pytest.mark.slow
def test_no_answer_conflicts_with_edits_anywhere(one: Release, p: Path, cwd: Path) -> None:
    """Every answer is toggled on a project with edits in every file that invites them."""
    edits = make_edits(p)
    keep(p)
    before = tree(p)
    for name, settings in OTHER.items():
        result = one.ddpgen("set", *settings, "p", "--yes", cwd=cwd)
        for file, text in edits.items():
            if name != "ci" or ".github" not in file:
                assert text in (p / file).read_text(), (name, file)
        assert unmerged(p) == ""
        assert not list(p.rglob("*.rej"))
        assert f"  answer    {name} = " in result.stdout
        if name == "ci":
            assert "  git -C p checkout HEAD -- .github/workflows/tests.yml\n" in result.stdout
        undo(result, cwd)
        assert tree(p) == before, name
    assert git(p, "status", "--short") == ""


def test_set_shows_first_what_will_change(
    ddpgen: Ddpgen, cwd: Path, terminal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ddpgen("new", "p", "--defaults", "--yes")
    keep(cwd / "p")
    before = tree(cwd / "p")
    asked = []

    def answer(reply: bool) -> Callable[..., bool]:
        def confirm(text: str, **_: Any) -> bool:
            asked.append(text)
            assert tree(cwd / "p") == before
            return reply

        return confirm

    monkeypatch.setattr("click.confirm", answer(False))
    plan = (
        "p, template v0.1.0:\n  changed   .copier-answers.yml\n  changed   configs/train.yaml\n"
        "  answer    precision = bf16 (was fp32)\n"
    )
    plan = plan.replace("v0.1.0", generate.read_record(cwd / "p")["_commit"])  # type: ignore[arg-type]
    result = ddpgen("set", "precision=bf16", "p")
    assert (result.code, result.out, result.err) == (0, "", f"{plan}\nNothing was changed.\n")
    assert tree(cwd / "p") == before
    monkeypatch.setattr("click.confirm", answer(True))
    result = ddpgen("set", "precision=bf16", "p")
    assert result.err == f"{plan}\n"
    assert result.out.startswith(plan)
    assert asked == ["Change them?"] * 2
    keep(cwd / "p")
    assert ddpgen("set", "nodes=2", "p", "--yes").code == 0
    assert len(asked) == 2


@pytest.mark.slow
def test_set_stays_at_the_projects_own_version(two: Release, p: Path, cwd: Path) -> None:
    """A newer ddpgen is there, but nobody asked for its template; questions are the old ones."""
    result = two.ddpgen("set", "tracker=wandb", "p", cwd=cwd)
    assert result.stdout.startswith("p, template v0.1.0:\n")
    assert generate.read_record(p)["_commit"] == "v0.1.0"
    assert "torch.set_grad_enabled(True)" not in (p / "p/train.py").read_text()
    keep(p)
    result = two.ddpgen("set", "experiment_tracker=wandb", "p", cwd=cwd, code=1)
    assert "ddpgen: experiment_tracker is no question.\n" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("path", ["p", "./p", "p/configs", "a=b/p", "./a=b/p"])
def test_the_last_word_of_set_may_be_a_path(one: Release, p: Path, cwd: Path, path: str) -> None:
    if "a=b" in path:
        shutil.copytree(p, cwd / "a=b/p")
    where = path if path.startswith("./") or "=" not in path else f"./{path}"
    one.ddpgen("set", "nodes=2", "gpus_per_node=8", where, cwd=cwd)
    changed = cwd / "a=b/p" if "a=b" in path else p
    assert generate.read_project_answers(changed)["gpus_per_node"] == 8


# Signals and failures


@pytest.fixture
def untouched(p: Path, hermetic: Path) -> Iterator[Path]:
    """A project that must not change, and a folder for temporary files that must be empty."""
    before = tree(p)
    temporary = hermetic / "tmp"
    temporary.mkdir()
    yield p
    assert tree(p) == before
    assert git(p, "status", "--short", "--ignored") == ""
    assert os.listdir(temporary) == []


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["generate.update", "project.write", "target.commit"])
def test_a_signal_changes_nothing(
    two: Release, untouched: Path, cwd: Path, hermetic: Path, sent: signal.Signals, when: str
) -> None:
    code = (
        "import os, signal\n"
        f"from ddpgen import generate, project, target, update\n"
        f"real = {when}\n"
        "def late(*args, **kwargs):\n"
        f" os.kill(os.getpid(), {int(sent)})\n"
        " return real(*args, **kwargs)\n"
        f"{when} = late\n"
    )
    env = {"PYTHONPATH": str(two.root), "TMPDIR": str(hermetic / "tmp")}
    process = start(["update", "p"], cwd=cwd, env=env, code=code)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (
        130, "", "Nothing was changed.\n\nddpgen: interrupted.\n",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 12, 2))
def test_a_failure_while_moving_changes_nothing(
    two: Release, untouched: Path, cwd: Path, hermetic: Path, number: int
) -> None:
    code = (
        "import os\n"
        "from ddpgen import target, update\n"
        "real, commit = os.replace, target.commit\n"
        f"left = [{number}]\n"
        "def replace(*args):\n"
        " left[0] -= 1\n"
        " if not left[0]: raise OSError(28, 'No space left on device', 'x')\n"
        " real(*args)\n"
        "def broken(*args):\n"
        " os.replace = replace\n"
        " commit(*args)\n"
        "target.commit = broken\n"
    )
    env = {"PYTHONPATH": str(two.root), "TMPDIR": str(hermetic / "tmp")}
    process = start(["update", "p"], cwd=cwd, env=env, code=code)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("ddpgen: p could not be written.\nThe system says: No space left")


def test_work_that_goes_on_meanwhile_is_not_lost(
    ddpgen: Ddpgen, cwd: Path, terminal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ddpgen("new", "p", "--defaults", "--yes")
    keep(cwd / "p")

    def confirm(*_: Any, **__: Any) -> bool:
        edit(cwd / "p/configs/train.yaml", lambda text: text + "# late\n")
        return True

    monkeypatch.setattr("click.confirm", confirm)
    result = ddpgen("set", "precision=bf16", "p")
    assert result.code == 1
    assert "p has changes that are not committed: configs/train.yaml." in result.err
    assert (cwd / "p/configs/train.yaml").read_text().endswith("# late\n")
    assert "bf16" not in (cwd / "p" / ANSWERS).read_text()


# Whose a file is


def owners(readme: str) -> dict[str, str]:
    """Read the table of a project's README: pattern -> yours, generated or ours."""
    rows = re.findall(r"(?m)^\| (`.*`) \| \*\*(\w+)\*\*:", readme)
    return {name: owner for names, owner in rows for name in re.findall(r"`([^`]+)`", names)}


def owner_of(name: str, table: dict[str, str]) -> str:
    """Find the row of a file; a row above counts before one below."""
    return next(owner for pattern, owner in table.items() if fnmatch.fnmatch(name, pattern))


@pytest.mark.slow
def test_every_file_is_what_the_readme_says(
    one: Release, p: Path, cwd: Path, tmp_path: Path
) -> None:
    """Yours: never touched. Generated: made anew. Ours: merged line by line."""
    table = owners((p / "README.md").read_text())
    assert set(table.values()) == {"yours", "generated", "ours"}
    release = third(one, tmp_path / "3", lambda text: f"{text}\n# another line\n")
    for path in (release.root / "template").rglob("*"):
        if path.is_file() and "_copier_conf" not in path.name:
            path.write_text(path.read_text() + "\n# the template's line\n")
    # In a file of a line or two every edit is next to the template's.
    files = [
        name for name in git(p, "ls-files").splitlines() if (p / name).read_text().count("\n") > 4
    ]
    assert len(files) > 30
    for name in files:
        first, rest = (p / name).read_text().split("\n", 1)
        (p / name).write_text(f"{first}\n# my line\n{rest}")
    keep(p)
    release.ddpgen("update", "p", cwd=cwd)
    expected = {"yours": (True, False), "generated": (False, False), "ours": (True, True)}
    for name in files:
        text = (p / name).read_text()
        found = ("# my line\n" in text, "# the template's line\n" in text)
        assert found == expected[owner_of(name, table)], name


# The workflow that offers updates


GH = """#!/bin/sh
echo "$@" >>"$GH_LOG"
case "$1 $2" in "pr list") cat "$GH_OPEN" ;; esac
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["new", "open already", "conflict", "up to date", "error"])
def test_the_workflow_opens_a_pull_request(
    one: Release, two: Release, p: Path, cwd: Path, tmp_path: Path, case: str
) -> None:
    workflow = yaml.safe_load((p / ".github/workflows/template.yml").read_text())
    assert workflow["permissions"] == {"contents": "write", "pull-requests": "write"}
    *_, install, step = workflow["jobs"]["update"]["steps"]
    assert install["run"] == "python -m pip install ddpgen"
    if case == "conflict":
        edit(
            p / "launch/local.sh",
            lambda text: text.replace("\nexec torchrun", "\n# mine\nexec torchrun"),
        )
    if case == "error":
        (p / ANSWERS).unlink()
    if git(p, "status", "--short"):
        keep(p)
    git(cwd, "clone", "-q", "--bare", p, "origin.git")
    git(p, "remote", "add", "origin", cwd / "origin.git")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "gh").write_text(GH)
    release = one if case == "up to date" else two
    (tools / "ddpgen").write_text(
        f'#!/bin/sh\nPYTHONPATH={release.root} exec {sys.executable} -m ddpgen "$@"\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    (tmp_path / "log").touch()
    (tmp_path / "open").write_text("1\n" if case == "open already" else "0\n")
    env = {
        **offline(), "PATH": f"{tools}:{os.environ['PATH']}", "RUNNER_TEMP": str(tmp_path),
        "GH_LOG": str(tmp_path / "log"), "GH_OPEN": str(tmp_path / "open"),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=p, env=env, capture_output=True, text=True,
    )  # fmt: skip
    calls = (tmp_path / "log").read_text()
    assert done.returncode == (1 if case == "error" else 0), done.stderr
    if case in ("up to date", "error"):
        assert calls == ""
        return
    asked = calls.splitlines()
    assert asked[0] == "pr list --head ddpgen-update --state open --json number --jq length"
    title = "Update from the template" + (", with conflicts" if case == "conflict" else "")
    verb = "edit ddpgen-update" if case == "open already" else "create --head ddpgen-update"
    assert asked[1] == f"pr {verb} --title {title} --body-file {tmp_path}/update.txt"
    offered = git(cwd / "origin.git", "show", "ddpgen-update:p/train.py")
    assert "torch.set_grad_enabled(True)" in offered
    assert "p, template v0.1.0 -> v0.2.0:" in (tmp_path / "update.txt").read_text()
