"""The command line itself: what exists, how errors end, and what is imported."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import ddpgen as package
from ddpgen import commands, new, options, usage
from ddpgen.errors import UserError

from .conftest import ROOT, Ddpgen, Result

HEAVY = {"copier", "torch", "questionary", "rich", "yaml", "jinja2", "prompt_toolkit", "plumbum"}
# Scripts of other people hold these names. Adding is free; a change here breaks them.
SURFACE = {
    "new": [
        "PATH", "--answers", "--defaults", "--dry-run", "--force", "--help", "--set",
        "--template-url", "--yes",
        "--accumulation-steps", "--checkpoint", "--ci", "--gpus-per-node", "--keep-checkpoints",
        "--launchers", "--micro-batch-size", "--no-ci", "--no-save-best", "--no-sync-batchnorm",
        "--nodes", "--package-name", "--precision", "--project-name", "--save-best",
        "--save-every-steps", "--starter", "--sync-batchnorm", "--tracker",
    ],
    "update": ["PATH", "--dry-run", "--help", "--set"],
    "set": ["KEY=VALUE... [PATH]", "--dry-run", "--help", "--yes"],
    "launch": [
        "TARGET", "[PATH] [-- ARGUMENTS]",
        "--account", "--dry-run", "--env", "--gpus-per-node", "--help",
        "--hostfile", "--hosts", "--image", "--interface", "--max-restarts", "--module",
        "--namespace", "--nodes", "--output", "--partition", "--port", "--script", "--setup",
        "--time",
    ],
    "options": ["--help", "--json"],
    "demo": ["PATH", "--help"],
    "sync": ["--help"],
}  # fmt: skip


def test_the_surface_is_frozen() -> None:
    context = click.Context(commands.program)
    surface = {}
    for name, command in commands.program.commands.items():
        names = []
        for param in command.get_params(context):
            known = isinstance(param, click.Option)
            names += [*param.opts, *param.secondary_opts] if known else [param.human_readable_name]
        surface[name] = sorted(names)
    assert surface == {name: sorted(names) for name, names in SURFACE.items()}


# Who may import whom: a module may import those of the lines above its own.
LAYERS = [
    {"errors", "usage", "interrupts"},
    {"git", "questions", "topology"},
    {"store", "target", "options", "launch_files", "launch_values"},
    {"generate"},
    {"project", "new"},
    {"merge", "demo", "launch"},
    {"update"},
    {"commands"},
    {"cli"},
    {"__main__"},
]


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports, anywhere in it, as full names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_point_one_way() -> None:
    files = sorted((ROOT / "ddpgen").glob("*.py"))
    modules = {path.stem for path in files} - {"__init__"}
    assert set().union(*LAYERS) == modules
    for level, layer in enumerate(LAYERS):
        above = set().union(*LAYERS[:level])
        for name in layer:
            found = imports(ROOT / f"ddpgen/{name}.py")
            ours = {module.split(".")[1] for module in found if module.startswith("ddpgen.")}
            assert ours & modules <= above, name
            assert "copier" not in found or name == "generate", name
            # It asks what copier knows nothing of.
            assert "questionary" not in found or name == "launch", name


@pytest.mark.parametrize("argv", ["--help", "--version", "", "nwe", "--foo", "new", "demo --help"])
def test_nothing_heavy_is_imported_to_explain(argv: str) -> None:
    code = (
        "import sys; from ddpgen.cli import main; main(sys.argv[1:]); "
        "print(*(name for name in sys.modules if '.' not in name), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv.split()], capture_output=True, text=True
    )
    loaded = done.stderr.splitlines()[-1].split()
    heavy = HEAVY - {"yaml"} if argv == "new" else HEAVY
    assert heavy & set(loaded) == set()
    if argv in ("--help", "--version", ""):
        # What takes longer than Python's own start.
        assert {"click", "inspect", "typing", "re", "signal", "subprocess"} & set(loaded) == set()


@pytest.mark.parametrize("argv", [["--version"], ["--version", "--version"]])
def test_version(ddpgen: Ddpgen, argv: list[str]) -> None:
    assert ddpgen(*argv) == Result(0, f"ddpgen {package.__version__}\n", "")


@pytest.mark.parametrize("argv", [[], ["--help"], ["--help", "--help"]])
def test_help(ddpgen: Ddpgen, argv: list[str]) -> None:
    """The short way that imports nothing, and click's own."""
    assert ddpgen(*argv) == Result(
        0,
        "Usage: ddpgen COMMAND ...\n\n"
        "Writes complete, plain PyTorch DistributedDataParallel projects.\n\n"
        "Commands:\n"
        "  new      Write a project into a new folder, PATH.\n"
        "  update   Bring a project to this ddpgen's template, with your edits kept.\n"
        "  set      Change answers of a project.\n"
        "  launch   Write a launch file for more machines, also for a script of your own.\n"
        "  options  Explain every question and its choices.\n"
        "  demo     Write a default project and train it.\n"
        "  sync     Put the template where plain `copier update` finds it.\n\n"
        "ddpgen COMMAND --help shows what it takes; ddpgen --version, which ddpgen this is.\n",
        "",
    )
    assert list(usage.COMMANDS) == list(commands.program.commands)


def test_help_of_new_lists_every_question(ddpgen: Ddpgen) -> None:
    result = ddpgen("new", "--help")
    assert (result.code, result.err) == (0, "")
    questions, own = result.out.split("\nOptions:\n")
    assert "  --precision fp32|bf16|fp16      Number format of the forward pass." in questions
    assert "  --dry-run           Show ledger and files, write nothing." in own


@pytest.mark.parametrize(
    ("argv", "what", "fix"),
    [
        ("nwe p", "No such command: nwe.", "Did you mean new?"),
        ("xyz", "No such command: xyz.", "Type: ddpgen --help"),
        ("new p --ndoes 2", "No such option: --ndoes.", "Did you mean --nodes?"),
        ("new p --force-it", "No such option: --force-it.", "Did you mean --force?"),
        ("new p --qqqq", "No such option: --qqqq.", "Type: ddpgen new --help"),
        ("options --josn", "No such option: --josn.", "Did you mean --json?"),
        ("--foo", "No such option: --foo.", "Type: ddpgen --help"),
        ("new", "PATH is missing.", "Type: ddpgen new --help"),
    ],
)
def test_wrong_usage(ddpgen: Ddpgen, argv: str, what: str, fix: str) -> None:
    result = ddpgen(*argv.split())
    command = next((f"ddpgen {name}" for name in SURFACE if argv.split()[0] == name), "ddpgen")
    assert (result.code, result.out) == (2, "")
    assert result.err == f"ddpgen: {what}\n{command} cannot be started like this.\n{fix}\n"


@pytest.mark.parametrize("argv", ["new p q", "new p --nodes", "new p --yes=1", "demo a b"])
def test_other_wrong_usage_is_three_lines_too(ddpgen: Ddpgen, argv: str) -> None:
    result = ddpgen(*argv.split())
    assert (result.code, result.out) == (2, "")
    assert len(result.err.splitlines()) == 3


def raiser(error: BaseException) -> Callable[..., str]:
    def function(*_: object) -> str:
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("a.", "b.", "c"), 1, "ddpgen: a.\nb.\nc\n"),
        (UserError("a.", "b.", "c", code=2), 2, "ddpgen: a.\nb.\nc\n"),
        (KeyboardInterrupt(), 130, "\nddpgen: interrupted.\n"),
        (click.Abort(), 130, "ddpgen: interrupted.\n"),
        (
            PermissionError(13, "Permission denied", "x"),
            1,
            "ddpgen: Permission denied: x.\nThe system refused it.\n"
            "Type: the command again when that is mended\n",
        ),
    ],
)
def test_errors_become_exit_codes(
    ddpgen: Ddpgen,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(options, "as_text", raiser(error))
    result = ddpgen("options")
    assert (result.code, result.out, result.err) == (code, "", message)


def test_a_bug_is_not_hidden(ddpgen: Ddpgen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "as_text", raiser(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        ddpgen("options")


@pytest.mark.parametrize("argv", ["options", "new p --defaults --dry-run", "--help"])
def test_a_reader_that_has_gone(cwd: Path, argv: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "ddpgen", *argv.split()],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(cwd: Path, closed: str) -> None:
    command = f'"$0" -m ddpgen new p --defaults {closed}'
    done = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (cwd / "p/pyproject.toml").exists()


def test_a_terminal_that_cannot_show_a_name(cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ddpgen", "new", "\u00fc\u4e2d", "--defaults", "--yes"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert b"files to \\xfc\\u4e2d. Next:" in done.stdout


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_command_with_130(
    ddpgen: Ddpgen, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    monkeypatch.setattr(options, "as_text", lambda: os.kill(os.getpid(), sent))
    before = signal.getsignal(sent)
    result = ddpgen("options")
    assert (result.code, result.err) == (130, "\nddpgen: interrupted.\n")
    assert signal.getsignal(sent) is before


def test_nohup_stays_in_force(ddpgen: Ddpgen, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang_up() -> str:
        os.kill(os.getpid(), signal.SIGHUP)
        return "still here"

    monkeypatch.setattr(options, "as_text", hang_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ddpgen("options").out == "still here\n"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_there_is_no_terminal_in_tests() -> None:
    assert new.on_terminal() is False
