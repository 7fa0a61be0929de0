"""`ddpgen new` and `ddpgen demo`: what is written, what is refused, and what is said."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import yaml

import ddpgen as package
from ddpgen import demo, generate, new, questions, target

from .conftest import ROOT, Ddpgen, Result, contents, start, tree

ALL = (
    "--starter vision|text, --nodes N, --gpus-per-node N, --micro-batch-size N, "
    "--accumulation-steps N, --precision fp32|bf16|fp16, --sync-batchnorm/--no-sync-batchnorm, "
    "--checkpoint epoch|steps|none, --keep-checkpoints N, --save-best/--no-save-best, "
    "--tracker none|tensorboard|wandb|mlflow, "
    "--launchers ssh|slurm|kubernetes|kubeflow (several: a,b), --ci/--no-ci"
)
BIG = [
    *("--set", "nodes=2", "--set", "gpus_per_node=8"),
    *("--set", "accumulation_steps=4", "--set", "precision=bf16"),
]


def answers(project: str | Path) -> dict[str, object]:
    return dict(generate.read_project_answers(Path(project)))


# What is written


def test_a_project_is_written(ddpgen: Ddpgen, cwd: Path) -> None:
    result = ddpgen("new", "p", "--defaults", *BIG, "--yes")
    files = contents(cwd / "p")
    assert result.code == 0, result.err
    assert result.out == (
        f"Wrote {len(files)} files to p. Next:\n"
        "  cd p\n  python -m pip install -e .\n  bash launch/local.sh\n"
    )
    assert {"pyproject.toml", "configs/train.yaml", "launch/local.sh", "p/train.py"} <= set(files)
    assert tree(cwd) == ["p", *(f"p/{path}" for path in tree(cwd / "p"))]
    assert result.err == (
        f"{len(files)} files in p:\n" + "".join(f"  {name}\n" for name in sorted(files)) + "\n"
        "p (vision starter)\n\n"
        "  processes      16     2 nodes x 8 GPUs per node\n"
        "  global batch   2,048  32 samples per GPU x 4 accumulation steps x 16 processes\n"
        "  learning rate  0.003  as in configs/train.yaml; not scaled with the batch "
        "(lr_scaling: none)\n"
        "  precision      bf16   forward pass; the weights stay fp32\n"
        "  checkpoint     epoch  after every epoch; the newest 3 are kept, and the best\n\n"
        "  Note: The global batch of 2,048 is larger than the 1,438 training digits of the vision\n"
        "  starter. A run refuses this unless drop_last is false in configs/train.yaml, or your "
        "own data\n  is larger.\n\n"
        "  Note: bf16 also works on the CPU, but is slow there.\n\n"
    )


def test_what_later_updates_need_is_recorded(ddpgen: Ddpgen, cwd: Path) -> None:
    ddpgen("new", "p", "--defaults", *BIG)
    recorded = yaml.safe_load((cwd / "p/.copier-answers.yml").read_text())
    assert recorded == {
        "_commit": f"v{package.__version__}",
        "_src_path": "~/.ddpgen/template.bundle",
        "project_name": "p",
        "package_name": "p",
        "starter": "vision",
        "nodes": 2,
        "gpus_per_node": 8,
        "micro_batch_size": 32,
        "accumulation_steps": 4,
        "precision": "bf16",
        "sync_batchnorm": False,
        "checkpoint": "epoch",
        "keep_checkpoints": 3,
        "save_best": True,
        "tracker": "none",
        "launchers": [],
        "ci": False,
    }


def test_the_tree_is_what_copier_itself_writes(ddpgen: Ddpgen, cwd: Path) -> None:
    """Otherwise the first update would change files that nobody changed."""
    import copier

    name = "a project with quite a long name that a YAML writer might want to wrap."[:60].strip()
    ddpgen("new", "p", "--defaults", *BIG, "--project-name", name)
    plain = cwd / "plain"
    plain.mkdir()
    for part in ("copier.yml", "template"):
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, plain / part)
    copier.run_copy(
        str(plain), cwd / "q", answers("p"), defaults=True, quiet=True, settings=copier.Settings()
    )
    ours, theirs = contents(cwd / "p"), contents(cwd / "q")
    ours_recorded = ours.pop(".copier-answers.yml").decode().splitlines()
    theirs_recorded = theirs.pop(".copier-answers.yml").decode().splitlines()
    assert ours == theirs
    place = next(number for number, line in enumerate(theirs_recorded) if line[0] != "#")
    # One line more, because a plain folder has no version; the next update finds them here too.
    assert theirs_recorded[place].startswith("_src_path: ")
    assert ours_recorded == [
        *theirs_recorded[:place],
        f"_commit: v{package.__version__}",
        "_src_path: ~/.ddpgen/template.bundle",
        *theirs_recorded[place + 1 :],
    ]


def test_no_file_knows_where_it_was_made(ddpgen: Ddpgen, cwd: Path, hermetic: Path) -> None:
    ddpgen("new", "p", "--defaults")
    for name, content in contents(cwd / "p").items():
        for place in (str(cwd), str(hermetic), str(ROOT), ".ddpgen-"):
            assert place.encode() not in content, name


def test_names_come_from_the_path(ddpgen: Ddpgen, cwd: Path) -> None:
    assert ddpgen("new", "deep/er/My Project!", "--defaults").code == 0
    made = answers("deep/er/My Project!")
    assert (made["project_name"], made["package_name"]) == ("My Project-", "my_project")


@pytest.mark.parametrize(
    "path",
    ["with space", "it's", 'say "hi"', "$(touch PWNED)", "`touch PWNED`", "a;b", "ünï-中文-🎉",
     "-rf", "--", "~tilde", "new\nline", "*", "{{ 7*7 }}", "%s", "deep/with space/x", "slash/",
     "./dot", "x" * 200, "a\\b", ".hidden"],
)  # fmt: skip
def test_paths_and_commands_that_work_as_pasted(ddpgen: Ddpgen, cwd: Path, path: str) -> None:
    result = ddpgen("new", "--defaults", "--", path)
    assert result.code == 0, result.err
    commands = result.out.split(" Next:\n  ")[1]
    enter = commands.removesuffix("\n  python -m pip install -e .\n  bash launch/local.sh\n")
    assert enter != commands
    script = f"{enter} && test -f configs/train.yaml && pwd -P"
    done = subprocess.run(["bash", "-c", script], cwd=cwd, capture_output=True, text=True)
    assert done.stdout.removesuffix("\n") == str(cwd / path.rstrip("/")).replace("/./", "/")
    assert not list(cwd.rglob("PWNED"))
    assert str(answers(path)["package_name"]).isidentifier()


@pytest.mark.parametrize("path", [".", "./", "../cwd", "link"])
def test_an_empty_folder_that_exists_stays_the_same_folder(
    ddpgen: Ddpgen, cwd: Path, path: str
) -> None:
    if path == "link":
        (cwd / "real").mkdir()
        (cwd / "link").symlink_to("real")
    before = Path(path).stat().st_ino
    result = ddpgen("new", path, "--defaults")
    assert result.code == 0, result.err
    assert Path(path).stat().st_ino == before
    assert answers(path)["project_name"] == ("link" if path == "link" else "cwd")
    assert ("  cd " in result.out) is (path not in (".", "./"))
    assert not list(cwd.rglob(".ddpgen-*"))


def test_the_interpreter_of_a_script_makes_it_executable(
    ddpgen: Ddpgen, cwd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a wheel, which knows no modes, and as written on a system that writes CRLF."""
    wheel = tmp_path / "wheel"
    wheel.mkdir()
    shutil.copy(ROOT / "copier.yml", wheel)
    shutil.copytree(ROOT / "template", wheel / "template")
    (wheel / "template/launch/odd.sh").write_bytes(b"#!/bin/sh\r\necho hello\r\n")
    (wheel / "template/binary.bin").write_bytes(b"\0\r\n")
    for path in wheel.rglob("*"):
        if path.is_file():
            path.chmod(0o444)
    monkeypatch.setattr(generate, "template_root", lambda: wheel)
    before = os.umask(0o077)
    try:
        assert ddpgen("new", "p", "--defaults").code == 0
    finally:
        os.umask(before)
    for path in (cwd / "p").rglob("*"):
        script = path.is_file() and path.read_bytes().startswith(b"#!")
        assert path.stat().st_mode & 0o777 == (0o700 if script or path.is_dir() else 0o600), path
    assert (cwd / "p/launch/odd.sh").read_bytes() == b"#!/bin/sh\necho hello\n"
    assert (cwd / "p/binary.bin").read_bytes() == b"\0\r\n"
    assert {path.name for path in (cwd / "p").rglob("*.sh")} >= {"local.sh", "node.sh", "odd.sh"}


def test_modes_follow_an_ordinary_umask(ddpgen: Ddpgen, cwd: Path) -> None:
    before = os.umask(0o022)
    try:
        ddpgen("new", "p", "--defaults")
    finally:
        os.umask(before)
    assert (cwd / "p").stat().st_mode & 0o777 == 0o755
    assert (cwd / "p/launch/local.sh").stat().st_mode & 0o777 == 0o755
    assert (cwd / "p/configs/train.yaml").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "settings", ["", "defaults: {precision: bf16, nodes: 7}\ntrust: [/]\n", "[broken", "- a\n"]
)
def test_copier_settings_of_the_user_change_nothing(
    ddpgen: Ddpgen, cwd: Path, hermetic: Path, monkeypatch: pytest.MonkeyPatch, settings: str
) -> None:
    (hermetic / "copier-settings.yml").write_text(settings)
    (hermetic / "config/copier").mkdir(parents=True)
    (hermetic / "config/copier/settings.yml").write_text(settings)
    for variable in ("set", "unset"):
        if variable == "unset":
            monkeypatch.delenv("COPIER_SETTINGS_PATH")
        assert ddpgen("new", variable, "--defaults").code == 0
        assert (answers(variable)["precision"], answers(variable)["nodes"]) == ("fp32", 1)


@pytest.mark.parametrize(
    "config",
    [
        "[core]\nautocrlf = true\nfileMode = false\n",
        "[broken",
        "[safe]\nbareRepository = explicit\n",
        "[commit]\ngpgsign = true\n[core]\nhooksPath = /nonexistent\n[init]\ndefaultBranch = x\n",
    ],
)
def test_git_settings_of_the_user_change_nothing(
    ddpgen: Ddpgen, cwd: Path, hermetic: Path, config: str
) -> None:
    (hermetic / "gitconfig").write_text(config)
    assert ddpgen("new", "p", "--defaults").code == 0
    assert not any(b"\r" in content for content in contents(cwd / "p").values())


def test_git_is_not_needed_and_not_started(ddpgen: Ddpgen, cwd: Path) -> None:
    """A program called git in the working folder is not started either."""
    (cwd / "git").write_text("#!/bin/sh\ntouch PWNED\nexit 1\n")
    (cwd / "git").chmod(0o755)
    (cwd / "nvidia-smi").symlink_to("git")
    assert ddpgen("new", "p", "--defaults").code == 0
    # With a home of its own: where the bundle is there already git is not missed.
    process = start(["new", "q", "--defaults"], cwd=cwd, env={"PATH": "", "HOME": str(cwd)})
    assert process.communicate()[1].endswith(
        "\n\nNote: plain `copier update` will need `ddpgen sync` first. git is not found. "
        "Updates are merged with it, and the template's history is kept in it.\n"
    )
    assert (process.returncode, sorted(os.listdir(cwd))) == (0, ["git", "nvidia-smi", "p", "q"])


# Where answers come from


def test_flags_win_over_set_and_set_over_the_file(ddpgen: Ddpgen, cwd: Path) -> None:
    (cwd / "a.yml").write_text("nodes: 2\ngpus_per_node: 2\nproject_name: 3.10\n")
    options = ["--answers", "a.yml", "--set", "gpus_per_node=3", "--accumulation-steps", "4"]
    flags = ["--set", "nodes=5", "--nodes", "5", "--no-save-best"]
    result = ddpgen("new", "p", "--defaults", *options, *flags)
    assert result.code == 0, result.err
    made = answers("p")
    assert (made["nodes"], made["gpus_per_node"], made["accumulation_steps"]) == (5, 3, 4)
    assert (made["project_name"], made["save_best"]) == ("3.10", False)


@pytest.mark.parametrize("text", ["3.10", "no", "0123"])
@pytest.mark.parametrize("way", ["flag", "set", "file"])
def test_a_name_that_yaml_would_change(ddpgen: Ddpgen, cwd: Path, way: str, text: str) -> None:
    (cwd / "a.yml").write_text(f"project_name: {text}\n")
    option = {
        "flag": ["--project-name", text],
        "set": ["--set", f"project_name={text}"],
        "file": ["--answers", "a.yml"],
    }[way]
    assert ddpgen("new", "p", "--defaults", "--package-name", "p", *option).code == 0
    assert answers("p")["project_name"] == text


def test_checkpoint_none_is_a_text(ddpgen: Ddpgen, cwd: Path) -> None:
    assert ddpgen("new", "p", "--defaults", "--set", "checkpoint=none").code == 0
    assert answers("p")["checkpoint"] == "none"
    assert yaml.safe_load((cwd / "p/configs/train.yaml").read_text())["checkpoint"] == "none"


def test_an_answers_file_of_a_project_makes_the_same_project(ddpgen: Ddpgen, cwd: Path) -> None:
    ddpgen("new", "p", "--defaults", *BIG, "--project-name", "first")
    result = ddpgen("new", "q", "--defaults", "--answers", "p/.copier-answers.yml")
    assert result.code == 0, result.err
    assert contents(cwd / "p") == contents(cwd / "q")


def test_all_answers_given_need_neither_terminal_nor_defaults(ddpgen: Ddpgen, cwd: Path) -> None:
    ddpgen("new", "p", "--defaults")
    assert ddpgen("new", "q", "--answers", "p/.copier-answers.yml").code == 0


@pytest.mark.parametrize(
    ("given", "count", "flags"),
    [
        ("", "13 answers are", ALL),
        ("--starter text --nodes 1 --checkpoint none", "7 answers are",
         "--gpus-per-node N, --micro-batch-size N, --accumulation-steps N, "
         "--precision fp32|bf16|fp16, --tracker none|tensorboard|wandb|mlflow, "
         "--launchers ssh|slurm|kubernetes|kubeflow (several: a,b), --ci/--no-ci"),
        ("--checkpoint steps", "13 answers are",
         ALL.replace("--checkpoint epoch|steps|none", "--save-every-steps N")),
    ],
)  # fmt: skip
def test_missing_answers_name_their_flags(
    ddpgen: Ddpgen, cwd: Path, given: str, count: str, flags: str
) -> None:
    assert ddpgen("new", "a b", *given.split()) == Result(
        1,
        "",
        f"ddpgen: {count} missing: {flags}.\n"
        "There is no terminal to ask on.\n"
        "Type: ddpgen new 'a b' --defaults, or give the missing flags\n",
    )
    assert tree(cwd) == []


# What is refused


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--nodes 0",
         "nodes = 0 is not possible.\nUse a number from 1 to 100000.\nType: --nodes N"),
        ("--set gpus_per_node=1025",
         "gpus_per_node = 1025 is not possible.\nUse a number from 1 to 1024, the GPUs of one "
         "machine.\nType: --gpus-per-node N"),
        ("--micro-batch-size -1",
         "micro_batch_size = -1 is not possible.\nUse a number from 1 to 1000000.\n"
         "Type: --micro-batch-size N"),
        ("--nodes two",
         "nodes = two is not possible.\nUse a whole number in digits, like 8.\nType: --nodes N"),
        ("--package-name torch",
         "package_name = torch is not possible.\nThis is the name of a Python keyword, a library "
         "or a folder of the project; it would hide it. Try torch_ddp.\nType: --package-name TEXT"),
        ("--package-name 1x",
         "package_name = 1x is not possible.\nUse 1 to 40 lower-case letters, digits and _ (the "
         "first one a letter).\nType: --package-name TEXT"),
        ("--project-name ../x",
         "project_name = ../x is not possible.\nUse 1 to 60 letters, digits, spaces and . _ - (the "
         "first one a letter or a digit).\nType: --project-name TEXT"),
        ("--starter text --sync-batchnorm",
         "sync_batchnorm = true has no meaning here.\nIt is asked only when starter == 'vision'; "
         "here starter = text.\nType: the command again without sync_batchnorm"),
        ("--set save_every_steps=9",
         "save_every_steps = 9 has no meaning here.\nIt is asked only when checkpoint == 'steps'; "
         "here checkpoint = epoch.\nType: the command again without save_every_steps"),
        ("--checkpoint none --save-best",
         "save_best = true has no meaning here.\nIt is asked only when checkpoint != 'none'; "
         "here checkpoint = none.\nType: the command again without save_best"),
        ("--nodes 2 --set nodes=3",
         "nodes is given twice: 2 and 3.\nOnly one of them can hold.\nType: the command again with "
         "one value for nodes"),
    ],
)  # fmt: skip
def test_answers_that_are_refused(ddpgen: Ddpgen, cwd: Path, argv: str, message: str) -> None:
    result = ddpgen("new", "p", "--defaults", *argv.split())
    assert (result.code, result.out, result.err) == (1, "", f"ddpgen: {message}\n")
    assert tree(cwd) == []


def test_an_unknown_key(ddpgen: Ddpgen, cwd: Path) -> None:
    result = ddpgen("new", "p", "--defaults", "--set", "nmae=x")
    assert (result.code, tree(cwd)) == (1, [])
    assert result.err.startswith("ddpgen: nmae is no question.\nThe questions are project_name, ")
    assert result.err.endswith("Did you mean project_name?\n")


def test_a_validator_on_a_choice_is_explained_too() -> None:
    error = generate._translate(
        ValueError("Invalid choice for 'precision': needs a GPU"), {"precision": "fp16"}
    )
    assert str(error) == (
        "ddpgen: precision = fp16 is not possible.\nneeds a GPU\nType: --precision fp32|bf16|fp16"
    )


def test_other_errors_of_copier_are_passed_on(
    ddpgen: Ddpgen, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import copier

    def broken(*_: object, **__: object) -> None:
        raise TypeError("first line\n  second line")

    monkeypatch.setattr(copier, "run_copy", broken)
    result = ddpgen("new", "p", "--defaults")
    assert (result.code, result.out, result.err) == (
        1,
        "",
        "ddpgen: The project could not be written.\nfirst line second line\n"
        "Type: the command again with other answers, or another PATH\n",
    )
    assert tree(cwd) == []


def test_a_folder_with_something_in_it(ddpgen: Ddpgen, cwd: Path) -> None:
    (cwd / "p").mkdir()
    (cwd / "p/.one").touch()
    result = ddpgen("new", "p", "--defaults")
    assert (result.code, result.out, result.err) == (
        1,
        "",
        "ddpgen: p is not empty: it holds .one.\nA new project would be mixed with them.\n"
        "Type: another PATH, or add --force to write beside them\n",
    )
    for number in range(7):
        (cwd / f"p/f{number}").touch()
    assert "it holds .one, f0, f1, f2, f3 and 3 more.\n" in ddpgen("new", "p", "--defaults").err
    assert len(tree(cwd / "p")) == 8


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "'' is not possible as PATH.\nThe project needs a folder with a name.\n"
             "Type: ddpgen new my_project"),
        ("/", "/ is not possible as PATH.\nThe project needs a folder with a name.\n"
              "Type: ddpgen new my_project"),
        ("file", "file is a file.\nA project is a folder.\nType: another PATH"),
        ("file/p", "file/p cannot be made.\n{cwd}/file is a file, not a folder.\n"
                   "Type: another PATH"),
        ("nowhere", "nowhere is a link to nothing.\nA project is a folder.\nType: another PATH"),
        ("x" * 300, "{x} cannot be looked at.\nThe system says: File name too long.\n"
                    "Type: another PATH"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("force", [(), ("--force", "--yes")])
def test_paths_that_are_refused(
    ddpgen: Ddpgen, cwd: Path, path: str, message: str, force: tuple[str, ...]
) -> None:
    (cwd / "file").write_text("mine")
    (cwd / "nowhere").symlink_to("gone")
    result = ddpgen("new", path, "--defaults", *force)
    expected = message.format(cwd=cwd, x="x" * 57 + "...")
    if len(f"{cwd}/file") > 60:
        expected = expected.replace(f"{cwd}/file", f"{cwd}/file"[:57] + "...")
    assert (result.code, result.out, result.err) == (1, "", f"ddpgen: {expected}\n")
    assert (tree(cwd), (cwd / "file").read_text()) == (["file", "nowhere"], "mine")


def test_a_circle_of_links(ddpgen: Ddpgen, cwd: Path) -> None:
    (cwd / "a").symlink_to("b")
    (cwd / "b").symlink_to("a")
    for path in ("a", "a/p"):
        result = ddpgen("new", path, "--defaults")
        assert (result.code, len(result.err.splitlines())) == (1, 3), result.err


def test_a_parent_that_may_not_be_written(
    ddpgen: Ddpgen, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The one who runs the tests may be root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != cwd)
    result = ddpgen("new", "deep/p", "--defaults")
    shown = str(cwd) if len(str(cwd)) <= 60 else f"{str(cwd)[:57]}..."
    assert (result.code, result.out, result.err) == (
        1,
        "",
        f"ddpgen: deep/p cannot be written.\nThe folder {shown} does not allow it.\n"
        "Type: another PATH, or change the permissions of that folder\n",
    )


# --dry-run, --yes and the confirmation


def test_a_dry_run_shows_the_plan_and_writes_nothing(ddpgen: Ddpgen, cwd: Path) -> None:
    os.utime(cwd, ns=(1, 1))
    dry = ddpgen("new", "deep/p", "--defaults", *BIG, "--dry-run")
    assert (dry.code, dry.err, tree(cwd)) == (0, "", [])
    # Not even a temporary folder stood beside the target for a moment.
    assert cwd.stat().st_mtime_ns == 1
    real = ddpgen("new", "deep/p", "--defaults", *BIG)
    assert dry.out == real.err


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(("agreed", "written"), [(True, True), (False, False)])
def test_a_terminal_has_the_last_word(
    ddpgen: Ddpgen, cwd: Path, monkeypatch: pytest.MonkeyPatch, agreed: bool, written: bool
) -> None:
    asked: list[tuple[str, object]] = []

    def confirm(text: str, default: bool, err: bool) -> bool:
        asked.append((text, default))
        assert err, "questions are talk, not results"
        return agreed

    monkeypatch.setattr(click, "confirm", confirm)
    result = ddpgen("new", "p", "--defaults")
    assert asked == [("Write them?", True)]
    assert (result.code, (cwd / "p").exists()) == (0, written)
    assert result.err.endswith("Nothing was written.\n") is not written
    assert ("Wrote" in result.out) is written
    ddpgen("new", "q", "--defaults", "--yes")
    assert len(asked) == 1


@pytest.mark.usefixtures("terminal")
def test_a_terminal_that_closes_at_the_last_word(ddpgen: Ddpgen, cwd: Path) -> None:
    result = ddpgen("new", "p", "--defaults")
    assert (result.code, tree(cwd)) == (130, [])
    assert result.err.endswith("Nothing was written.\n\nddpgen: interrupted.\n")


# --force


@pytest.fixture
def occupied(cwd: Path) -> Path:
    """A folder with a README.md and a configs/train.yaml of somebody else, and a file of ours."""
    place = cwd / "p"
    (place / "configs").mkdir(parents=True)
    (place / "configs/train.yaml").write_text("mine\n")
    (place / "notes.txt").write_text("mine too\n")
    (place / ".gitattributes").write_text("* text=auto eol=lf\n")
    (place / "pyproject.toml").write_text("[mine]\n")
    return place


def test_force_lists_what_it_would_overwrite(ddpgen: Ddpgen, occupied: Path) -> None:
    before = contents(occupied)
    result = ddpgen("new", "p", "--defaults", "--force")
    assert (result.code, result.out) == (1, "")
    assert result.err.endswith(
        "ddpgen: 2 files of p would be overwritten: configs/train.yaml, pyproject.toml.\n"
        "There is no terminal to ask on.\n"
        "Type: another PATH, or add --yes to overwrite them\n"
    )
    assert "\n  configs/train.yaml  (overwritten)\n" in result.err
    assert contents(occupied) == before
    (occupied / "pyproject.toml").unlink()
    assert ddpgen("new", "p", "--defaults", "--force").err.endswith(
        "ddpgen: 1 file of p would be overwritten: configs/train.yaml.\n"
        "There is no terminal to ask on.\n"
        "Type: another PATH, or add --yes to overwrite it\n"
    )


def test_force_with_yes_overwrites_just_that(ddpgen: Ddpgen, occupied: Path, cwd: Path) -> None:
    same = (occupied / ".gitattributes").stat().st_ino
    result = ddpgen("new", "p", "--defaults", "--force", "--yes")
    assert result.code == 0, result.err
    ddpgen("new", "fresh/p", "--defaults")
    assert contents(occupied) == {**contents(cwd / "fresh/p"), "notes.txt": b"mine too\n"}
    assert (occupied / ".gitattributes").stat().st_ino == same
    assert sorted(os.listdir(cwd)) == ["fresh", "p"]


def test_force_without_clashes_needs_no_yes(ddpgen: Ddpgen, cwd: Path) -> None:
    (cwd / "p").mkdir()
    (cwd / "p/notes.txt").write_text("mine\n")
    assert ddpgen("new", "p", "--defaults", "--force").code == 0
    assert (cwd / "p/notes.txt").read_text() == "mine\n"


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("agreed", [True, False])
def test_force_asks_on_a_terminal(
    ddpgen: Ddpgen, occupied: Path, monkeypatch: pytest.MonkeyPatch, agreed: bool
) -> None:
    asked: list[tuple[str, object]] = []

    def confirm(text: str, default: bool, err: bool) -> bool:
        asked.append((text, default))
        return agreed

    monkeypatch.setattr(click, "confirm", confirm)
    before = contents(occupied)
    assert ddpgen("new", "p", "--defaults", "--force").code == 0
    assert asked == [("Overwrite 2 files and write the others?", False)]
    assert (contents(occupied) == before) is not agreed


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("configs", lambda path: path.write_text("x"),
         "is a file.\nThe project needs a folder of this name.\n"),
        ("configs", lambda path: path.symlink_to(path.parent.parent / "away"),
         "is a link.\nThe project needs a folder of this name.\n"),
        ("pyproject.toml", lambda path: path.mkdir(),
         "is a folder.\nThe project needs a file of this name.\n"),
    ],
)  # fmt: skip
def test_force_never_replaces_another_kind_of_thing(
    ddpgen: Ddpgen, cwd: Path, name: str, make: Callable[[Path], object], message: str
) -> None:
    (cwd / "p").mkdir()
    (cwd / "away").mkdir()
    make(cwd / "p" / name)
    before = tree(cwd)
    result = ddpgen("new", "p", "--defaults", "--force", "--yes")
    assert result.code == 1
    assert message in result.err
    assert result.err.endswith("Type: another PATH, or move it away\n")
    assert tree(cwd) == before


def test_force_replaces_a_linked_file_and_not_what_it_leads_to(ddpgen: Ddpgen, cwd: Path) -> None:
    (cwd / "p").mkdir()
    (cwd / "away.toml").write_text("[mine]\n")
    (cwd / "p/pyproject.toml").symlink_to(cwd / "away.toml")
    assert ddpgen("new", "p", "--defaults", "--force", "--yes").code == 0
    assert (cwd / "away.toml").read_text() == "[mine]\n"
    assert not (cwd / "p/pyproject.toml").is_symlink()


# GPUs of this machine


@pytest.mark.parametrize(
    ("listed", "chosen", "count"),
    [
        ("GPU 0: A (UUID: GPU-1)\nGPU 1: A (UUID: GPU-2)\n", None, 2),
        ("GPU 0: A (UUID: GPU-1)\n  MIG 1g.5gb Device 0: (UUID: MIG-1)\n", None, 1),
        ("GPU 0: A\nGPU 1: A\nGPU 2: A\n", "0,2", 2),
        ("GPU 0: A\nGPU 1: A\n", "0,1,2,3", 2),
        ("GPU 0: A\nGPU 1: A\n", "", 0),
        ("GPU 0: A\nGPU 1: A\n", "-1", 0),
        ("GPU 0: A\nGPU 1: A\n", "1,-1,0", 1),
        ("No devices were found\n", None, 0),
        ("exit 9", None, 0),
        ("", None, 0),
    ],
)
def test_gpus_are_counted_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, chosen: str | None, count: int
) -> None:
    program = tmp_path / "nvidia-smi"
    lines = "" if listed.startswith("exit") else listed
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}END\n{listed if not lines else ''}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert new.visible_gpus() == count


def test_no_nvidia_smi_and_a_hanging_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert new.visible_gpus() == 0

    def hang(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert new.visible_gpus() == 0


def test_defaults_do_not_depend_on_the_machine(
    ddpgen: Ddpgen, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new, "visible_gpus", lambda: 8)
    ddpgen("new", "p", "--defaults")
    assert answers("p")["gpus_per_node"] == questions.find("gpus_per_node").default


# ddpgen demo


@pytest.fixture
def quick_training(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Train with a line of Python instead of torch."""

    def set_code(code: str) -> None:
        monkeypatch.setattr(demo, "_command", lambda path: [sys.executable, "-c", code])

    monkeypatch.setattr(demo, "NEEDS", {})
    monkeypatch.setattr("shutil.which", lambda name, **_: f"/usr/bin/{name}")
    set_code("import os; os.makedirs('runs/train-001')")
    return set_code


def test_demo_writes_trains_and_tells(ddpgen: Ddpgen, cwd: Path, quick_training: object) -> None:
    result = ddpgen("demo")
    assert result.code == 0, result.err
    assert result.out == (
        "The run is in ddpgen-demo/runs/train-001. Next:\n"
        "  cd ddpgen-demo\n  bash launch/local.sh\n"
    )
    assert answers("ddpgen-demo")["gpus_per_node"] == 2


def test_demo_activates_its_environment_where_the_shell_has_no_torchrun(
    ddpgen: Ddpgen, cwd: Path, quick_training: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is printed must work as pasted, also in a shell that never saw this environment."""
    prefix = cwd / "my env"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "activate").touch()
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr("shutil.which", lambda name, **_: None)
    result = ddpgen("demo")
    assert result.out.splitlines()[1:] == [
        f"  source '{prefix}/bin/activate'", "  cd ddpgen-demo", "  bash launch/local.sh",
    ]  # fmt: skip


def test_demo_again_trains_again(
    ddpgen: Ddpgen, cwd: Path, quick_training: Callable[[str], None]
) -> None:
    ddpgen("demo", "a b")
    (cwd / "a b/a_b/model.py").write_text("# mine\n")
    quick_training("import os; os.makedirs('runs/train-002'); os.makedirs('runs/x')")
    os.utime(cwd / "a b/runs/train-001", (1, 1))
    result = ddpgen("demo", "a b")
    assert result.code == 0, result.err
    assert "  cd 'a b'\n" in result.out
    assert (cwd / "a b/a_b/model.py").read_text() == "# mine\n"


def test_demo_names_the_newest_run(
    ddpgen: Ddpgen, cwd: Path, quick_training: Callable[[str], None]
) -> None:
    quick_training(
        "import os\nfor name, age in (('a', 2), ('b', 3), ('c', 1)):\n"
        " os.makedirs('runs/' + name); os.utime('runs/' + name, (age, age))"
    )
    assert ddpgen("demo").out.startswith("The run is in ddpgen-demo/runs/b.")


def test_demo_without_a_run(
    ddpgen: Ddpgen, cwd: Path, quick_training: Callable[[str], None]
) -> None:
    quick_training("pass")
    result = ddpgen("demo")
    assert (result.code, result.err.splitlines()[-3:]) == (
        1,
        [
            "ddpgen: The training has left no run in ddpgen-demo/runs.",
            "The settings in configs/train.yaml may name another folder.",
            "Type: ddpgen demo ANOTHER_PATH",
        ],
    )


def test_demo_leaves_other_folders_alone(ddpgen: Ddpgen, cwd: Path, quick_training: object) -> None:
    (cwd / "p").mkdir()
    (cwd / "p/mine.txt").touch()
    for recorded in (None, "[broken", "- a\n", "_src_path: other\n", b"\xff"):
        if recorded is not None:
            text = recorded if isinstance(recorded, bytes) else recorded.encode()
            (cwd / "p/.copier-answers.yml").write_bytes(text)
        result = ddpgen("demo", "p")
        assert (result.code, "ddpgen: p is not empty: it holds " in result.err) == (1, True)


def test_demo_says_when_the_training_failed(
    ddpgen: Ddpgen, cwd: Path, quick_training: Callable[[str], None]
) -> None:
    quick_training("import sys; print('broken', file=sys.stderr); sys.exit(7)")
    result = ddpgen("demo", "p")
    assert (result.code, result.out) == (1, "")
    assert result.err.endswith(
        "broken\nddpgen: The training ended with exit code 7.\nIts own message is above.\n"
        "Type: ddpgen demo p, to train again\n"
    )


def test_demo_needs_the_package_that_the_answers_name(
    ddpgen: Ddpgen, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "NEEDS", {})
    ddpgen("new", "p", "--defaults")
    shutil.rmtree(cwd / "p/p")
    result = ddpgen("demo", "p")
    assert (result.code, result.err) == (
        1,
        "ddpgen: p cannot be trained: it has no p/train.py.\n"
        "The demo starts the package that its answers name.\nType: ddpgen demo ANOTHER_PATH\n",
    )


def test_demo_says_first_what_is_missing(
    ddpgen: Ddpgen, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    gone = ("torch", "jsonargparse", "sklearn")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in gone else real("os")
    )
    result = ddpgen("demo", "p")
    assert (result.code, result.out, result.err) == (
        1,
        "",
        "ddpgen: The demo cannot train without torch, jsonargparse[signatures], scikit-learn.\n"
        f"Not installed for {sys.executable}.\n"
        "Type: python -m pip install torch 'jsonargparse[signatures]' scikit-learn\n",
    )
    assert tree(cwd) == []


def test_demo_looks_for_all_that_a_default_project_needs(ddpgen: Ddpgen, cwd: Path) -> None:
    ddpgen("new", "p", "--defaults")
    text = (cwd / "p/pyproject.toml").read_text()
    listed = text.split("dependencies = [\n")[1].split("\n]")[0].split("\n")
    needs = [line.strip(' ",').split(">=")[0] for line in listed if "#" not in line]
    assert sorted(needs) == sorted(demo.NEEDS.values())


def test_demo_starts_two_processes_here(
    ddpgen: Ddpgen, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ddpgen("new", "p", "--defaults")
    command = shlex.join(demo._command("p"))
    assert command == (
        f"{shlex.quote(sys.executable)} -m torch.distributed.run --standalone --nproc-per-node=2 "
        "-m p.train --config configs/train.yaml"
    )
    # Two processes cannot share the only GPU.
    monkeypatch.setattr(new, "visible_gpus", lambda: 1)
    assert shlex.join(demo._command("p")) == f"{command} --device cpu"


@pytest.mark.parametrize("given", [None, "3"])
def test_demo_sets_the_threads_unless_somebody_did(
    ddpgen: Ddpgen,
    cwd: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick_training: Callable[[str], None],
    given: str | None,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    quick_training("import os; os.makedirs('runs/' + os.environ['OMP_NUM_THREADS'])")
    expected = given or str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert ddpgen("demo").out.startswith(f"The run is in ddpgen-demo/runs/{expected}.")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_demo_passes_ctrl_c_on_and_waits(cwd: Path, sent: signal.Signals) -> None:
    training = (
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n time.sleep(0.3); pathlib.Path('saved').touch(); sys.exit(1)\n"
        "signal.signal(signal.SIGINT, save); pathlib.Path('started').touch(); time.sleep(60)"
    )
    fake = (
        "from ddpgen import demo\n"
        f"demo.NEEDS, demo._command = {{}}, lambda path: [sys.executable, '-c', {training!r}]\n"
    )
    process = start(["demo", "p"], cwd=cwd, code=fake)
    while not (cwd / "p/started").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(sent)
    err = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert (cwd / "p/saved").exists()
    assert err.endswith("The project stays in p.\n\nddpgen: interrupted.\n")


@pytest.mark.slow
def test_demo_really_trains(cwd: Path) -> None:
    process = start(["demo"], cwd=cwd)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "The run is in ddpgen-demo/runs/train-001. Next:\n" in out
    assert (cwd / "ddpgen-demo/runs/train-001/metrics.jsonl").read_text()
    assert target.files_in(cwd / "ddpgen-demo/runs/train-001")
