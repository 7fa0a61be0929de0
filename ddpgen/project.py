"""A project that exists: where it is, what it was made from, and whether it may be changed."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddpgen import generate, git
from ddpgen.errors import UserError, show
from ddpgen.generate import ANSWERS_FILE
from ddpgen.questions import Answer
from ddpgen.target import listed

_VERSION = re.compile(r"v[0-9]+\.[0-9]+\.[0-9]+(\.post[0-9]+)?")


@dataclass(frozen=True)
class File:
    """What git keeps of a file."""

    content: bytes
    executable: bool


Files = dict[Path, File]


@dataclass(frozen=True)
class Project:
    """A project that ddpgen wrote.

    Attributes:
        path: Its folder, absolute.
        typed: The same as a person would type it here.
        answers: What it was made from.
        source: Where plain copier finds the template.
        version: The template's version that it has.
    """

    path: Path
    typed: str
    answers: Mapping[str, Answer]
    source: str
    version: str

    @property
    def name(self) -> str:
        """Return its name for messages."""
        return show(self.path.name)

    def git(self, *arguments: str) -> str:
        """Write a git command that works from here, as pasted."""
        place = [] if self.typed == "." else ["-C", self.typed]
        return shlex.join(["git", *place, *arguments])


def find(typed: str, command: str) -> Project:
    """Return the project that a folder is or lies in.

    Args:
        typed: The folder, as it was typed.
        command: What to type with another folder.

    Raises:
        UserError: If it is no project of ddpgen.
    """
    start = Path(typed).absolute()
    if not start.is_dir():
        raise UserError(
            f"{show(typed)} is no folder.",
            "A project is one.",
            f"Type: {command}, with the folder of a project",
        )
    folder = _upwards(start.resolve())
    if folder is None:
        raise UserError(
            f"{show(typed)} is no project of ddpgen.",
            f"There is no {ANSWERS_FILE}, which says what a project was made from.",
            f"Type: {command}, with the folder of a project; "
            f"or git checkout HEAD -- {ANSWERS_FILE}, if it was deleted",
        )
    record = _record(folder, command)
    typed_now = os.path.relpath(folder)
    return Project(
        path=folder,
        # From far away the whole path is easier to read.
        typed=str(folder) if typed_now.startswith("../..") else typed_now,
        answers=generate.without_notes(record),
        source=str(record["_src_path"]),
        version=str(record["_commit"]),
    )


def _upwards(folder: Path) -> Path | None:
    """Look for a project in a folder and above it, up to the root of the repository."""
    for candidate in (folder, *folder.parents):
        if os.path.lexists(candidate / ANSWERS_FILE):
            return candidate
        if (candidate / ".git").exists():
            return None
    return None


def _record(folder: Path, command: str) -> dict[str, Answer]:
    shown = show(folder / ANSWERS_FILE)
    try:
        record = generate.read_record(folder)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{shown} cannot be read.",
            f"{getattr(error, 'strerror', None) or error}.",
            f"Type: git checkout HEAD -- {ANSWERS_FILE}, to have it as it was committed",
        ) from None
    if not generate.is_ours(record):
        raise UserError(
            f"{show(folder.name)} is no project of ddpgen.",
            f"{ANSWERS_FILE} belongs to another template: {show(record.get('_src_path', 'none'))}.",
            f"Type: {command}, with the folder of a project that ddpgen made",
        )
    if not _VERSION.fullmatch(str(record["_commit"])):
        raise UserError(
            f"The template's version in {shown} is none: {show(record['_commit'])}.",
            "An update needs to know what the project was made from.",
            f"Type: git log -p {ANSWERS_FILE}, and write the line _commit as it was",
        )
    return record


def refuse_unfit(project: Project) -> None:
    """Refuse a project whose changes could be lost: without git, or with open changes.

    Raises:
        UserError: If it is so.
    """
    _refuse_outside_git(project)
    _refuse_changes(project)
    if not git.in_project(project.path, "ls-files", "--", ANSWERS_FILE):
        raise UserError(
            f"git does not keep {ANSWERS_FILE} of {project.name}.",
            "What git does not keep, it cannot merge or bring back.",
            f"Type: {project.git('add', '--force', '.')} && "
            f"{project.git('commit', '-m', 'Keep the project')}",
        )
    package = str(project.answers["package_name"])
    if not (project.path / package).is_dir():
        raise UserError(
            f"{project.name} has no folder {show(package)}.",
            f"{ANSWERS_FILE} names it as the package. Updates would leave out all that is in it.",
            f"Type: {project.git('log', '--stat', '--', ANSWERS_FILE)}, "
            "and give the folder, or package_name in that file, its old name",
        )


def _refuse_outside_git(project: Project) -> None:
    try:
        inside = git.in_project(project.path, "rev-parse", "--is-inside-work-tree")
    except git.GitFailed as error:
        if "dubious ownership" in error.said:
            raise UserError(
                f"git does not trust {project.name}: it belongs to another user.",
                "Settings in it could start programs under your name.",
                f"Type: git config --global --add safe.directory {shlex.quote(str(project.path))}, "
                "if you trust it",
            ) from None
        if "not a git repository" not in error.said:
            raise
        inside = b""
    if inside.strip() != b"true":
        raise UserError(
            f"{project.name} is not in a git repository.",
            "An update is merged by git, and taken back by git.",
            f"Type: {project.git('init')} && {project.git('add', '-A')} && "
            f"{project.git('commit', '-m', 'Start')}",
        )


def _refuse_changes(project: Project) -> None:
    # Untracked files count, whatever the person's settings say.
    how = ("--porcelain=v1", "-z", "--no-renames", "--untracked-files=normal")
    changes = git.words(git.in_project(project.path, "status", *how, "--", "."))
    if changes:
        raise UserError(
            f"{project.name} has changes that are not committed: "
            f"{listed(change[3:] for change in changes)}.",
            "They could not be told from those of the update.",
            f"Type: {project.git('add', '-A')} && {project.git('commit', '-m', 'Before')}, "
            f"or {project.git('stash', '-u')}",
        )


def kept_files(project: Project, wanted: Iterable[Path]) -> Files:
    """Read those of the wanted files that git keeps. Links are left out.

    Nothing is written through a link, so that no update leaves the project's folder.
    """
    kept = {Path(name) for name in git.words(git.in_project(project.path, "ls-files", "-z"))}
    return read(project.path, sorted(kept.intersection(wanted)))


def read(folder: Path, names: Iterable[Path]) -> Files:
    """Read the plain files of a folder."""
    files = {}
    for name in names:
        path = folder / name
        # A sparse checkout does not have all of them.
        if path.is_symlink() or not path.is_file():
            continue
        files[name] = File(path.read_bytes(), bool(path.stat().st_mode & stat.S_IXUSR))
    return files


def write(folder: Path, files: Mapping[Path, File]) -> None:
    """Write files into a folder, with the modes of this process."""
    mask = os.umask(0)
    os.umask(mask)
    for name, file in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
        path.chmod((0o777 if file.executable else 0o666) & ~mask)
