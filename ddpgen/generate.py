"""The only module that uses copier: it asks the questions and renders the template."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ddpgen import __version__, git, interrupts
from ddpgen.errors import UserError, show
from ddpgen.questions import Answer, load_questions, template_root
from ddpgen.store import SOURCE

ANSWERS_FILE = ".copier-answers.yml"
_NOT_WRITTEN = "The project could not be written."

Answers = Mapping[str, Answer]


def render(folder: Path, answers: Answers) -> dict[str, Answer]:
    """Write a project, taking the default of every question that has no answer.

    Args:
        folder: Does not exist yet. Names are derived from its last component.
        answers: Values by question name.

    Returns:
        The answers to all questions that apply.

    Raises:
        UserError: If an answer is not possible.
    """
    _copy(template_root(), folder, answers, defaults=True)
    _settle_files(folder)
    _record_source(folder / ANSWERS_FILE)
    return read_project_answers(folder)


def resolve(name: str, answers: Answers) -> dict[str, Answer]:
    """Return the answers to all questions that apply, without asking or writing anything.

    Args:
        name: The project folder's name, from which names are derived.
        answers: Values by question name; defaults are taken for the others.

    Raises:
        UserError: If an answer is not possible.
    """
    with _questions_alone() as template:
        folder = template / "out" / name
        _copy(template, folder, answers, defaults=True)
        return read_project_answers(folder)


def interview(name: str, answers: Answers, offered: Answers) -> dict[str, Answer]:
    """Let copier ask on the terminal what has no answer yet; return all answers that apply.

    Args:
        name: The project folder's name, from which names are derived.
        answers: Values by question name. These questions are not asked.
        offered: Defaults that fit this machine better than the template's.

    Raises:
        UserError: If an answer is not possible.
        KeyboardInterrupt: If the person leaves.
    """
    with _questions_alone() as template, _prompts_on_stderr():
        folder = template / "out" / name
        _copy(template, folder, answers, defaults=False, offered=offered)
        return read_project_answers(folder)


def update(folder: Path, tag: str, answers: Answers) -> None:
    """Let copier bring a project to a version of the template, where its answers file says it is.

    Args:
        folder: The project, in a git repository without changes.
        tag: The version.
        answers: Values by question name that replace the project's.

    Raises:
        UserError: If an answer is not possible, or the template is not found.
    """
    import copier

    recorded = read_project_answers(folder)
    with _errors_of_copier(answers, "The project could not be updated.", recorded), _git_alone():
        copier.run_update(
            folder,
            data=dict(answers),
            vcs_ref=tag,
            settings=copier.Settings(),
            defaults=True,
            overwrite=True,
            quiet=True,
            unsafe=False,
        )


def render_again(template: Path, folder: Path, answers: Answers) -> None:
    """Write the project of a template over a folder, which may hold the answers to take.

    Args:
        template: The folder with copier.yml.
        folder: Where the project is written, or just its answers file.
        answers: Values by question name that replace those in the folder.

    Raises:
        UserError: If an answer is not possible.
    """
    _copy(template, folder, answers, defaults=True, overwrite=True)


def read_record(folder: Path) -> dict[str, Answer]:
    """Read a project's answers file, with copier's own notes in it.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no answers file.
    """
    import yaml

    try:
        recorded = yaml.safe_load((folder / ANSWERS_FILE).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(recorded, dict) or not all(isinstance(key, str) for key in recorded):
        raise ValueError("It holds no answers")
    return recorded


def read_project_answers(folder: Path) -> dict[str, Answer]:
    """Read the answers that a project was made from."""
    return without_notes(read_record(folder))


def without_notes(record: Answers) -> dict[str, Answer]:
    """Leave out copier's own notes."""
    return {key: value for key, value in record.items() if not key.startswith("_")}


def is_ours(record: Answers) -> bool:
    """Tell whether an answers file is one of this template's; its source may be any URL."""
    return {"_src_path", "_commit", "project_name", "package_name", "starter"} <= set(record)


def made_by_ddpgen(folder: Path) -> bool:
    """Tell whether a folder is a project that ddpgen wrote."""
    try:
        return is_ours(read_record(folder))
    except (OSError, ValueError):
        return False


def _copy(
    template: Path,
    folder: Path,
    answers: Answers,
    *,
    defaults: bool,
    offered: Answers | None = None,
    overwrite: bool = False,
) -> None:
    import copier
    from plumbum import local

    # Without git on the path copier takes the template as a plain folder, also in a checkout,
    # and is much faster. An empty path would not do: it means the current folder.
    with (
        _errors_of_copier(answers),
        local.env(PATH=os.devnull),
    ):
        copier.run_copy(
            str(template),
            folder,
            data=dict(answers),
            user_defaults=dict(offered or {}),
            # The user's own copier settings would replace the template's defaults.
            settings=copier.Settings(),
            defaults=defaults,
            overwrite=overwrite,
            quiet=True,
            unsafe=False,
        )


@contextmanager
def _git_alone() -> Iterator[None]:
    """Keep people's git settings from what copier starts. It passes on both environments."""
    from plumbum import local

    before, alone = dict(os.environ), git.alone()
    try:
        os.environ.clear()
        os.environ.update(alone)
        with local.env():
            local.env.clear()
            local.env.update(alone)
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _errors_of_copier(
    answers: Answers, what: str = _NOT_WRITTEN, recorded: Answers | None = None
) -> Iterator[None]:
    from copier.errors import CopierError, InteractiveSessionError
    from plumbum import ProcessExecutionError

    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None
    except InteractiveSessionError:
        raise UserError(
            "The questions were not answered to the end.",
            "The input was closed.",
            "Type: the command again, or add --defaults",
        ) from None
    except (CopierError, ValueError, TypeError, OSError, ProcessExecutionError) as error:
        raise _translate(error, answers, what, recorded) from error


def _translate(
    error: Exception, answers: Answers, what: str = _NOT_WRITTEN, recorded: Answers | None = None
) -> UserError:
    text = " ".join(str(error).split())
    known = re.fullmatch(
        r"(?:Validation error for question|Invalid choice for) '(\w+)': (.*)", text
    )
    question = load_questions().get(known[1]) if known else None
    if known and recorded and known[1] in recorded and known[1] not in answers:
        return UserError(
            f"{known[1]} = {show(recorded[known[1]])} in {ANSWERS_FILE} is not possible.",
            known[2],
            f"Type: git log -p {ANSWERS_FILE}, and write it as it was",
        )
    if known and question:
        return question.refusal(answers.get(question.name, "the default"), known[2])
    return UserError(
        what,
        f"{text or type(error).__name__}",
        "Type: the command again with other answers, or another PATH",
    )


@contextmanager
def _questions_alone() -> Iterator[Path]:
    """Make a template of the questions and the answers file only: enough to ask, and quick."""
    with (
        interrupts.held(),
        tempfile.TemporaryDirectory(prefix="ddpgen-") as folder,
        interrupts.let_through(),
    ):
        root = Path(folder)
        shutil.copyfile(template_root() / "copier.yml", root / "copier.yml")
        (root / "template").mkdir()
        answers_file = root / "template" / "{{ _copier_conf.answers_file }}.jinja"
        answers_file.write_text("{{ _copier_answers | to_nice_yaml }}", encoding="utf-8")
        yield root


@contextmanager
def _prompts_on_stderr() -> Iterator[None]:
    """Leave stdout to the results, also when it is a file or a pipe."""
    import sys

    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.output import create_output

    if not sys.stderr.isatty():
        yield
        return
    with create_app_session(output=create_output(stdout=sys.stderr)):
        yield


def _settle_files(folder: Path) -> None:
    """Give all files LF and the modes that belong to them: wheels and other systems change both."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_dir():
            continue
        content = path.read_bytes()
        if b"\r\n" in content and b"\0" not in content:
            content = content.replace(b"\r\n", b"\n")
            path.write_bytes(content)
        path.chmod((0o777 if content.startswith(b"#!") else 0o666) & ~mask)


def _record_source(path: Path) -> None:
    """Replace copier's note of a temporary folder by the place where updates find the template."""
    record(path, _src_path=SOURCE, _commit=f"v{__version__}")


def record(path: Path, **notes: str) -> None:
    """Replace notes of copier's in an answers file."""
    import yaml

    text = path.read_text(encoding="utf-8")
    comments = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    recorded = yaml.safe_load(text) | notes
    # As copier's own filter to_nice_yaml writes it, so that an update changes no other line.
    body = yaml.dump(recorded, indent=4, allow_unicode=True, default_flow_style=False)
    path.write_text(comments + body, encoding="utf-8", newline="\n")
