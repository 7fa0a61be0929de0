"""`ddpgen update` and `ddpgen set`: copier's update, worked out beside the project.

A copy of the files that are the template's is updated in a temporary folder. What came of it is
shown, and then moved into the project in one step: a failure or Ctrl-C changes nothing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddpgen import generate, git, interrupts, new, project, questions, store, target
from ddpgen.errors import UserError, show
from ddpgen.generate import ANSWERS_FILE
from ddpgen.project import Files, Project
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


@dataclass(frozen=True)
class Change:
    """What an update does to a project.

    Attributes:
        project: As it is.
        version: The template's version that it will have.
        answers: What it will be made from.
        before: Those of its files that the template has or had, as they are.
        written: Files that are new or different.
        added: The topmost files and folders that are new.
        removed: Files that the template no longer has.
        lost: Files of which no edit is left.
        conflicts: Files in which both versions of a place stand.
        rejected: Files with parts of the old ones that fit nowhere.
        unmerged: What git notes of the conflicts: mode, content, stage and file.
        diff: All of it, as git shows it.
    """

    project: Project
    version: str
    answers: Mapping[str, Answer]
    before: Files
    written: Files
    added: list[Path]
    removed: list[Path]
    lost: list[Path]
    conflicts: list[Path]
    rejected: list[Path]
    unmerged: list[tuple[str, bytes, str, str]]
    diff: str

    @property
    def empty(self) -> bool:
        """Tell whether nothing changes."""
        return not self.written and not self.removed


def update(request: Request) -> None:
    """Bring a project to this ddpgen's template, and say what was done.

    Raises:
        UserError: If it is not possible, and nothing was changed; or if conflicts are left.
        KeyboardInterrupt: If a signal arrived.
    """
    found = project.find(request.path, "ddpgen update PATH")
    given = questions.parse_settings(request.settings)

    def work_out(scratch: Path, history: Store) -> Change:
        return _work_out(scratch, found, history, history.tag, given)

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
        return _work_out(scratch, found, history, found.version, given, known)

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
            _move_into_place(change)
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


def _work_out(
    scratch: Path,
    found: Project,
    history: Store,
    version: str,
    given: Mapping[str, Answer],
    known: Questions | None = None,
) -> Change:
    """Update a copy of the project's files that are the template's, and compare."""
    old = _rendered(scratch / "old", found, history, found.version, {})
    new_ = _rendered(scratch / "new", found, history, version, given)
    before = project.kept_files(found, set(old) | set(new_))
    copy = scratch / "copy" / found.path.name
    project.write(copy, before)
    _commit(copy, "As it is")
    start = git.run(copy, "rev-parse", "HEAD").decode().strip()
    # copier takes the template from the place that the project names.
    generate.record(copy / ANSWERS_FILE, _src_path=str(history.bundle))
    _commit(copy, "With the template's place on this machine")
    generate.update(copy, version, given)
    generate.record(copy / ANSWERS_FILE, _src_path=found.source)
    answers = generate.read_project_answers(copy)
    questions.refuse_idle(given, answers, known=known)
    unmerged = _unmerged(copy)
    after = project.read(copy, _files(copy))
    written = {name: file for name, file in after.items() if before.get(name) != file}
    git.run(copy, "add", "--force", "--all")
    return Change(
        project=found,
        version=version,
        answers=answers,
        before=before,
        written=written,
        added=sorted({_topmost_new(found.path, name) for name in written if name not in before}),
        removed=sorted(set(before) - set(after)),
        lost=_lost(old, new_, before, after),
        conflicts=sorted({Path(name) for *_, name in unmerged}),
        rejected=sorted(name for name in written if name.suffix == ".rej" and name not in before),
        unmerged=unmerged,
        diff=git.run(copy, "diff", "--cached", start).decode(errors="replace"),
    )


def _rendered(
    folder: Path, found: Project, history: Store, version: str, given: Mapping[str, Answer]
) -> Files:
    """Render a version of the template with the project's answers, as if nobody had edited it."""
    template = store.export(history, version, folder / "template")
    place = folder / "project" / found.path.name
    place.mkdir(parents=True)
    shutil.copyfile(found.path / ANSWERS_FILE, place / ANSWERS_FILE)
    generate.render_again(template, place, given)
    return project.read(place, target.files_in(place))


def _lost(old: Files, new_: Files, before: Files, after: Files) -> list[Path]:
    """Name the files that somebody had edited and that are now just as the template has them."""
    return [
        name
        for name, file in before.items()
        if name != Path(ANSWERS_FILE)
        and file not in (old.get(name), after.get(name))
        and after.get(name) == new_.get(name)
    ]


def _commit(copy: Path, message: str) -> None:
    if not (copy / ".git").exists():
        git.run(copy, "init", "--quiet", "--template=")
    git.run(copy, "add", "--force", "--all")
    git.run(copy, "commit", "--quiet", "--allow-empty", "--message", message)


def _files(copy: Path) -> list[Path]:
    return [name for name in target.files_in(copy) if name.parts[0] != ".git"]


def _unmerged(copy: Path) -> list[tuple[str, bytes, str, str]]:
    """Read what copier noted for git in the files with conflicts."""
    entries = []
    for line in git.words(git.run(copy, "ls-files", "--unmerged", "-z")):
        notes, _, name = line.partition("\t")
        mode, hash_, stage = notes.split()
        entries.append((mode, git.run(copy, "cat-file", "blob", hash_), stage, name))
    return entries


def _topmost_new(folder: Path, name: Path) -> Path:
    """Return what has to be removed to take a new file back: it, or the new folder it is in."""
    parts = [*reversed(name.parents[:-1]), name]
    return next((part for part in parts if not os.path.lexists(folder / part)), name)


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


def _move_into_place(change: Change) -> None:
    """Change the project in one step. Call it inside `held()`."""
    place = target.Target(change.project.typed, change.project.path, exists=True)
    _refuse_obstacles(change)
    with target.stage(place) as staged:
        project.write(staged, change.written)
        for name in change.written:
            _keep_mode(place.path / name, staged / name)
        target.commit(place, staged, change.removed)
        _note_conflicts(change)


def _refuse_obstacles(change: Change) -> None:
    """Refuse to replace what git does not keep, and to write through links."""
    place = change.project.path
    obstacles = {
        part
        for name in change.written
        if name not in change.before
        for part in (*name.parents[:-1], name)
        if os.path.lexists(place / part)
        and (part == name or (place / part).is_symlink() or not (place / part).is_dir())
    }
    if obstacles:
        raise UserError(
            f"The template has new files where something of yours is: "
            f"{target.listed(sorted(obstacles))}.",
            "It is a link or a file that git ignores, and could not be brought back.",
            "Type: the same again when it is moved away; nothing was changed",
        )


def _keep_mode(old: Path, new_file: Path) -> None:
    """Keep who may read and write a file; whether it can be started comes from the template."""
    if old.is_file():
        mode = old.stat().st_mode & 0o666
        may_start = (mode & 0o444) >> 2 if new_file.stat().st_mode & 0o100 else 0
        new_file.chmod(mode | may_start)


def _note_conflicts(change: Change) -> None:
    """Let git know of the conflicts, so that it does not commit them by accident."""
    if not change.unmerged:
        return
    folder = change.project.path
    prefix = git.in_project(folder, "rev-parse", "--show-prefix").decode().strip("\n")
    lines = [f"0 {'0' * 40}\t{prefix}{name}" for name in {name for *_, name in change.unmerged}]
    for mode, content, stage, name in change.unmerged:
        written = git.in_project(
            folder, "hash-object", "-w", "--no-filters", "--stdin", given=content
        )
        lines.append(f"{mode} {written.decode().strip()} {stage}\t{prefix}{name}")
    stream = "".join(f"{line}\0" for line in lines)
    git.in_project(folder, "update-index", "-z", "--index-info", given=os.fsencode(stream))


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
