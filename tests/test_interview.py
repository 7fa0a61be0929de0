"""The questions on a terminal: in this process, and through a real pseudo-terminal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pexpect  # type: ignore[import-untyped]
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from ddpgen import generate, new, questions

from .conftest import Ddpgen, tree

ENTER, DOWN, CLEAR, CTRL_C, CTRL_D = "\r", "\x1b[B", "\x15", "\x03", "\x04"


@pytest.fixture
def keys(terminal: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Type on a terminal that is none; the last confirmation is a yes, and there are no GPUs."""
    monkeypatch.setattr(click, "confirm", lambda *_, **__: True)
    monkeypatch.setattr(new, "visible_gpus", lambda: 0)
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield _typist(pipe)


def _typist(pipe: PipeInput) -> Callable[[str], None]:
    return lambda text: pipe.send_text(text)


def made(path: str) -> dict[str, object]:
    return dict(generate.read_project_answers(Path(path)))


def test_enter_takes_every_default(ddpgen: Ddpgen, cwd: Path, keys: Callable[[str], None]) -> None:
    ddpgen("new", "d", "--defaults", "--yes")
    keys(ENTER * 15)
    result = ddpgen("new", "p")
    assert result.code == 0, result.err
    assert result.err.startswith(
        "Enter takes the value shown. Ctrl-C leaves, and nothing is written.\n\n"
    )
    assert made("p") == {**made("d"), "project_name": "p", "package_name": "p"}


def test_every_kind_of_answer(ddpgen: Ddpgen, cwd: Path, keys: Callable[[str], None]) -> None:
    keys(f"{CLEAR}3.10{ENTER}")  # project_name
    keys(f"{CLEAR}mine{ENTER}")  # package_name
    keys(DOWN + ENTER)  # starter: text, so that sync_batchnorm is not asked
    keys(f"{CLEAR}2{ENTER}{ENTER}{ENTER}{ENTER}")  # nodes; three defaults
    keys(DOWN + ENTER)  # precision: bf16
    keys(DOWN + ENTER)  # checkpoint: steps, so that save_every_steps is asked
    keys(f"{CLEAR}7{ENTER}{ENTER}n{ENTER}")  # save_every_steps, keep, save_best, tracker
    keys(f"{DOWN} {ENTER}y")  # launchers: slurm; ci
    result = ddpgen("new", "p")
    assert result.code == 0, result.err
    assert made("p") == {
        "project_name": "3.10",
        "package_name": "mine",
        "starter": "text",
        "nodes": 2,
        "gpus_per_node": 2,
        "micro_batch_size": 32,
        "accumulation_steps": 1,
        "precision": "bf16",
        "checkpoint": "steps",
        "save_every_steps": 7,
        "keep_checkpoints": 3,
        "save_best": False,
        "tracker": "none",
        "launchers": ["slurm"],
        "ci": True,
    }


def test_what_was_given_is_not_asked(
    ddpgen: Ddpgen, cwd: Path, keys: Callable[[str], None]
) -> None:
    ddpgen("new", "d", "--defaults", "--yes")
    keys(f"{CLEAR}3{ENTER}")
    file = "d/.copier-answers.yml"
    lines = [line for line in Path(file).read_text().splitlines() if "nodes:" not in line]
    (cwd / "a.yml").write_text("\n".join(lines))
    result = ddpgen("new", "p", "--answers", "a.yml", "--precision", "bf16")
    assert result.code == 0, result.err
    assert made("p") == {**made("d"), "nodes": 3, "precision": "bf16"}


def test_a_wrong_answer_is_asked_again(
    ddpgen: Ddpgen, cwd: Path, keys: Callable[[str], None]
) -> None:
    keys(ENTER * 3 + f"{CLEAR}0{ENTER}{CLEAR}abc{ENTER}{CLEAR}4{ENTER}" + ENTER * 11)
    assert ddpgen("new", "p").code == 0
    assert made("p")["nodes"] == 4


def test_wrong_flags_are_refused_before_the_first_question(
    ddpgen: Ddpgen, cwd: Path, keys: Callable[[str], None]
) -> None:
    result = ddpgen("new", "p", "--nodes", "0")
    assert (result.code, result.err) == (
        1,
        "ddpgen: nodes = 0 is not possible.\nUse a number from 1 to 100000.\nType: --nodes N\n",
    )
    result = ddpgen("new", "p", "--starter", "text", "--sync-batchnorm")
    assert result.err.startswith("ddpgen: sync_batchnorm = true has no meaning here.\n")
    (cwd / "full").mkdir()
    (cwd / "full/x").touch()
    assert ddpgen("new", "full").err.startswith("ddpgen: full is not empty: it holds x.\n")
    assert sorted(os.listdir(cwd)) == ["full"]


def test_a_flag_may_wait_for_an_answer(
    ddpgen: Ddpgen, cwd: Path, keys: Callable[[str], None]
) -> None:
    keys(ENTER * 9 + DOWN + ENTER * 7)  # checkpoint: steps
    assert ddpgen("new", "p", "--save-every-steps", "9").code == 0
    assert made("p")["save_every_steps"] == 9


def test_a_flag_that_the_answers_make_idle_is_left_out_aloud(
    ddpgen: Ddpgen, cwd: Path, keys: Callable[[str], None]
) -> None:
    """An error here would throw all answers away."""
    keys(ENTER * 15)
    result = ddpgen("new", "p", "--save-every-steps", "9")
    assert result.code == 0, result.err
    assert (
        "Left out save_every_steps = 9: it is asked only when checkpoint == 'steps'.\n"
        in result.err
    )
    assert "save_every_steps" not in made("p")


@pytest.mark.parametrize(("gpus", "default"), [(0, 2), (1, 1), (8, 8)])
def test_the_gpus_of_this_machine_are_offered(
    ddpgen: Ddpgen,
    cwd: Path,
    keys: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    default: int,
) -> None:
    monkeypatch.setattr(new, "visible_gpus", lambda: gpus)
    keys(ENTER * 15)
    assert ddpgen("new", "p").code == 0
    assert made("p")["gpus_per_node"] == default


@pytest.mark.parametrize("before", [0, 7, 13])
def test_ctrl_c_at_a_question(
    ddpgen: Ddpgen, cwd: Path, keys: Callable[[str], None], before: int
) -> None:
    keys(ENTER * before + CTRL_C)
    result = ddpgen("new", "deep/p")
    assert (result.code, result.out, tree(cwd)) == (130, "", [])
    assert result.err.endswith("Nothing was written.\n\nddpgen: interrupted.\n")


def test_the_terminal_closes_at_a_question(
    ddpgen: Ddpgen, cwd: Path, keys: Callable[[str], None]
) -> None:
    keys(ENTER + CLEAR + CTRL_D)
    result = ddpgen("new", "p")
    assert (result.code, tree(cwd)) == (1, [])
    assert result.err.endswith(
        "ddpgen: The questions were not answered to the end.\nThe input was closed.\n"
        "Type: the command again, or add --defaults\n"
    )


# A real terminal


def spawn(cwd: Path, *argv: str, program: str = sys.executable) -> pexpect.spawn:
    return pexpect.spawn(
        program,
        list(argv),
        cwd=str(cwd),
        # This terminal does not tell where its cursor is; prompts would wait two seconds for that.
        env={**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1"},
        dimensions=(40, 120),
        encoding="utf-8",
        timeout=30,
    )


def test_all_questions_on_a_real_terminal(cwd: Path) -> None:
    child = spawn(cwd, "-m", "ddpgen", "new", "my project")
    for question in questions.visible():
        if question.name == "save_every_steps":
            continue
        child.expect_exact(question.help[:50])
        if question.name == "gpus_per_node":
            child.send(CLEAR + "4")
        child.send("n" if question.type == "bool" else ENTER)
    child.expect_exact("4 GPUs per node")
    child.expect_exact("configs/train.yaml")
    child.expect_exact("Write them? [Y/n]:")
    child.send("y" + ENTER)
    child.expect_exact("cd 'my project'")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    answers = made(str(cwd / "my project"))
    assert (answers["gpus_per_node"], answers["save_best"]) == (4, False)
    assert os.listdir(cwd) == ["my project"]


@pytest.mark.parametrize("way", ["key", "SIGINT", "SIGTERM"])
def test_leaving_in_the_middle_on_a_real_terminal(cwd: Path, way: str) -> None:
    child = spawn(cwd, "-m", "ddpgen", "new", "p")
    for _ in range(4):
        child.send(ENTER)
    child.expect_exact(questions.find("gpus_per_node").help[:50])
    if way == "key":
        child.send(CTRL_C)
    else:
        child.kill(getattr(signal, way))
    child.expect_exact("Nothing was written.")
    child.expect_exact("ddpgen: interrupted.")
    child.expect(pexpect.EOF)
    child.close()
    assert (child.exitstatus, tree(cwd)) == (130, [])


def test_leaving_at_the_last_word_on_a_real_terminal(cwd: Path) -> None:
    child = spawn(cwd, "-m", "ddpgen", "new", "p", "--defaults")
    child.expect_exact("Write them? [Y/n]:")
    child.send(CTRL_C)
    child.expect_exact("Nothing was written.")
    child.expect(pexpect.EOF)
    child.close()
    assert (child.exitstatus, tree(cwd)) == (130, [])


def test_results_can_be_redirected_while_questions_are_asked(cwd: Path) -> None:
    command = f"{sys.executable} -m ddpgen new p >result.txt"
    child = spawn(cwd, "-c", command, program="/bin/sh")
    for _ in range(15):
        child.send(ENTER)
    child.expect_exact("Write them? [Y/n]:")
    child.send(ENTER)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert (cwd / "result.txt").read_text().splitlines()[1:] == [
        "  cd p",
        "  python -m pip install -e .",
        "  bash launch/local.sh",
    ]


def test_ctrl_c_reaches_a_demo_once(cwd: Path) -> None:
    """The terminal sends it to everybody in its session: the training would get it twice."""
    training = (
        "import pathlib, signal, time\n"
        "def note(*_):\n with open('signals', 'a') as file: file.write('x')\n"
        "signal.signal(signal.SIGINT, note); print('started', flush=True)\n"
        "while not pathlib.Path('signals').exists(): time.sleep(0.05)\n"
        "time.sleep(0.5)"
    )
    program = (
        "import sys\nfrom ddpgen import cli, demo\n"
        f"demo.NEEDS, demo._command = {{}}, lambda path: [sys.executable, '-c', {training!r}]\n"
        "sys.exit(cli.main(['demo', 'p']))"
    )
    child = spawn(cwd, "-c", program)
    child.expect_exact("started\r\n")
    child.send(CTRL_C)
    child.expect_exact("ddpgen: interrupted.")
    child.expect(pexpect.EOF)
    child.close()
    assert (child.exitstatus, (cwd / "p/signals").read_text()) == (130, "x")
