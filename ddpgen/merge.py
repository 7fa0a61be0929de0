"""What an update does to a project: worked out beside it, then moved into it in one step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddpgen import generate, git, project, questions, store, target
from ddpgen.errors import UserError
from ddpgen.generate import ANSWERS_FILE
from ddpgen.project import Files, Project
from ddpgen.questions import Answer, Questions
from ddpgen.store import Store


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


def work_out(
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


def move_into_place(change: Change) -> None:
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
