"""The template's history, as one git bundle where updates find it: `~/.ddpgen/template.bundle`.

`ddpgen/history` holds a file per release, frozen: what `git fast-import` reads to add it to the
releases before it. The same bytes give the same commits on every machine. The template as it is now
is the newest version. What other ddpgen versions have put into the bundle stays there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ddpgen import __version__, git, interrupts
from ddpgen.errors import UserError, show
from ddpgen.questions import load_config, template_root

NAME = "template.bundle"
# Where projects say that their template is. `~` is expanded when it is used, on every machine.
SOURCE = f"~/.ddpgen/{NAME}"
HISTORY = Path(__file__).resolve().parent / "history"

_URL = re.compile(r"((https?|ssh|git|file)://|git\+[a-z]+://|git@[\w.-]+:|g[hl]:)[!-~]+", re.ASCII)
_BRANCH = "refs/heads/main"
_TAGS = "refs/tags/"
# A reference for each state of a ddpgen whose whole history is in the bundle.
_STAMPS = "refs/ddpgen/"
_FIRST_DAY = 1_700_000_000
_DAY_S = 86_400


@dataclass(frozen=True)
class Store:
    """A bundle that holds this ddpgen's template.

    Attributes:
        bundle: The file.
        tag: The version under which this ddpgen's template is in it.
        tags: All versions in it.
    """

    bundle: Path
    tag: str
    tags: frozenset[str]


def version(tag: str) -> tuple[int, ...]:
    """Return what orders versions: v0.1.0 is before v0.1.0.post3, and that is before v0.2.0."""
    return tuple(int(number) for number in re.findall(r"[0-9]+", tag))


def sync(folder: Path | None = None) -> Store:
    """Put this ddpgen's template, and the releases before it, into the bundle.

    Args:
        folder: Where the bundle is kept, if not in the usual place.

    Raises:
        UserError: If the folder cannot be written, or there is no git.
    """
    frozen = history()
    present = commit(f"v{__version__}", len(frozen) + 1, template_files())
    digest = hashlib.sha256(b"".join([*frozen.values(), present])).hexdigest()
    stamp = f"{_STAMPS}{digest}"
    folder = folder or _home()
    try:
        return _opened(folder, stamp) or _renewed(folder, stamp, frozen, present)
    except OSError as error:
        raise UserError(
            f"The template's history cannot be kept in {show(folder)}.",
            f"The system says: {error.strerror or error}.",
            "Type: export DDPGEN_HOME=FOLDER, with a folder that may be written; `ddpgen update` "
            "works without, plain `copier update` looks in ~/.ddpgen alone",
        ) from None


def _home() -> Path:
    named = os.environ.get("DDPGEN_HOME")
    if named:
        return Path(named).absolute()
    home = Path(os.path.expanduser("~"))
    # A home that does not exist is not made: root could make it anywhere.
    if os.environ.get("HOME") == "" or not home.is_dir():
        raise UserError(
            f"There is no home folder: {show(os.environ.get('HOME', home))}.",
            f"The template's history is kept in {SOURCE}.",
            "Type: export DDPGEN_HOME=FOLDER, with a folder that may be written; `ddpgen update` "
            "works without",
        )
    return home / ".ddpgen"


def check_url(url: str) -> None:
    """Refuse a URL at which copier would not find a template later, or that holds a password.

    Raises:
        UserError: If it is one.
    """
    why = None
    if not _URL.fullmatch(url):
        why = "A path, for one, is not there on other machines."
    elif not (url.endswith(".git") or url.startswith(("git+", "git@", "gh:", "gl:"))):
        why = "copier takes only URLs with git+ before them or .git at their end for git's."
    elif re.search(r"//[^/@]*:[^/@]*@", url):
        why = "It holds a password, and would stand in a file that is committed."
    if why:
        raise UserError(
            f"--template-url {show(url)} is not possible.",
            why,
            "Type: --template-url git+https://HOST/TEAM/REPOSITORY",
        )


def history() -> dict[str, bytes]:
    """Return the frozen releases in their order: tag and what adds it."""
    files = sorted(HISTORY.glob("v*.fi"), key=lambda file: version(file.stem))
    return {file.stem: file.read_bytes() for file in files}


def template_files(root: Path | None = None) -> dict[str, bytes]:
    """Return the files of the template by their path, as they are versioned.

    Args:
        root: The folder with copier.yml; this ddpgen's if not given.
    """
    root = root or template_root()
    left_out = [name for name in load_config(root)["_exclude"] if "{" not in name]
    files = {".gitattributes": b"* text=auto eol=lf\n"}
    for file in [root / "copier.yml", *sorted((root / "template").rglob("*"))]:
        path = file.relative_to(root)
        # pip compiles the template's Python files when it installs a wheel.
        if file.is_dir() or any(fnmatch(part, name) for part in path.parts for name in left_out):
            continue
        content = file.read_bytes()
        if b"\0" not in content:
            content = content.replace(b"\r\n", b"\n")
        files[path.as_posix()] = content
    return files


def commit(
    tag: str, number: int, files: Mapping[str, bytes], removed: Iterable[str] | None = None
) -> bytes:
    """Write the commands of `git fast-import` for a version. They depend on nothing else.

    Args:
        tag: Its name.
        number: How many versions there are with it.
        files: All its files; with `removed` only those that differ from the version before.
        removed: Files of the version before that it does not have.
    """
    date = _FIRST_DAY + number * _DAY_S
    lines = [
        b"commit %s\n" % _BRANCH.encode(),
        b"committer ddpgen <ddpgen@localhost> %d +0000\n" % date,
        _data(tag.encode()),
        *([b"deleteall\n"] if removed is None else []),
        *(b"D %s\n" % path.encode() for path in sorted(removed or ())),
    ]
    for path, content in sorted(files.items()):
        # As in a project: wheels know no modes.
        mode = b"100755" if content.startswith(b"#!") else b"100644"
        lines += [b"M %s inline %s\n" % (mode, path.encode()), _data(content)]
    return b"".join(lines)


def _data(content: bytes) -> bytes:
    return b"data %d\n%s\n" % (len(content), content)


def load(repository: Path, frozen: Mapping[str, bytes], present: bytes = b"") -> None:
    """Make a repository of frozen releases, each with its tag, and the present one without.

    Raises:
        UserError: If there is no git, or it fails.
    """
    repository.mkdir()
    git.run(repository, "init", "--quiet", "--bare", "--template=")
    git.run(repository, "symbolic-ref", "HEAD", _BRANCH)
    stream = b"".join(
        b"%sreset %s%s\nfrom %s\n\n" % (piece, _TAGS.encode(), tag.encode(), _BRANCH.encode())
        for tag, piece in frozen.items()
    )
    git.run(repository, "fast-import", "--quiet", given=stream + present)


def export(store: Store, tag: str, folder: Path) -> Path:
    """Write a version of the template into a new folder, and return the folder."""
    folder.mkdir(parents=True)
    git.run(folder, "init", "--quiet", "--template=")
    git.run(folder, "fetch", "--quiet", str(store.bundle), f"{_TAGS}{tag}")
    git.run(folder, "checkout", "--quiet", "FETCH_HEAD")
    return folder


def _opened(folder: Path, stamp: str) -> Store | None:
    """Return the store if all of this ddpgen is in the bundle."""
    refs = _refs(folder / NAME)
    tags = {name.removeprefix(_TAGS): hash_ for name, hash_ in refs.items() if _TAGS in name}
    found = [tag for tag, hash_ in tags.items() if hash_ == refs.get(stamp)]
    return Store(folder / NAME, found[0], frozenset(tags)) if found else None


def _refs(bundle: Path) -> dict[str, str]:
    """Read the references in a bundle's header; none if there is no bundle, or a damaged one."""
    try:
        content = bundle.read_bytes()
    except FileNotFoundError:
        return {}
    header, _, pack = content.partition(b"\n\n")
    first, *lines = header.decode(errors="replace").splitlines() or [""]
    if first != "# v2 git bundle" or hashlib.sha1(pack[:-20]).digest() != pack[-20:]:
        return {}
    return {name: hash_ for hash_, _, name in (line.partition(" ") for line in lines)}


def _renewed(folder: Path, stamp: str, frozen: Mapping[str, bytes], present: bytes) -> Store:
    git.program()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        # Another process may have done it while this one waited.
        opened = _opened(folder, stamp)
        if opened:
            return opened
        ready = folder / "building-done"
        with _building(folder) as scratch:
            made = _build(scratch / "repository", folder / NAME, stamp, frozen, present)
            os.replace(made, ready)
        # Last, so that a kill before it leaves the old one and a kill after it nothing else.
        os.replace(ready, folder / NAME)
        opened = _opened(folder, stamp)
    assert opened, "what was built has what it was built for"
    return opened


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time renew the bundle. The system frees the lock of a killed one."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for leftover in folder.glob("building-*"):
            # Its process was killed: it would hold the lock.
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        yield


@contextmanager
def _building(folder: Path) -> Iterator[Path]:
    with (
        interrupts.held(),
        tempfile.TemporaryDirectory(prefix="building-", dir=folder) as scratch,
        interrupts.let_through(),
    ):
        yield Path(scratch)


def _build(
    repository: Path, bundle: Path, stamp: str, frozen: Mapping[str, bytes], present: bytes
) -> Path:
    """Make a new bundle from the old one and this ddpgen; return where it is."""
    load(repository, frozen, present)
    _fetch_missing(repository, bundle)
    tag = _name_present(repository)
    git.run(repository, "update-ref", stamp, f"{_TAGS}{tag}")
    newest = max(_tags(repository), key=version)
    git.run(repository, "update-ref", _BRANCH, f"{_TAGS}{newest}")
    made = repository / NAME
    git.run(repository, "bundle", "create", "--quiet", str(made), "--all")
    with made.open("rb") as file:
        os.fsync(file.fileno())
    return made


def _tags(repository: Path) -> list[str]:
    return git.run(repository, "tag", "--list").decode().split()


def _fetch_missing(repository: Path, bundle: Path) -> None:
    """Take over what other ddpgen versions have put into the bundle. Frozen releases stay."""
    refs = _refs(bundle)
    if not refs and bundle.exists():
        print(f"Note: {show(bundle)} was damaged and is made anew.", file=sys.stderr)
    there = {f"{_TAGS}{tag}" for tag in _tags(repository)}
    wanted = [name for name in refs if name.startswith((_TAGS, _STAMPS)) and name not in there]
    if wanted:
        specs = [f"{name}:{name}" for name in wanted]
        git.run(repository, "fetch", "--quiet", "--no-tags", str(bundle), *specs)


def _name_present(repository: Path) -> str:
    """Give the present template a tag and return it. A tag that exists never moves.

    An edited checkout of a version that has its tag becomes a post release of it: that sorts after
    it, and copier takes it for an update.
    """
    here = git.run(repository, "rev-parse", f"{_BRANCH}^{{tree}}")
    own = f"v{__version__}"
    known = [tag for tag in _tags(repository) if tag == own or tag.startswith(f"{own}.post")]
    for tag in known:
        if git.run(repository, "rev-parse", f"{_TAGS}{tag}^{{tree}}") == here:
            return tag
    tag, number = own, int(time.time())
    while tag in known:
        tag, number = f"{own}.post{number}", number + 1
    git.run(repository, "tag", tag, _BRANCH)
    return tag
