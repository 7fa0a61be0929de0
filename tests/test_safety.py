"""Nothing is left half done, nothing is executed, and no odd environment matters."""

from __future__ import annotations

import ast
import contextlib
import errno
import gc
import os
import pwd
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml

from ddpgen import generate, interrupts, new, store, target
from ddpgen.cli import main
from ddpgen.questions import Answer

from .conftest import ROOT, Ddpgen, contents, start, tree

ANSWERS: dict[str, Answer] = {
    "project_name": "p",
    "starter": "text",
    "nodes": 1,
    "gpus_per_node": 2,
    "micro_batch_size": 1,
    "accumulation_steps": 1,
    "precision": "fp32",
    "checkpoint": "none",
}
FILES = {
    "a.txt": "new a\n",
    "configs/train.yaml": "{learning_rate: 1, lr_scaling: none, lr_reference_batch_size: 1}\n",
    "deep/er/b.txt": "new b\n",
}
OLD = {"a.txt": b"old a\n", "configs/train.yaml": b"old\n", "deep/mine.txt": b"mine\n"}


def write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Render three files instead of the template; return them. The store is up to date."""
    store.sync()

    def render(folder: Path, answers: Mapping[str, Answer]) -> dict[str, Answer]:
        write(folder, FILES)
        return ANSWERS

    monkeypatch.setattr(generate, "render", render)
    return {name: content.encode() for name, content in FILES.items()}


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that nobody else uses."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


# A signal at any moment

TRACED = {
    *(module.__file__ for module in (contextlib, interrupts, new, shutil, target, tempfile)),
}


class _SignalAtLine:
    """Deliver a signal when the nth line of the traced modules is about to run."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __enter__(self) -> _SignalAtLine:
        self.before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                interrupts._on_signal(signal.SIGINT, None)
        return self._trace


def sweep(argv: list[str], prepare: Callable[[], None], allowed: Callable[[int], bool]) -> int:
    """Interrupt a command at every line in turn; return the number of lines.

    Args:
        argv: The command.
        prepare: Sets the stage before each run.
        allowed: Judges, given the exit code, what is there afterwards.
    """
    number = 0
    while True:
        number += 1
        prepare()
        with _SignalAtLine(number) as tracer:
            code = main(argv)
        gc.collect()
        assert allowed(code), f"line {number}, exit code {code}"
        if tracer.left > 0:
            return number


@pytest.mark.slow
@pytest.mark.parametrize("path", ["p", "deep/er/p"])
def test_a_signal_at_any_line_leaves_all_or_nothing(
    cwd: Path, temp: Path, small: dict[str, bytes], path: str
) -> None:
    seen = set()

    def prepare() -> None:
        for entry in os.listdir(cwd):
            shutil.rmtree(cwd / entry)

    def allowed(code: int) -> bool:
        there = contents(cwd)
        whole = there == {f"{path}/{name}": content for name, content in small.items()}
        seen.add((code, whole))
        clean = not tree(temp) and not list(cwd.rglob(".ddpgen-*"))
        return clean and (whole if code == 0 else code == 130 and (whole or not tree(cwd)))

    assert sweep(["new", path, "--defaults"], prepare, allowed) > 300
    assert seen == {(0, True), (130, False), (130, True)}


@pytest.mark.slow
def test_a_signal_at_any_line_gives_back_what_was_there(
    cwd: Path, temp: Path, small: dict[str, bytes]
) -> None:
    seen = set()

    def prepare() -> None:
        shutil.rmtree(cwd / "p", ignore_errors=True)
        write(cwd / "p", OLD)

    def allowed(code: int) -> bool:
        there = contents(cwd / "p")
        seen.add((code, there == {**OLD, **small}))
        if tree(temp) or os.listdir(cwd) != ["p"] or (cwd / "p/deep/er").exists() != (there != OLD):
            return False
        return there == {**OLD, **small} or (code == 130 and there == OLD)

    assert sweep(["new", "p", "--defaults", "--force", "--yes"], prepare, allowed) > 400
    assert seen == {(0, True), (130, False), (130, True)}


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_rendering_leaves_nothing(
    ddpgen: Ddpgen, cwd: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    settle = generate._settle_files

    def interrupted(folder: Path) -> None:
        assert (folder / "configs/train.yaml").exists()
        os.kill(os.getpid(), sent)
        settle(folder)

    monkeypatch.setattr(generate, "_settle_files", interrupted)
    result = ddpgen("new", "deep/p", "--defaults")
    assert (result.code, result.out, tree(cwd)) == (130, "", [])
    assert result.err == "Nothing was written.\n\nddpgen: interrupted.\n"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_process_leaves_nothing(cwd: Path, sent: signal.Signals) -> None:
    slow = (
        "import time\nfrom ddpgen import generate\n"
        "def settle(folder):\n print('rendered', flush=True); time.sleep(60)\n"
        "generate._settle_files = settle\n"
    )
    process = start(["new", "deep/p", "--defaults"], cwd=cwd, code=slow)
    assert process.stdout is not None
    assert process.stdout.readline() == "rendered\n"
    assert [path for path in tree(cwd) if path.startswith(".ddpgen-")]
    process.send_signal(sent)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, tree(cwd)) == (130, [])
    assert err == "Nothing was written.\n\nddpgen: interrupted.\n"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_move_takes_it_back(
    ddpgen: Ddpgen,
    cwd: Path,
    small: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    sent: signal.Signals,
) -> None:
    rename = os.rename

    def interrupted(old: Path, new: Path) -> None:
        os.kill(os.getpid(), sent)
        rename(old, new)

    monkeypatch.setattr(os, "rename", interrupted)
    result = ddpgen("new", "deep/p", "--defaults")
    assert (result.code, tree(cwd)) == (130, [])
    assert result.err.endswith("Nothing was written.\n\nddpgen: interrupted.\n")


def test_a_signal_counts_once_and_the_next_one_again() -> None:
    """One may be lost in other people's code; a second Ctrl-C must still work."""

    def kill_and_go_on() -> None:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with interrupts.held():
            pass

    with interrupts.caught():
        kill_and_go_on()
        kill_and_go_on()


def test_signals_wait_while_held() -> None:
    order: list[str] = []

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def nested() -> None:
        with interrupts.caught():
            with interrupts.held():
                with interrupts.held():
                    kill()
                    order.append("inner")
                order.append("outer")
            order.append("never")

    def let_through() -> None:
        with interrupts.caught(), interrupts.held():
            kill()
            order.append("held")
            with interrupts.let_through():
                order.append("never")

    with pytest.raises(KeyboardInterrupt):
        nested()
    with pytest.raises(KeyboardInterrupt):
        let_through()
    assert order == ["inner", "outer", "held"]


def test_another_thread_keeps_its_own_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def run() -> None:
        with interrupts.caught():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


# A failure at any moment


@contextlib.contextmanager
def failing_at(number: int, *, until: int = 0) -> Iterator[list[str]]:
    """Let the nth operation on the disk fail, and those after it up to `until`."""
    calls: list[str] = []
    patch = pytest.MonkeyPatch()

    def wrap(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def operation(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if number <= len(calls) <= max(number, until):
                raise OSError(errno.ENOSPC, "No space left on device", str(args[0]))
            return real(*args, **kwargs)

        patch.setattr(owner, name, operation)

    for owner, name in ((os, "rename"), (os, "replace"), (os, "mkdir"), (Path, "mkdir")):
        wrap(owner, name)
    try:
        yield calls
    finally:
        patch.undo()


@pytest.mark.parametrize("path", ["p", "deep/er/p"])
def test_a_failure_at_any_operation_leaves_nothing(
    ddpgen: Ddpgen, cwd: Path, small: dict[str, bytes], path: str
) -> None:
    for number in range(1, 99):
        with failing_at(number) as calls:
            result = ddpgen("new", path, "--defaults")
        if len(calls) < number:
            break
        assert (result.code, result.out, tree(cwd)) == (1, "", []), calls
        assert "No space left on device" in result.err
        assert "Traceback" not in result.err
    assert number > 4
    assert (result.code, contents(cwd / path)) == (0, small)


def test_a_failure_at_any_operation_gives_back_what_was_there(
    ddpgen: Ddpgen, cwd: Path, small: dict[str, bytes]
) -> None:
    write(cwd / "p", OLD)
    inodes = {name: (cwd / "p" / name).stat().st_ino for name in OLD}
    for number in range(1, 99):
        with failing_at(number) as calls:
            result = ddpgen("new", "p", "--defaults", "--force", "--yes")
        if len(calls) < number:
            break
        assert (result.code, result.out) == (1, "")
        assert contents(cwd) == {f"p/{name}": content for name, content in OLD.items()}
        assert {name: (cwd / "p" / name).stat().st_ino for name in OLD} == inodes
        assert not (cwd / "p/deep/er").exists()
    assert number > 10
    assert (result.code, contents(cwd / "p")) == (0, {**OLD, **small})


def test_the_message_of_a_failed_move(
    ddpgen: Ddpgen, cwd: Path, small: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link", "somewhere")

    monkeypatch.setattr(os, "rename", fail)
    result = ddpgen("new", "p", "--defaults")
    assert result.err.endswith(
        "ddpgen: p could not be written.\n"
        "The system says: Invalid cross-device link (somewhere).\n"
        "Type: the same again when that is mended; nothing was changed\n"
    )


def test_old_files_that_cannot_be_put_back_are_kept(
    ddpgen: Ddpgen, cwd: Path, small: dict[str, bytes]
) -> None:
    write(cwd / "p", OLD)
    with failing_at(0) as calls:
        ddpgen("new", "p", "--defaults", "--force", "--yes", "--dry-run")
    first_move = len(calls) + 1
    for number in range(first_move, first_move + 9):
        with failing_at(number, until=99):
            result = ddpgen("new", "p", "--defaults", "--force", "--yes")
        if "and so did taking it back" in result.err:
            break
    assert result.code == 1
    assert "\nOld files that are not back in their place: a.txt.\nThey are in " in result.err
    kept = list((cwd / "p").rglob("old/a.txt"))
    assert [path.read_bytes() for path in kept] == [OLD["a.txt"]]


def test_a_failure_while_rendering_leaves_nothing(
    ddpgen: Ddpgen, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    monkeypatch.setattr(generate, "_record_source", full)
    result = ddpgen("new", "deep/p", "--defaults")
    assert (result.code, result.out, tree(cwd)) == (1, "", [])
    assert result.err == (
        "ddpgen: No space left on device: x.\nThe system refused it.\n"
        "Type: the command again when that is mended\n"
    )


def test_somebody_else_takes_the_path_meanwhile(
    ddpgen: Ddpgen, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = generate._settle_files

    def late(folder: Path) -> None:
        settle(folder)
        write(cwd / "p", {"theirs.txt": "theirs"})

    monkeypatch.setattr(generate, "_settle_files", late)
    result = ddpgen("new", "p", "--defaults")
    assert (result.code, tree(cwd)) == (1, ["p", "p/theirs.txt"])
    assert "The system says: Directory not empty" in result.err


# What people type

NASTY = [
    # Quotes, templates and commands.
    'A "B" O\'C', "x\\y", "$(touch PWNED)", "`touch PWNED`", "a: b # c", "a\nb",
    "\N{PARTY POPPER}",
    "{{7*7}}", "{{ 7*7 }}", "{% raw %}", "{# x #}",
    "{{ cycler.__init__.__globals__.os.system('touch PWNED') }}", "'; touch PWNED; '",
    '"; touch PWNED; "', "'''", '"""', "\\", "\\n", "%s{0}",
    "!!python/object/apply:os.system ['touch PWNED']", "&a *a", "- a", "a,b", "|", ">", "@x", "#",
    # Values that YAML takes for something else.
    "yes", "no", "null", "~", "3.10", "010", "1e3", "0x10", "1:30:00", "2024-01-01", "", " ", " a ",
    # Characters that nobody sees.
    "\ufeffbom", "\x1b[31mred", "a\tb", "a\rb", "a\x7fb", "a\x85b", "a\u2028b", "a\u200bb",
    # Names that are no package.
    "a b", "1x", "class", "torch", "test", "../../e", "/abs", "..", ".", ".git", "-rf", "a/b",
    "con", "\u00dcn\u00ef", "x" * 200, "__init__", "ddpgen", "data", "configs", "None",
]  # fmt: skip


# The others are refused. A longer list is a decision, not an accident.
ACCEPTED = {
    "project_name": ["yes", "no", "null", "3.10", "010", "1e3", "0x10", "2024-01-01", "a b", "1x",
                     "class", "torch", "test", "con", "ddpgen", "data", "configs", "None"],
    "package_name": ["yes", "no", "null", "con"],
}  # fmt: skip


FEW = ["$(touch PWNED)", 'A "B" O\'C', "{{ 7*7 }}", "a\nb", "\x1b[31mred", "3.10", "no", "../../e"]


@pytest.mark.parametrize("texts", [FEW, pytest.param(NASTY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("question", ["project_name", "package_name"])
def test_nasty_answers_are_refused_or_come_back_as_they_were(
    ddpgen: Ddpgen, cwd: Path, question: str, texts: list[str]
) -> None:
    for number, text in enumerate(texts):
        (cwd / "a.yml").write_text(yaml.safe_dump({question: text}), encoding="utf-8")
        ways = [
            [f"--{question.replace('_', '-')}={text}"],
            [f"--set={question}={text}"],
            ["--answers", "a.yml"],
        ]
        result = ddpgen("new", "p", "--defaults", *ways[number % 3])
        assert not list(cwd.rglob("PWNED")), text
        assert (result.code == 0) is (text in ACCEPTED[question]), text
        if result.code == 0:
            check_project(cwd / "p", question, text)
            shutil.rmtree(cwd / "p")
        else:
            assert (result.code, result.out) == (1, ""), text
            assert result.err.startswith(f"ddpgen: {question} = "), text
            assert len(result.err.splitlines()) == 3, text
            assert result.err.replace("\n", "").isprintable(), text
        assert tree(cwd) == ["a.yml"], text


def check_project(project: Path, question: str, text: str) -> None:
    """Every file parses and the answer is what was typed."""
    answers = generate.read_project_answers(project)
    assert answers[question] == text
    package = str(answers["package_name"])
    assert package.isidentifier()
    assert (project / package / "train.py").is_file()
    for path in project.rglob("*"):
        if path.suffix == ".py":
            ast.parse(path.read_text(encoding="utf-8"))
        elif path.suffix in (".yaml", ".yml"):
            yaml.safe_load(path.read_text(encoding="utf-8"))
        elif path.suffix == ".sh":
            subprocess.run(["bash", "-n", path], check=True)


FOLDERS = [text for text in NASTY if text.strip() and "/" not in text and text not in (".", "..")]


@pytest.mark.parametrize("path", [*FOLDERS[::4], "torch", "class", "123"])
def test_nasty_folder_names_give_a_usable_project(cwd: Path, path: str) -> None:
    answers = generate.resolve(path, {})
    assert str(answers["package_name"]).isidentifier()
    assert str(answers["project_name"])[0].isalnum()
    # What was derived would also be accepted if somebody typed it.
    assert generate.resolve("other", answers) == answers
    assert not list(cwd.rglob("PWNED"))


# Odd environments


@pytest.mark.parametrize("home", ["/nonexistent", "/dev/null", ""])
def test_a_home_that_is_none(cwd: Path, home: str) -> None:
    odd = {"HOME": home, "XDG_CONFIG_HOME": home, "COPIER_SETTINGS_PATH": ""}
    process = start(["new", "p", "--defaults"], cwd=cwd, env=odd)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, (cwd / "p/pyproject.toml").exists()) == (0, True), err


def python_for(user: pwd.struct_passwd, env: Mapping[str, str]) -> str | None:
    """Find a Python with ddpgen's libraries that a user may start."""
    for python in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            command = [python, "-c", "import copier"]
            done = subprocess.run(
                command, user=user.pw_uid, group=user.pw_gid, cwd="/", env=env, capture_output=True
            )
            if done.returncode == 0:
                return python
    return None


def test_nobody_without_a_home_in_a_folder_of_others() -> None:
    """As in a container: another user, no home, only the target's folder may be written."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    user = pwd.getpwnam("nobody")
    libraries = f"{ROOT}:{sysconfig.get_path('purelib')}"
    odd = {"HOME": "/nonexistent", "COPIER_SETTINGS_PATH": "", "PYTHONPATH": libraries}
    env = {**os.environ, **odd}
    python = python_for(user, env)
    if python is None:
        pytest.skip("nobody may start no Python that finds ddpgen's libraries")

    def run(path: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-m", "ddpgen", "new", path, "--defaults"],
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=[],
            cwd="/",
            env=env,
            capture_output=True,
            text=True,
        )

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.chmod(0o755)
        (place / "own").mkdir()
        os.chown(place / "own", user.pw_uid, user.pw_gid)
        assert run(place / "own").returncode == 0
        assert (place / "own/pyproject.toml").stat().st_uid == user.pw_uid
        assert run(place / "own/deep/p").returncode == 0
        refused = run(place / "p")
        assert (refused.returncode, os.listdir(place)) == (1, ["own"])
        assert refused.stderr == (
            f"ddpgen: {place}/p cannot be written.\nThe folder {place} does not allow it.\n"
            "Type: another PATH, or change the permissions of that folder\n"
        )


def test_a_template_that_may_only_be_read(
    ddpgen: Ddpgen, cwd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "read-only"
    copy.mkdir()
    shutil.copy(ROOT / "copier.yml", copy)
    shutil.copytree(ROOT / "template", copy / "template")
    before = contents(copy)
    for path in copy.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    monkeypatch.setattr(generate, "template_root", lambda: copy)
    assert ddpgen("new", "p", "--defaults").code == 0
    assert contents(copy) == before
    assert all(os.stat(path).st_mode & 0o200 for path in (cwd / "p").rglob("*"))


def test_a_template_with_leftovers_gives_a_clean_project(
    ddpgen: Ddpgen, cwd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip compiles the template's Python files when it installs a wheel."""
    copy = tmp_path / "compiled"
    copy.mkdir()
    shutil.copy(ROOT / "copier.yml", copy)
    shutil.copytree(ROOT / "template", copy / "template")
    cache = copy / "template/{{ package_name }}/__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "train.cpython-311.pyc").write_bytes(b"\0")
    monkeypatch.setattr(generate, "template_root", lambda: copy)
    ddpgen("new", "p", "--defaults")
    assert not [name for name in tree(cwd / "p") if "pyc" in name]


def test_two_at_the_same_time(cwd: Path) -> None:
    processes = [start(["new", "p", "--defaults"], cwd=cwd) for _ in range(2)]
    ended = [(process.communicate(timeout=60), process.returncode) for process in processes]
    assert sorted(code for _, code in ended) in ([0, 1], [0, 0]), ended
    assert os.listdir(cwd) == ["p"]


def test_time_does_not_matter(ddpgen: Ddpgen, cwd: Path) -> None:
    """The same answers give the same bytes."""
    ddpgen("new", "a/p", "--defaults")
    time.sleep(0.01)
    ddpgen("new", "b/p", "--defaults")
    assert contents(cwd / "a/p") == contents(cwd / "b/p")
