"""Where a project is written: is it safe, and how it gets there in one step or not at all.

A project is rendered into a temporary folder on the same disk and then moved. What can fail has
failed before the move, and the move is taken back if it fails half-way.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddpgen import interrupts
from ddpgen.errors import UserError, show

MOST_LISTED = 5


@dataclass(frozen=True)
class Target:
    """A directory that may be written to.

    Attributes:
        typed: The path as it was typed.
        path: The same, absolute.
        exists: Whether the directory is there already (files then move in one by one).
    """

    typed: str
    path: Path
    exists: bool

    @property
    def name(self) -> str:
        """Return the last component, from which names are derived."""
        return self.path.name

    @property
    def base(self) -> Path:
        """Return the existing directory on whose disk the project will be."""
        return self.path if self.exists else _nearest_existing(self.path.parent)


def check(typed: str, *, force: bool = False) -> Target:
    """Refuse a path that cannot or should not be written to.

    Args:
        typed: The path as it was typed.
        force: Allow a directory that is not empty.

    Raises:
        UserError: If the path is no free or empty directory, or may not be written to.
    """
    try:
        target = _locate(typed)
        if target.exists and not force:
            _refuse_entries(target)
    except (OSError, RuntimeError) as error:
        # Before Python 3.13 a circle of links is a RuntimeError.
        raise UserError(
            f"{show(typed)} cannot be looked at.",
            f"The system says: {getattr(error, 'strerror', None) or error}.",
            "Type: another PATH",
        ) from None
    if not os.access(target.base, os.W_OK | os.X_OK):
        raise UserError(
            f"{show(typed)} cannot be written.",
            f"The folder {show(target.base)} does not allow it.",
            "Type: another PATH, or change the permissions of that folder",
        )
    return target


def _locate(typed: str) -> Target:
    path = Path(typed)
    # The last name counts as typed, also where it is a link; "." and ".." are no names.
    path = path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name
    if not typed or not path.name:
        raise UserError(
            f"{show(typed)} is not possible as PATH.",
            "The project needs a folder with a name.",
            "Type: ddpgen new my_project",
        )
    if path.is_dir():
        return Target(typed, path, exists=True)
    if os.path.lexists(path):
        kind = "a link to nothing" if path.is_symlink() and not path.exists() else "a file"
        raise UserError(
            f"{show(typed)} is {kind}.",
            "A project is a folder.",
            "Type: another PATH",
        )
    base = _nearest_existing(path.parent)
    if not base.is_dir():
        raise UserError(
            f"{show(typed)} cannot be made.",
            f"{show(base)} is a file, not a folder.",
            "Type: another PATH",
        )
    return Target(typed, path, exists=False)


def _nearest_existing(path: Path) -> Path:
    while not os.path.lexists(path):
        path = path.parent
    return path


def _refuse_entries(target: Target) -> None:
    entries = sorted(os.listdir(target.path))
    if not entries:
        return
    raise UserError(
        f"{show(target.typed)} is not empty: it holds {listed(entries)}.",
        "A new project would be mixed with them.",
        "Type: another PATH, or add --force to write beside them",
    )


def listed(names: Iterable[object]) -> str:
    """Write names for a message: the first few, and how many more there are."""
    shown = [show(name) for name in names]
    more = len(shown) - MOST_LISTED
    return ", ".join(shown[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


@contextmanager
def stage(target: Target, *, on_disk: bool = True) -> Iterator[Path]:
    """Give a path with the target's name inside a temporary folder that is removed in any case.

    Args:
        target: The directory that will be written.
        on_disk: Use the target's disk, so that the move is a rename. False for a dry run, which
            then leaves the target's surroundings alone.
    """
    with interrupts.held():
        folder = Path(tempfile.mkdtemp(prefix=".ddpgen-", dir=target.base if on_disk else None))
        try:
            with interrupts.let_through():
                yield folder / "new" / target.name
        finally:
            # Old files that could not be put back are the only thing worth keeping.
            if not files_in(folder / "old"):
                shutil.rmtree(folder)


def files_in(folder: Path) -> list[Path]:
    """List the files below a folder, relative to it, sorted."""
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())


def clashes(target: Target, staged: Path) -> list[Path]:
    """List the files of the target that a move would overwrite with other content.

    Raises:
        UserError: If a file stands where a folder must be, or the other way round.
    """
    if not target.exists:
        return []
    different = []
    for file in files_in(staged):
        _refuse_other_kind(target, file)
        there = target.path / file
        if os.path.lexists(there) and not _same(there, staged / file):
            different.append(file)
    return different


def _refuse_other_kind(target: Target, file: Path) -> None:
    for folder in reversed(file.parents[:-1]):
        there = target.path / folder
        # A linked folder counts as a file: writing through it would leave PATH.
        if os.path.lexists(there) and (there.is_symlink() or not there.is_dir()):
            raise UserError(
                f"{show(there)} is {'a link' if there.is_symlink() else 'a file'}.",
                "The project needs a folder of this name.",
                "Type: another PATH, or move it away",
            )
    if (target.path / file).is_dir():
        raise UserError(
            f"{show(target.path / file)} is a folder.",
            "The project needs a file of this name.",
            "Type: another PATH, or move it away",
        )


def _same(there: Path, new: Path) -> bool:
    return (
        there.is_file()
        and there.read_bytes() == new.read_bytes()
        and (there.stat().st_mode & 0o100) == (new.stat().st_mode & 0o100)
    )


def refuse_clashes(target: Target, files: list[Path]) -> None:
    """Say which files would be overwritten.

    Raises:
        UserError: Always.
    """
    one = len(files) == 1
    raise UserError(
        f"{len(files)} {'file' if one else 'files'} of {show(target.typed)} would be overwritten: "
        f"{', '.join(show(file) for file in files)}.",
        "There is no terminal to ask on.",
        f"Type: another PATH, or add --yes to overwrite {'it' if one else 'them'}",
    )


def commit(target: Target, staged: Path, removed: Iterable[Path] = ()) -> None:
    """Move the staged project to its place, wholly or not at all. Call it inside `held()`.

    Args:
        target: The place.
        staged: What `stage` gave.
        removed: Files of an existing place to take away, relative to it.

    Raises:
        UserError: If the system refuses; everything is then as it was before.
        KeyboardInterrupt: If a signal arrived meanwhile; everything is as it was before.
    """
    undo: list[Callable[[], object]] = []
    backup = staged.parent.parent / "old"
    try:
        if target.exists:
            _merge(target.path, staged, backup, undo)
            _remove(target.path, removed, backup, undo)
        else:
            _make_folders(target.path.parent, undo)
            os.rename(staged, target.path)
            undo.append(partial(os.rename, target.path, staged))
        if interrupts.waiting():
            raise KeyboardInterrupt
    except OSError as error:
        _take_back(undo, backup)
        raise UserError(
            f"{show(target.typed)} could not be written.",
            f"The system says: {error.strerror or error} ({show(error.filename)}).",
            "Type: the same again when that is mended; nothing was changed",
        ) from None
    except KeyboardInterrupt:
        _take_back(undo, backup)
        raise
    if backup.exists():
        shutil.rmtree(backup)


def _make_folders(folder: Path, undo: list[Callable[[], object]]) -> None:
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir()
        undo.append(path.rmdir)


def _merge(place: Path, staged: Path, backup: Path, undo: list[Callable[[], object]]) -> None:
    for file in files_in(staged):
        old, new = place / file, staged / file
        if os.path.lexists(old):
            if _same(old, new):
                continue
            _set_aside(old, backup / file, undo)
        else:
            _make_folders(old.parent, undo)
        os.replace(new, old)
        undo.append(partial(os.replace, old, new))


def _remove(
    place: Path, removed: Iterable[Path], backup: Path, undo: list[Callable[[], object]]
) -> None:
    for file in removed:
        _set_aside(place / file, backup / file, undo)
        folder = (place / file).parent
        # git knows no empty folders.
        while folder != place and not any(folder.iterdir()):
            folder.rmdir()
            undo.append(folder.mkdir)
            folder = folder.parent


def _set_aside(old: Path, kept: Path, undo: list[Callable[[], object]]) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    os.replace(old, kept)
    undo.append(partial(os.replace, kept, old))


def _take_back(undo: list[Callable[[], object]], backup: Path) -> None:
    failure = None
    for step in reversed(undo):
        try:
            step()
        except OSError as error:
            # The other steps may still work: each one brings a file back.
            failure = failure or error
    if failure:
        left = ", ".join(show(file) for file in files_in(backup)) or "none"
        raise UserError(
            f"The write failed, and so did taking it back: {failure.strerror or failure}.",
            f"Old files that are not back in their place: {left}.",
            f"They are in {show(backup)}. Move them back by hand",
        ) from None
