"""`ddpgen update` and `ddpgen set`: copier's update, worked out beside the project.

A copy of the files that are the template's is updated in a temporary folder. What came of it is
shown, and then moved into the project in one step: a failure or Ctrl-C changes nothing.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddpgen import interrupts, merge, new, project, questions, store
from ddpgen.errors import UserError, show
from ddpgen.merge import Change
from ddpgen.project import Project
from ddpgen.questions import Answer, Questions
from ddpgen.store import Store

# What cannot change any more once people work with the files that it made.
_SETTLED = {
    "package_name": "Your own files are in the folder of that name, and import from it.",
    "starter": "It wrote model.py and data.py, which are yours since then.",
}


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    path: str = "."
    settings: Iterable[str] = ()
    dry_run: bool = False
    yes: bool = True


def update(request: Request) -> None:
    """Bring a project to this ddpgen's template, and say what was done.

    Raises:
        UserError: If it is not possible, and nothing was changed; or if conflicts are left.
        KeyboardInterrupt: If a signal arrived.
    """
    found = project.find(request.path, "ddpgen update PATH")
    given = questions.parse_settings(request.settings)

    def work_out(scratch: Path, history: Store) -> Change:
        return merge.work_out(scratch, found, history, history.tag, given)

    _refuse_settled(found, given)
    _carry_out(request, found, work_out)


def set_answers(request: Request) -> None:
    """Change answers of a project at the template's version that it has.

    Raises:
        UserError: If it is not possible, and nothing was changed; or if conflicts are left.
        KeyboardInterrupt: If a signal arrived.
    """
    found = project.find(request.path, "ddpgen set KEY=VALUE PATH")

    def work_out(scratch: Path, history: Store) -> Change:
        known = _questions_of(scratch, history, found.version)
        given = questions.parse_settings(request.settings, known)
        _refuse_settled(found, given)
        return merge.work_out(scratch, found, history, found.version, given, known)

    _carry_out(request, found, work_out)


def _carry_out(request: Request, found: Project, work_out: Callable[[Path, Store], Change]) -> None:
    """Check, work out, show, ask, and move into place."""
    done = False
    try:
        project.refuse_unfit(found)
        with _scratch() as scratch:
            history = _history(scratch)
            _refuse_unknown_version(found, history)
            change = work_out(scratch, history)
        if not _wanted(request, change):
            return
        # Meanwhile somebody may have worked on.
        project.refuse_unfit(found)
        with interrupts.held():
            merge.move_into_place(change)
            done = True
    except KeyboardInterrupt:
        if not done:
            print("Nothing was changed.", file=sys.stderr)
        raise
    print("\n".join([*_summary(change), *_ending(change)]))
    _refuse_conflicts(change)


@contextmanager
def _scratch() -> Iterator[Path]:
    """Give a temporary folder, in which all other temporary files are made too."""
    with (
        interrupts.held(),
        tempfile.TemporaryDirectory(prefix="ddpgen-") as folder,
        interrupts.let_through(),
    ):
        before = tempfile.tempdir
        tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before


def _history(scratch: Path) -> Store:
    """Return the store; one for this time only if there is no home to keep it in."""
    try:
        return store.sync()
    except UserError as error:
        print(f"Note: {error.what} {error.why} This update goes on without.", file=sys.stderr)
        return store.sync(scratch / "store")


def _refuse_settled(found: Project, given: Mapping[str, Answer]) -> None:
    for name, why in _SETTLED.items():
        if name in given and given[name] != found.answers.get(name):
            raise UserError(
                f"{name} = {show(given[name])} is not possible any more: it is "
                f"{show(found.answers.get(name, 'not known'))}.",
                why,
                f"Type: ddpgen new ANOTHER_PATH --{name.replace('_', '-')} "
                f"{shlex.quote(str(given[name]))}, for another project",
            )


def _refuse_unknown_version(found: Project, history: Store) -> None:
    if store.version(found.version) > store.version(history.tag):
        raise UserError(
            f"{found.name} has the template {found.version}, which is newer than this "
            f"ddpgen's: {history.tag}.",
            "An older ddpgen cannot know it.",
            "Type: python -m pip install --upgrade ddpgen",
        )
    if found.version not in history.tags:
        raise UserError(
            f"The template {found.version}, from which {found.name} was made, is not known "
            "here.",
            f"{show(history.bundle)} has {', '.join(sorted(history.tags, key=store.version))}.",
            "Type: ddpgen sync, with the ddpgen that made the project; if that was an edited "
            "checkout, on the machine where it is",
        )


def _questions_of(scratch: Path, history: Store, version: str) -> Questions:
    if version == history.tag:
        return questions.load_questions()
    template = store.export(history, version, scratch / "questions")
    return questions.questions_in(questions.load_config(template))


def _wanted(request: Request, change: Change) -> bool:
    """Show a change, and tell whether it is to be made."""
    if change.empty:
        print(
            f"{change.project.name} has the template {change.version} and these answers. "
            "Nothing to change."
        )
        return False
    if request.dry_run:
        print(change.diff, end="")
    if request.dry_run or not request.yes:
        print("\n".join([*_summary(change), ""]), file=sys.stderr)
    if request.dry_run or not (request.yes or _agreed()):
        print("Nothing was changed.", file=sys.stderr)
        return False
    return True


def _agreed() -> bool:
    """Ask for the last word on a terminal."""
    if not new.on_terminal():
        return True
    import click

    try:
        return click.confirm("Change them?", default=True, err=True)
    except click.Abort:
        raise KeyboardInterrupt from None


def _summary(change: Change) -> list[str]:
    """List what changes: the files, then the answers."""
    old = change.project.version
    versions = f"{old} -> {change.version}" if old != change.version else old
    lines = [f"{change.project.name}, template {versions}:"]
    for name in sorted([*change.written, *change.removed]):
        lines += [f"  {_kind(change, name):8}  {show(name)}"]
    return lines + _answers(change)


def _kind(change: Change, name: Path) -> str:
    if name in change.conflicts:
        return "conflict"
    if name in change.removed:
        return "removed"
    return "changed" if name in change.before else "new"


def _answers(change: Change) -> list[str]:
    before, after = change.project.answers, change.answers
    lines = []
    for name in [*after, *(name for name in before if name not in after)]:
        if name not in before:
            lines += [f"  answer    {name} = {show(after[name])} (new)"]
        elif name not in after:
            lines += [f"  answer    {name} = {show(before[name])} (not asked any more)"]
        elif before[name] != after[name]:
            lines += [f"  answer    {name} = {show(after[name])} (was {show(before[name])})"]
    return lines


def _ending(change: Change) -> list[str]:
    """Write what to do next, and how to take all of it back."""
    lines = []
    if change.lost:
        lines += ["", "Nothing is left of your edits in these files. To have one as it was:"]
        for name in change.lost:
            lines += [f"  {change.project.git('checkout', 'HEAD', '--', str(name))}"]
    return [
        *lines,
        "",
        "To see it, and to take all of it back:",
        f"  {change.project.git('diff')}",
        f"  {undo(change)}",
    ]


def undo(change: Change) -> str:
    """Write the command that restores the project as it was."""
    steps = [change.project.git("checkout", "-q", "HEAD", "--", ".")]
    if change.added:
        names = map(str, change.added)
        steps += [change.project.git("clean", "-fdqx", "--", *names)]
    return " && ".join(steps)


def _refuse_conflicts(change: Change) -> None:
    """Say which files need a hand.

    Raises:
        UserError: If there are any.
    """
    left = [*change.conflicts, *change.rejected]
    if not left:
        return
    names = ", ".join(show(name) for name in left)
    place = change.project.git("add", *map(str, left))
    raise UserError(
        f"{'A conflict is' if len(left) == 1 else 'Conflicts are'} left in {names}.",
        "You and the template changed the same lines. Both stand there, between <<<<<<< and >>>>>>>"
        + ("; what fits nowhere is in the .rej files." if change.rejected else "."),
        f"Type: {place}, after choosing; or the last command above, to take all of it back",
    )
